"""What all command lines share: values checked by their type, help with defaults, and one way to refuse.

Bad input is one sentence on standard error and exit code 2, whichever command it was given to. A traceback is of a
fault in this library, and has code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import dis
import math
import os
import shutil
import signal
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from ondevice import extras

FAULT = 1  # exit code where the library itself is wrong
REFUSED = 2  # exit code on bad input
INTERRUPTED, TERMINATED = 130, 143  # exit codes after SIGINT and SIGTERM, as a shell has them
WIDTH = 100  # columns of help; whole, it fits a screen
_LIBRARY = Path(__file__).resolve().parents[1]
_MISUSE = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, TypeError)  # of objects, in code


class _Help(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=min(shutil.get_terminal_size().columns, WIDTH))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Paragraphs fill the lines; one with an indented line stays as it is."""
        paragraphs = text.strip().split("\n\n")
        return "\n\n".join(each if "\n " in f"\n{each}" else textwrap.fill(each, width) for each in paragraphs)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        silent = action.default in (None, False, "", argparse.SUPPRESS) or action.default == [] or "default" in text
        return text if silent else f"{text} (default: %(default)s)"


class Parser(argparse.ArgumentParser):
    """argparse's, with defaults and an example in its help, and errors of one sentence.

    example: a whole command line. named: argparse's.
    """

    def __init__(self, prog: str, example: str = "", **named: Any) -> None:
        super().__init__(prog=prog, **{"formatter_class": _Help, **named})
        self.epilog = f"example:\n  {example}" if example else None

    def error(self, message: str) -> NoReturn:
        self.exit(REFUSED, f"{self.prog}: {message}; --help shows what it takes.\n")


@contextlib.contextmanager
def refusing(program: str) -> Iterator[None]:
    """Ends the program with one sentence and code 2 on what it cannot use, by its own word or by another library's.

    A fault of this library ends it with a traceback and code 1, an interrupt with code 130, SIGTERM with 143. What is
    half-written is put away in each case.
    """
    in_main = threading.current_thread() is threading.main_thread()  # the only one that may set a handler
    unhandled = in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if unhandled:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except Exception as error:
        if is_fault(error):
            traceback.print_exc()
            print(f"{program}: this is a fault of the program. Please report it with the lines above.", file=sys.stderr)
            sys.exit(FAULT)
        print(f"{program}: {sentence(error)}", file=sys.stderr)
        sys.exit(REFUSED)
    finally:
        if unhandled:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextlib.contextmanager
def loading(program: str, extra: str) -> Iterator[None]:
    """Around a program's imports: ends it with one sentence where a package of this extra is missing."""
    try:
        with extras.needing(extra, program):
            yield
    except ImportError as error:
        if is_fault(error):
            raise
        why = sentence(error)  # of the program, or of a part of the library that it imports
        print(why if why.startswith(program) else f"{program}: {why}", file=sys.stderr)
        sys.exit(REFUSED)


def is_fault(error: BaseException) -> bool:
    """Whether an exception is a fault of this library, and no refusal of what it was given.

    It is a fault where it comes out of the library's own code and is not a ValueError that a `raise` there gives.
    Missing files and packages, bytes that are no text, too little memory, and the errors of other libraries speak of
    the input.
    """
    if isinstance(error, ImportError):
        return (error.name or "").startswith("ondevice")
    if isinstance(error, (MemoryError, OSError, UnicodeError)):
        return False
    *_, trace = _traces(error)
    code = trace.tb_frame.f_code
    if not _is_own(code.co_filename):
        return False
    home = type(error).__module__
    if not isinstance(error, _MISUSE) and (type(error) is Exception or not home.startswith(("builtins", "ondevice"))):
        return False  # native code raises its own classes in its caller's frame
    raised = dis.opname[code.co_code[trace.tb_lasti]] == "RAISE_VARARGS"  # else an operation failed
    return not (raised and isinstance(error, ValueError))


def _traces(error: BaseException) -> Iterator[TracebackType]:
    """Of each frame that an exception came through, the innermost last."""
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_own(file: str) -> bool:
    """Whether a file of code is this library's."""
    path = Path(file)
    return path.is_relative_to(_LIBRARY) and path.relative_to(_LIBRARY).parts[0].startswith("ondevice")


def sentence(error: BaseException) -> str:
    """An exception's message on one line; of the system's errors, the file and what is wrong with it."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}." if error.filename else f"{error.strerror}."
    words = " ".join(str(error).split())
    kind = type(error).__name__
    if not words:
        return kind
    return f"{kind}: {words}" if isinstance(error, _MISUSE) else words  # a KeyError's message is the key alone


def number(
    low: float = -math.inf, high: float = math.inf, *, above: float = -math.inf, kind: Any = float
) -> Callable[[str], Any]:
    """The type of an argument that is a number from low to high and above `above`; kind: int for a whole one."""
    limits = [f"above {above:g}"] if above > -math.inf else [f"from {low:g}"] if low > -math.inf else []
    limits += [f"to {high:g}"] if high < math.inf else []

    def convert(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (low <= value <= high and value > above):
            words = " ".join(["a whole number" if kind is int else "a number", *limits])
            raise argparse.ArgumentTypeError(f"it is {words}, not {text!r}")
        return value

    return convert


def whole(low: int = 0, high: float = math.inf) -> Callable[[str], int]:
    """The type of an argument that is a whole number from low to high."""
    return number(low, high, kind=int)


port = whole(0, 65535)
count = whole(1)
share, positive, seconds = number(0, 1), number(above=0), number(0)


def address(text: str) -> tuple[str, int]:
    """The type of an argument that is HOST:PORT; an IPv6 host may stand in brackets."""
    host, _, number_ = text.rpartition(":")
    if not host or not number_.isdecimal() or int(number_) > 65535:
        raise argparse.ArgumentTypeError(f"an address is HOST:PORT with a port from 0 to 65535, not {text!r}")
    return host.strip("[]"), int(number_)


def existing(text: str) -> Path:
    """The type of an argument that is a file to read."""
    path = Path(text).expanduser()
    if not path.is_file() or not os.access(path, os.R_OK):
        raise argparse.ArgumentTypeError(f"there is no file {text!r} that can be read")
    return path


def writable(text: str) -> Path:
    """The type of an argument that is a file or folder to write, or to make."""
    path = Path(text).expanduser()
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not os.access(there, os.W_OK) or (there != path and not there.is_dir()):
        raise argparse.ArgumentTypeError(f"nothing can be written to {text!r}")
    return path


def child(*first: str) -> list[str]:
    """The words that a program which only the library starts was started with; refuses those who start it by hand.

    first: what the first word may be; without any, it is a file.
    """
    words = sys.argv[1:]
    if not words or (words[0] not in first if first else not Path(words[0]).is_file()):
        name = getattr(sys.modules["__main__"].__spec__, "name", "This")
        print(f"{name} is a part of another program and is not started by hand.", file=sys.stderr)
        sys.exit(REFUSED)
    return words


def no_arguments(program: str, description: str) -> None:
    """For a command that takes none: --help says what it does, and anything else is refused."""
    Parser(program, description=description).parse_args()

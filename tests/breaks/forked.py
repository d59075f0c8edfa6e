"""Checks that run in processes of their own: first without a fault, then with each, and what became of them."""

from __future__ import annotations

import contextlib
import dis
import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from _pytest.main import pytest_runtestloop
from injection import ROOT, Fault, Gone, Injection

SECONDS = 120  # of one fault's check; most take a few
# The server imports the library once for all faults. A submodule is named where transformers loads it late.
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        "pytest",
        "hypothesis.extra.numpy",
        "matplotlib.pyplot",
        "nbformat",
        "transformers.models.llama.modeling_llama",
        "transformers.models.qwen3.modeling_qwen3",
        "ondevice_studies.claims",
    ]
)


@dataclass(eq=False)
class Outcome:
    """Of a check in a process: the ids that failed, those of them that failed by a judgement, and their tracebacks.

    used: whether the code came upon the fault. error: why there is no outcome.
    """

    failed: list[str] = field(default_factory=list)
    judged: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    used: bool = False
    error: str = ""

    @pytest.hookimpl
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> None:
        if call.excinfo is not None and not isinstance(call.excinfo.value, pytest.skip.Exception):
            self.failed.append(item.nodeid)
            self.texts.append("".join(traceback.format_exception(call.excinfo.value)[-3:]))
            if is_a_judgement(call.excinfo.value):
                self.judged.append(item.nodeid)


def is_a_judgement(error: BaseException) -> bool:
    """A check's assertion or a `raise` of the library, and not what a fault that fits no longer would run into."""
    if isinstance(error, BaseExceptionGroup):
        return any(map(is_a_judgement, error.exceptions))
    end = error.__traceback__
    while end is not None and end.tb_next is not None:
        end = end.tb_next
    code = end.tb_frame.f_code
    refused = code.co_filename.startswith(f"{ROOT}/lib/") and code.co_code[end.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return refused or isinstance(error, AssertionError | pytest.fail.Exception)


def outcomes(faults: Sequence[Fault], log: Path) -> tuple[Outcome, list[Outcome]]:
    """Of faults whose checks are in one file, which is read once: all checks without a fault, and each with its own."""
    receiver, sender = FORKED.Pipe(duplex=False)
    process = FORKED.Process(target=_serve, args=([fault.name for fault in faults], str(log), sender))
    process.start()
    sender.close()
    try:
        if receiver.poll(SECONDS * (2 + len(faults))):
            return receiver.recv()
        os.killpg(process.pid, signal.SIGKILL)  # with the fork that hangs
        raise AssertionError(f"{faults[0].file}: not done in time.")
    except EOFError:
        raise AssertionError(f"{faults[0].file} cannot be run:\n{log.read_text()[-3000:]}") from None
    finally:
        process.kill()
        process.join()


class _Apart:
    """A plugin that runs each check in a fork, so that none sees what another one left."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = faults
        self.outcomes: list[Outcome] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        every = list(dict.fromkeys(fault.check for fault in self.faults))
        for checks, fault in [(every, None), *(([fault.check], fault) for fault in self.faults)]:
            receiver, sender = multiprocessing.Pipe(duplex=False)
            child = os.fork()
            if not child:
                _run(session, checks, fault, sender)
            sender.close()
            outcome = Outcome(error=f"{', '.join(checks)}: dead, or not done in {SECONDS} s.")
            with contextlib.suppress(EOFError):
                outcome = receiver.recv() if receiver.poll(SECONDS) else outcome
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            self.outcomes.append(outcome)
        return True


def _run(session: pytest.Session, checks: Sequence[str], fault: Fault | None, sender) -> None:
    """In the fork, which ends here."""
    outcome = Outcome()
    try:
        tests = {check: [item for item in session.items if _is_of(item.nodeid, check)] for check in checks}
        missing = [check for check, items in tests.items() if not items]
        if fault is not None and missing:
            raise Gone(f"There is no test {missing[0]} any more.")
        session.items = list(dict.fromkeys(item for items in tests.values() for item in items))
        with tempfile.TemporaryDirectory() as folder:
            injection = Injection(Path(folder))
            if fault is not None:
                fault.put(injection)
            injection.used = False  # by the fault itself
            session.config.pluginmanager.register(outcome)
            session.config.option.maxfail = int(fault is not None)
            with contextlib.suppress(session.Failed):
                pytest_runtestloop(session)
            outcome.used = injection.used or injection.unseen
    except Exception as error:
        outcome.error = "".join(traceback.format_exception_only(error))
    finally:
        sender.send(outcome)
        os._exit(0)


def _is_of(name: str, check: str) -> bool:
    return name == f"tests/{check}" or name.startswith((f"tests/{check}[", f"tests/{check}::"))


def _serve(names: Sequence[str], log: str, sender) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(ROOT)
    from faults import FAULTS

    faults = [fault for fault in FAULTS if fault.name in names]
    apart = _Apart(faults)
    options = ["-q", "--assert=plain", "-p", "no:cacheprovider", f"--rootdir={ROOT}", f"tests/{faults[0].file}"]
    pytest.main(options, plugins=[apart])
    if len(apart.outcomes) == 1 + len(faults):
        sender.send((apart.outcomes[0], apart.outcomes[1:]))

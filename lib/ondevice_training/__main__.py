"""Command line: `python -m ondevice_training reranker --parent PARENT --queries N --out FOLDER`."""

from __future__ import annotations

from ondevice import commands

with commands.loading("python -m ondevice_training", "notebooks"):
    from ondevice_training.reranking import commands as reranking


def main(given: list[str] | None = None) -> None:
    """Train a reranker, or go on training it; evaluate one."""
    parser = commands.Parser("python -m ondevice_training", description=main.__doc__)
    reranking.register(parser.add_subparsers(dest="command", required=True))
    arguments = parser.parse_args(given)
    with commands.refusing(f"{parser.prog} {arguments.command}"):
        arguments.handler(arguments)


if __name__ == "__main__":
    main()

"""Record what the way through DiSCo's router adds on this machine: data/records/disco/router.<machine>.csv.

Seconds to the first token of a server that answers at once, asked directly and through the router, where a slow device
races it: one caller, a block of answers each way in turn. A step of `make record MACHINE=name`; by itself:

    python tests/benchmarks/record_disco_router.py
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bench_disco_router import LOSER_TTFT_S, block, configuration, process

from ondevice.evidence import Recorder, machine_name

ANSWERS = 20  # in a block


async def blocks(kept: Recorder, bases: dict[str, str], count: int) -> None:
    """Both ways in turn; the first round warms up."""
    for number in range(-1, count):
        for way, base in bases.items():
            found = await block(base, 1, ANSWERS, 0.0, number, tokens=1)
            if number >= 0:
                kept.add([{"way": way, "block": number, "request": place, "seconds": seconds}
                          for place, seconds in enumerate(found)])  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=40)
    options = parser.parse_args(arguments)
    parameters = {"answers": ANSWERS, "blocks": options.blocks}
    kept = Recorder("disco", "router", ["way", "block"], parameters, machine=machine_name())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        direct = stack.enter_context(process("replay", "--ttft", "0", "--tbt", "0"))
        device = stack.enter_context(process("replay", "--ttft", str(LOSER_TTFT_S), "--tbt", "0"))
        config = configuration(folder / "config.yaml", device, direct)
        router = stack.enter_context(process("serve", "--config", str(config)))
        asyncio.run(blocks(kept, {"direct": direct, "router": router}, options.blocks))
    print(kept.finish())


if __name__ == "__main__":
    main()

"""`python -m ondevice.network --listen HOST:PORT --to HOST:PORT --delay-ms 100`: a relay with a link's delays."""

from __future__ import annotations

import argparse
import asyncio
import math
import signal

from ondevice import commands
from ondevice.commands import address, positive, seconds, share
from ondevice.network.link import PERFECT, RETRANSMISSION, Link, Sinusoid
from ondevice.network.relay import Server, event_loop


def main(arguments: list[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    with commands.refusing(parser.prog):
        link = _link(options)
        up, down = (link if options.only in (None, direction) else PERFECT for direction in ("up", "down"))
        with asyncio.Runner(loop_factory=event_loop) as runner:
            runner.run(_serve(options, up, down))


async def _serve(options: argparse.Namespace, up: Link, down: Link) -> None:
    """Until the process is interrupted or terminated."""
    server = Server(options.to, options.listen, up, down, seed=options.seed)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    print(f"Listening on {options.listen[0]}:{await server.start()}", flush=True)
    await stop.wait()


def _link(options: argparse.Namespace) -> Link:
    delay = options.delay_ms / 1e3
    return Link(
        Sinusoid(delay, options.swing_ms / 1e3, options.period_s) if options.swing_ms else delay,
        options.jitter_ms / 1e3,
        options.bandwidth_mbps * 1e6 / 8,
        options.loss,
        options.retransmission_ms / 1e3,
    )


def _parser() -> argparse.ArgumentParser:
    parser = commands.Parser(
        "python -m ondevice.network", description="Relay TCP connections over a link.",
        example="python -m ondevice.network --listen 127.0.0.1:7601 --to 127.0.0.1:7600 --delay-ms 100",
    )  # fmt: skip
    add = parser.add_argument
    add("--listen", type=address, default=("127.0.0.1", 0), metavar="HOST:PORT", help="default: any free port")
    add("--to", type=address, required=True, metavar="HOST:PORT", help="where to")
    add("--delay-ms", type=seconds, default=0.0, help="one way")
    add("--swing-ms", type=seconds, default=0.0, help="the delay swings by this much, as a sine")
    add("--period-s", type=positive, default=20 * math.pi, help="of the swing; default: 20 pi")
    add("--jitter-ms", type=seconds, default=0.0, help="added to the delay, uniform from 0")
    add("--bandwidth-mbps", type=positive, default=math.inf, help="10^6 bits a second; default: no limit")
    add("--loss", type=share, default=0.0, help="probability that a segment must be sent again")
    add("--retransmission-ms", type=seconds, default=1e3 * RETRANSMISSION, help="how much later it comes then")
    add("--only", choices=("up", "down"), help="from or to those who connect; default: both ways")
    add("--seed", type=commands.whole(), default=0, help="of jitter and losses")
    return parser


if __name__ == "__main__":
    main()

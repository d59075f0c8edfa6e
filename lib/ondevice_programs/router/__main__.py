"""A gateway for OpenAI clients that races a device against a server.

At every moment the constrained side (`serve --constrained`) has read at most the share `serve --budget` of all input
tokens; by default that is all of them. With `serve --pace` and prices, an answer may move to the cheaper side in
mid-stream, unless `serve --migration no`. Beyond loopback callers need a key (`serve --key`).
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import socket
from pathlib import Path
from typing import Any, get_args

from ondevice import commands
from ondevice.commands import existing, port, positive, seconds, share
from ondevice_papers.disco.policy import SIDES
from ondevice_programs.router.listening import listener

with commands.loading("ondevice-router", "router"):
    import uvicorn
    from starlette.types import ASGIApp

    from ondevice_programs.router import config
    from ondevice_programs.router.app import create_app
    from ondevice_programs.router.replay import Fault, FaultKind, Timing, create_replay
    from ondevice_programs.router.router import Router


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(name)s %(message)s")
    with commands.refusing(f"ondevice-router {options.command}"):
        app = options.build(options)
        opened = _opened(options.host, options.port)
    host, port = opened.getsockname()[:2]
    print(f"Listening on http://{host}:{port}/v1", flush=True)
    gc.collect()
    gc.freeze()  # what is loaded now stays: the collector need not walk it while streams wait
    server = uvicorn.Config(app, log_config=None, log_level="warning", access_log=False, timeout_graceful_shutdown=5)
    _Server(server).run(sockets=[opened])


class _Server(uvicorn.Server):
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Streams that still run end with an error that their readers get, not with a closed connection."""
        getattr(self.config.app.state, "break_off", list)()  # type: ignore[union-attr]
        await super().shutdown(sockets)


def _opened(host: str, port: int) -> socket.socket:
    try:
        return listener(host, port)
    except OSError as error:
        raise ValueError(f"Nobody can listen on {host}:{port}: {error.strerror}.") from None


def build_router(options: argparse.Namespace) -> ASGIApp:
    settings = {name: getattr(options, name) for name in ("budget", "constrained", "pace", "migration")}
    raw: dict[str, Any] = {"router_settings": {name: it for name, it in settings.items() if it is not None}}
    if options.key:
        raw["general_settings"] = {"master_key": f"os.environ/{options.key}"}
    urls = [getattr(options, side) for side in SIDES]
    if options.config is None:
        if None in urls:
            raise ValueError("Name the endpoints: --config FILE, or --device URL and --server URL.")
        raw["model_list"] = [_deployment(options, side) for side in SIDES]
    elif any(urls):
        raise ValueError("The endpoints stand in the file or on the command line, not in both.")
    found = config.load(options.config, raw)
    if not config.is_loopback(options.host) and not found.general_settings.master_key:
        raise ValueError(f"Whoever reaches {options.host} could spend your budget: set master_key, or --key VARIABLE.")
    return create_app(Router(found))


def _deployment(options: argparse.Namespace, side: str) -> dict[str, Any]:
    model = getattr(options, f"{side}_model")
    key = getattr(options, f"{side}_key")
    asked = {"model": model, "api_base": getattr(options, side)}
    secret = {"api_key": f"os.environ/{key}"} if key else {}
    return {"model_name": model, "litellm_params": asked | secret, "model_info": {"side": side}}


def build_replay(options: argparse.Namespace) -> ASGIApp:
    ttft = _list(options.ttft_file) if options.ttft_file else [options.ttft]
    kind, _, at = options.fault.partition(":")
    if (kind and kind not in get_args(FaultKind)) or not (at or "0").isdecimal():
        raise ValueError(f"--fault is one of {', '.join(get_args(FaultKind))}, then :TOKENS, not {options.fault!r}.")
    coins = random.Random(options.seed)

    def fault(_: int) -> Fault | None:
        return Fault(kind, int(at or 0), options.fault_seconds) if coins.random() < options.fault_rate else None

    timing = Timing(ttft, options.tbt, options.prefill_rate)
    return create_replay(timing, options.voice, fault if kind else None)


def _list(path: Path) -> list[float]:
    """A JSON list of numbers."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(x, int | float) for x in found):
        raise ValueError(f"{path} does not hold a JSON list of numbers.")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = commands.Parser("ondevice-router", description=__doc__)
    programs = parser.add_subparsers(dest="command", required=True)
    serve = programs.add_parser(
        "serve",
        help="the router between a device and a server side",
        usage="%(prog)s [options]",
        example="ondevice-router serve --config config.yaml --budget 0.3",
    )
    serve.set_defaults(build=build_router)
    serve.add_argument("--config", type=existing, metavar="FILE", help="config.yaml; the flags below override it")
    for side in SIDES:
        group = serve.add_argument_group(f"{side}, without a file")
        group.add_argument(f"--{side}", metavar="URL", help="base URL of an OpenAI-compatible API")
        group.add_argument(f"--{side}-model", default="default", metavar="NAME", help="model to ask for")
        group.add_argument(f"--{side}-key", metavar="VARIABLE", help="environment variable that holds its API key")
    serve.add_argument("--budget", type=share, help="share of input tokens for the constrained side (default: 1)")
    serve.add_argument("--constrained", choices=SIDES, help="the side that the budget limits (default: server)")
    serve.add_argument("--pace", type=positive, metavar="TOKENS/S", help="show tokens at this rate (default: at once)")
    serve.add_argument("--migration", choices=("stop", "overlap", "no"), help="with a pace and prices (default: stop)")
    serve.add_argument("--key", metavar="VARIABLE", help="environment variable that holds the key of callers")
    replay = programs.add_parser(
        "replay",
        help="an endpoint that replays timing over a deterministic text",
        example="ondevice-router replay --ttft 0.3 --tbt 0.02 --port 8401",
    )
    replay.set_defaults(build=build_replay)
    replay.add_argument("--ttft", type=seconds, default=0.1, metavar="S", help="time to the first token")
    replay.add_argument("--ttft-file", type=existing, metavar="JSON", help="a list of seconds, one a request, in turn")
    replay.add_argument("--tbt", type=seconds, default=0.02, metavar="S", help="time between tokens")
    replay.add_argument("--prefill-rate", type=positive, default=float("inf"), metavar="TOKENS/S", help="of the prompt")
    replay.add_argument("--voice", default="", help="endpoints of different voices say different texts")
    replay.add_argument("--fault", default="", metavar="KIND[:TOKENS]", help="what goes wrong, after so many tokens")
    replay.add_argument("--fault-rate", type=share, default=1.0, help="share of requests with the fault")
    replay.add_argument("--fault-seconds", type=seconds, default=0.0, help="length of a delay")
    replay.add_argument("--seed", type=commands.whole(), default=0, help="of which requests have it")
    for program, usual, level in ((serve, 8400, "info"), (replay, 8401, "warning")):
        program.add_argument("--host", default="127.0.0.1", help="address to listen on")
        program.add_argument("--port", type=port, default=usual, help="0 takes a free one")
        program.add_argument("--log-level", default=level, choices=("critical", "error", "warning", "info"))
    return parser


if __name__ == "__main__":
    main()

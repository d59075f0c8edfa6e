"""`python -m ondevice.disco serve`: the router; `replay`: an endpoint that replays a trace's timing."""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import socket
from pathlib import Path
from typing import get_args

import uvicorn
from starlette.types import ASGIApp

from ondevice import commands
from ondevice.commands import existing, port, positive, seconds, share
from ondevice.disco import traces
from ondevice.disco.budget import TokenBucket
from ondevice.disco.distributions import Device, Latency, Lengths
from ondevice.disco.endpoints import Endpoint
from ondevice.disco.handoff import HandoffRule, StatedOverhead
from ondevice.disco.loopback import listener
from ondevice.disco.named_policies import Known, known_names, named_policy
from ondevice.disco.policy import NEVER, Constrained
from ondevice.disco.replay import Fault, FaultKind, Timing, create_replay
from ondevice.disco.router import Router
from ondevice.disco.serve import create_app
from ondevice.disco.session import Timeouts


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    with commands.refusing(f"python -m ondevice.disco {options.command}"):
        app = options.build(options)
        opened = _opened(options.host, options.port)
    host, port = opened.getsockname()[:2]
    print(f"Listening on http://{host}:{port}/v1", flush=True)
    gc.collect()
    gc.freeze()  # what is loaded now stays: the collector need not walk it while streams wait
    config = uvicorn.Config(app, log_level=options.log_level, access_log=False)
    uvicorn.Server(config).run(sockets=[opened])


def _opened(host: str, port: int) -> socket.socket:
    try:
        return listener(host, port)
    except OSError as error:
        raise ValueError(f"Nobody can listen on {host}:{port}: {error.strerror}.") from None


def build_router(options: argparse.Namespace) -> ASGIApp:
    policy, constrained = named_policy(options.policy, options.constrained, options.budget, _known(options))
    device = Endpoint(
        options.device, options.device_model, options.device_api, not options.device_cannot_continue,
        *_prices(options.device_prices), api_key=_key(options.device_key),
    )  # fmt: skip
    server = Endpoint(
        options.server, options.server_model, options.server_api, not options.server_cannot_continue,
        *_prices(options.server_prices), api_key=_key(options.server_key),
    )  # fmt: skip
    router = Router(
        device,
        server,
        policy,
        constrained=constrained,
        timeouts=Timeouts(options.first_token_timeout, options.token_timeout, options.deadline),
        bucket=TokenBucket(options.budget, burst=NEVER) if options.hard_budget else None,
        pace=options.pace,
        migration=_migration(options, constrained, device, server),
    )
    return create_app(router)


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


def _known(options: argparse.Namespace) -> Known:
    """What policies are computed from: files of the user's own measurements, or the committed traces."""
    rates = _numbers(options.device_speed, 2, "--device-speed is two rates in tokens/s, such as 51.8,20.1")
    return Known(
        Lengths.of(_list(options.past_lengths)) if options.past_lengths else traces.lengths(),
        Latency.of(_list(options.past_ttft)) if options.past_ttft else traces.server(options.server_like),
        Device("device", *rates),
    )


def _list(path: Path) -> list[float]:
    """A JSON list of numbers."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(x, int | float) for x in found):
        raise ValueError(f"{path} does not hold a JSON list of numbers.")
    return found


def _migration(
    options: argparse.Namespace, constrained: Constrained, device: Endpoint, server: Endpoint
) -> HandoffRule | None:
    if options.migrate == "no":
        return None
    if options.pace is None:
        raise ValueError("--migrate needs --pace: without a pace no buffer builds up to mask the hand-off.")
    source, target = (device, server) if constrained == "device" else (server, device)
    prices = source.price_output, target.price_output, target.price_prompt
    return StatedOverhead(options.pace, options.handover, options.answer_tokens, *prices, handoff=options.migrate)


def _prices(text: str) -> tuple[float, float]:
    """Prices per token from 'prompt,output' per million tokens."""
    prompt, output = _numbers(text, 2, "Prices are two numbers per million tokens, such as 0.15,0.60")
    return prompt / 1e6, output / 1e6


def _numbers(text: str, count: int, what: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != count:
        raise ValueError(f"{what}, not {text!r}.")
    return numbers


def _key(variable: str | None) -> str | None:
    if variable is not None and not os.environ.get(variable):
        raise ValueError(f"The environment variable {variable} holds no key.")
    return os.environ[variable] if variable is not None else None


def _parser() -> argparse.ArgumentParser:
    parser = commands.Parser("python -m ondevice.disco", description=__doc__)
    programs = parser.add_subparsers(dest="command", required=True)
    serve = programs.add_parser(
        "serve", help="the router between a device and a server endpoint",
        example="python -m ondevice.disco serve --device http://127.0.0.1:8401/v1 --server http://127.0.0.1:8402/v1",
    )  # fmt: skip
    serve.set_defaults(build=build_router)
    for side in ("device", "server"):
        group = serve.add_argument_group(side)
        group.add_argument(f"--{side}", required=True, metavar="URL", help="base URL of an OpenAI-compatible API")
        group.add_argument(f"--{side}-model", metavar="NAME", help="model to ask for (default: the request's)")
        group.add_argument(f"--{side}-api", choices=("completions", "chat"), default="completions",
                           help="which API it has")
        group.add_argument(f"--{side}-cannot-continue", action="store_true", help="it cannot continue a given prefix")
        group.add_argument(f"--{side}-prices", default="0,0", metavar="P,O", help="prompt and output, per 1M tokens")
        group.add_argument(f"--{side}-key", metavar="VARIABLE", help="environment variable that holds its API key")
    serve.add_argument("--policy", default="hedge:0.5", metavar="NAME", help=known_names())
    serve.add_argument("--budget", type=share, default=1.0, help="share of input tokens for the constrained endpoint")
    serve.add_argument("--constrained", choices=("device", "server"), help="default: what the policy is for, or server")
    serve.add_argument("--past-ttft", type=existing, metavar="JSON", help="the server's past TTFTs: a list of seconds")
    serve.add_argument(
        "--server-like", default="together-70b", metavar="SERIES", help="without --past-ttft: this series"
    )
    serve.add_argument("--past-lengths", type=existing, metavar="JSON", help="past prompts' tokens (default: Alpaca's)")
    serve.add_argument("--device-speed", default="51.8,20.14", metavar="P,D", help="prefill and decode, tokens/s")
    serve.add_argument("--hard-budget", action="store_true", help="never exceed the budget, fallbacks included")
    serve.add_argument("--pace", type=positive, metavar="TOKENS/S", help="show tokens at this rate (default: at once)")
    serve.add_argument("--migrate", choices=("no", "stop", "overlap"), default="no", help="needs --pace")
    serve.add_argument("--handover", type=seconds, default=1.0, metavar="S", help="estimated time of a migration")
    serve.add_argument("--answer-tokens", type=positive, default=128.0, help="expected length of an answer")
    serve.add_argument("--first-token-timeout", type=positive, default=30.0, metavar="S", help="for the first token")
    serve.add_argument("--token-timeout", type=positive, default=15.0, metavar="S", help="between two tokens")
    serve.add_argument("--deadline", type=positive, default=300.0, metavar="S", help="for a whole answer, all tries")
    replay = programs.add_parser(
        "replay", help="an endpoint that replays timing over a deterministic text",
        example="python -m ondevice.disco replay --ttft 0.3 --tbt 0.02 --port 8401",
    )  # fmt: skip
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
    for program, usual in ((serve, 8400), (replay, 8401)):
        program.add_argument("--host", default="127.0.0.1", help="address to listen on")
        program.add_argument("--port", type=port, default=usual, help="0 takes a free one")
        program.add_argument("--log-level", default="warning", choices=("critical", "error", "warning", "info"),
                             help="of the HTTP server")
    return parser


if __name__ == "__main__":
    main()

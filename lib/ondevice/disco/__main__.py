"""`python -m ondevice.disco serve`: the router; `replay`: an endpoint that replays a trace's timing."""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from ondevice.disco import traces
from ondevice.disco.budget import TokenBucket
from ondevice.disco.distributions import Device, Latency, Lengths
from ondevice.disco.endpoints import Endpoint
from ondevice.disco.handoff import HandoffRule, StatedOverhead
from ondevice.disco.loopback import listener
from ondevice.disco.named_policies import Known, known_names, named_policy
from ondevice.disco.policy import NEVER, Constrained
from ondevice.disco.replay import Fault, Timing, create_replay
from ondevice.disco.router import Router
from ondevice.disco.serve import create_app
from ondevice.disco.session import Timeouts


def main(arguments: list[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    try:
        app = options.build(options)
        opened = listener(options.host, options.port)
    except (ValueError, OSError) as error:
        sys.exit(f"ondevice.disco {options.command}: {error}")
    host, port = opened.getsockname()[:2]
    print(f"Listening on http://{host}:{port}/v1", flush=True)
    gc.collect()
    gc.freeze()  # what is loaded now stays: the collector need not walk it while streams wait
    config = uvicorn.Config(app, log_level=options.log_level, access_log=False)
    uvicorn.Server(config).run(sockets=[opened])


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
    ttft = json.loads(options.ttft_file.read_text()) if options.ttft_file else [options.ttft]
    kind, _, at = options.fault.partition(":")
    coins = random.Random(options.seed)

    def fault(_: int) -> Fault | None:
        return Fault(kind, int(at or 0), options.fault_seconds) if coins.random() < options.fault_rate else None

    timing = Timing([float(seconds) for seconds in ttft], options.tbt, options.prefill_rate)
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
    parser = argparse.ArgumentParser(prog="python -m ondevice.disco", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser("serve", help="the router between a device and a server endpoint")
    serve.set_defaults(build=build_router)
    for side in ("device", "server"):
        group = serve.add_argument_group(side)
        group.add_argument(f"--{side}", required=True, metavar="URL", help="base URL of an OpenAI-compatible API")
        group.add_argument(f"--{side}-model", metavar="NAME", help="model to ask for (default: the request's)")
        group.add_argument(f"--{side}-api", choices=("completions", "chat"), default="completions")
        group.add_argument(f"--{side}-cannot-continue", action="store_true", help="it cannot continue a given prefix")
        group.add_argument(f"--{side}-prices", default="0,0", metavar="P,O", help="prompt and output, per 1M tokens")
        group.add_argument(f"--{side}-key", metavar="VARIABLE", help="environment variable that holds its API key")
    serve.add_argument("--policy", default="hedge:0.5", metavar="NAME", help=known_names())
    serve.add_argument("--budget", type=float, default=1.0, help="share of input tokens for the constrained endpoint")
    serve.add_argument("--constrained", choices=("device", "server"), help="default: what the policy is for, or server")
    serve.add_argument("--past-ttft", type=Path, metavar="JSON", help="the server's past TTFTs: a list of seconds")
    serve.add_argument(
        "--server-like", default="together-70b", metavar="SERIES", help="without --past-ttft: this series"
    )
    serve.add_argument("--past-lengths", type=Path, metavar="JSON", help="past prompts' tokens (default: Alpaca's)")
    serve.add_argument("--device-speed", default="51.8,20.14", metavar="P,D", help="prefill and decode, tokens/s")
    serve.add_argument("--hard-budget", action="store_true", help="never exceed the budget, fallbacks included")
    serve.add_argument("--pace", type=float, metavar="TOKENS/S", help="show tokens at this rate (default: at once)")
    serve.add_argument("--migrate", choices=("no", "stop", "overlap"), default="no", help="needs --pace")
    serve.add_argument("--handover", type=float, default=1.0, metavar="S", help="estimated time of a migration")
    serve.add_argument("--answer-tokens", type=float, default=128.0, help="expected length of an answer")
    serve.add_argument("--first-token-timeout", type=float, default=30.0, metavar="S")
    serve.add_argument("--token-timeout", type=float, default=15.0, metavar="S")
    serve.add_argument("--deadline", type=float, default=300.0, metavar="S", help="for a whole answer, all tries")
    replay = commands.add_parser("replay", help="an endpoint that replays timing over a deterministic text")
    replay.set_defaults(build=build_replay)
    replay.add_argument("--ttft", type=float, default=0.1, metavar="S")
    replay.add_argument("--ttft-file", type=Path, metavar="JSON", help="a list of seconds, one a request, in turn")
    replay.add_argument("--tbt", type=float, default=0.02, metavar="S")
    replay.add_argument("--prefill-rate", type=float, default=float("inf"), metavar="TOKENS/S")
    replay.add_argument("--voice", default="", help="endpoints of different voices say different texts")
    replay.add_argument("--fault", default="", metavar="KIND[:TOKENS]")
    replay.add_argument("--fault-rate", type=float, default=1.0)
    replay.add_argument("--fault-seconds", type=float, default=0.0, help="length of a delay")
    replay.add_argument("--seed", type=int, default=0)
    for command in (serve, replay):
        command.add_argument("--host", default="127.0.0.1")
        command.add_argument("--port", type=int, default=8400 if command is serve else 8401)
        command.add_argument("--log-level", default="warning", choices=("critical", "error", "warning", "info"))
    return parser


if __name__ == "__main__":
    main()

"""`python -m ondevice.disco serve`: the router; `replay`: an endpoint that replays a trace's timing."""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import uvicorn
from starlette.types import ASGIApp

from ondevice.disco.budget import TokenBucket
from ondevice.disco.endpoints import Endpoint
from ondevice.disco.handoff import HandoffRule, StatedOverhead
from ondevice.disco.loopback import listener
from ondevice.disco.policy import NEVER, Constrained, DispatchPolicy, check_budget, mixture, single
from ondevice.disco.replay import Fault, Timing, create_replay
from ondevice.disco.router import Router
from ondevice.disco.serve import create_app
from ondevice.disco.session import Timeouts


def _fixed(name: str, constrained: Constrained, budget: float, device: float, server: float) -> DispatchPolicy:
    return single(name, constrained, budget, np.array([device]), np.array([server]))


def _hedge(name: str, constrained: Constrained, budget: float, seconds: float) -> DispatchPolicy:
    """Start the constrained endpoint `seconds` after the other, for a share `budget` of the requests."""
    wait = {"device": (seconds, 0.0), "server": (0.0, seconds)}[constrained]
    alone = {"device": (NEVER, 0.0), "server": (0.0, NEVER)}[constrained]
    first, second = ((np.array([device]), np.array([server])) for device, server in (alone, wait))
    return mixture(name, constrained, budget, first, second, budget)


# Name -> (constrained, budget, the text after the colon) -> policy.
POLICIES: dict[str, Callable[[Constrained, float, str], DispatchPolicy]] = {
    "server-only": lambda constrained, budget, _: _fixed("server-only", constrained, budget, NEVER, 0.0),
    "device-only": lambda constrained, budget, _: _fixed("device-only", constrained, budget, 0.0, NEVER),
    "race": lambda constrained, budget, _: _hedge("race", constrained, budget, 0.0),
    "hedge": lambda constrained, budget, wait: _hedge(f"hedge:{wait}", constrained, budget, _seconds(wait)),
}


def named_policy(name: str, constrained: Constrained, budget: float) -> DispatchPolicy:
    """A policy by name, such as `race` or `hedge:0.5`; ValueError if there is none."""
    check_budget(budget)
    head, _, rest = name.partition(":")
    if head not in POLICIES or bool(rest) != (head == "hedge"):
        known = ", ".join(f"{known}:SECONDS" if known == "hedge" else known for known in POLICIES)
        raise ValueError(f"There is no policy {name!r}; there are {known}.")
    return POLICIES[head](constrained, budget, rest)


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
    policy = named_policy(options.policy, options.constrained, options.budget)
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
        timeouts=Timeouts(options.first_token_timeout, options.token_timeout, options.deadline),
        bucket=TokenBucket(options.budget, burst=NEVER) if options.hard_budget else None,
        pace=options.pace,
        migration=_migration(options, device, server),
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


def _migration(options: argparse.Namespace, device: Endpoint, server: Endpoint) -> HandoffRule | None:
    if options.migrate == "no":
        return None
    if options.pace is None:
        raise ValueError("--migrate needs --pace: without a pace no buffer builds up to mask the hand-off.")
    source, target = (device, server) if options.constrained == "device" else (server, device)
    prices = source.price_output, target.price_output, target.price_prompt
    return StatedOverhead(options.pace, options.handover, options.answer_tokens, *prices, handoff=options.migrate)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < NEVER:
        raise ValueError(f"A hedge waits a number of seconds of at least 0, not {text!r}.")
    return seconds


def _prices(text: str) -> tuple[float, float]:
    """Prices per token from 'prompt,output' per million tokens."""
    try:
        prompt, output = (float(price) / 1e6 for price in text.split(","))
    except ValueError:
        raise ValueError(f"Prices are two numbers per million tokens, such as 0.15,0.60, not {text!r}.") from None
    return prompt, output


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
    serve.add_argument("--policy", default="hedge:0.5", help=f"{', '.join(POLICIES)}; hedge takes :SECONDS")
    serve.add_argument("--budget", type=float, default=1.0, help="share of input tokens for the constrained endpoint")
    serve.add_argument("--constrained", choices=("device", "server"), default="server")
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

"""A gateway for OpenAI clients that races a device against a server.

With `serve --budget`, the constrained side (`serve --constrained`) has at every moment read at most that share of all
input tokens; without it there is no limit. With `serve --pace` and prices, an answer may move to the cheaper side in
mid-stream, unless `serve --migration no`. Beyond loopback callers need a key (`serve --key`). A variable such as
ONDEVICE_ROUTER_BUDGET stands for the flag.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import socket
from typing import Any

from ondevice import commands
from ondevice.commands import existing, port, seconds
from ondevice.network.listening import is_loopback, listener
from ondevice_papers.disco.policy import SIDES

with commands.loading("ondevice-router", "router"):
    import uvicorn
    from starlette.types import ASGIApp

    from ondevice_programs.router import config
    from ondevice_programs.router.app import create_app
    from ondevice_programs.router.replay import create_replay
    from ondevice_programs.router.router import Router


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=options.log_level.upper(), format="%(asctime)s %(name)s %(message)s")
    with commands.refusing(f"ondevice-router {options.command}"):
        app = options.build(options)
        opened = listener(options.host, options.port)
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


def build_router(options: argparse.Namespace) -> ASGIApp:
    """The router that a command line describes, with the file that it names. Raises ValueError with one sentence."""
    flags = {name: value for name, value in vars(options).items() if value is not None}
    variables = {name: os.environ.get(f"ONDEVICE_ROUTER_{name.upper()}") for name in config.Settings.model_fields}
    settings = {name: flags.get(name, value or None) for name, value in variables.items()}
    raw: dict[str, Any] = {"router_settings": {name: value for name, value in settings.items() if value is not None}}
    if options.key:
        raw["general_settings"] = {"master_key": f"os.environ/{options.key}"}
    if options.config is None:
        if not flags.keys() >= set(SIDES):
            raise ValueError("Name the endpoints: --config FILE, or --device URL and --server URL.")
        raw["model_list"] = [_endpoint(flags, side) for side in SIDES]
    elif flags.keys() & set(SIDES):
        raise ValueError("The endpoints stand in the file or on the command line, not in both.")
    configuration = config.load(options.config, raw)
    if not is_loopback(options.host) and not configuration.general_settings.master_key:
        raise ValueError(f"Whoever reaches {options.host} could spend your budget: set master_key, or --key VARIABLE.")
    router = Router(configuration)
    app = create_app(router)
    app.state.lock = router.lock()  # held while the program runs
    return app


def _endpoint(flags: dict[str, Any], side: str) -> dict[str, Any]:
    """Its entry of model_list; both sides answer to one name."""
    parameters = {"model": flags.get(f"{side}_model"), "api_base": flags[side]}
    if f"{side}_key" in flags:
        parameters["api_key"] = f"os.environ/{flags[f'{side}_key']}"
    name = flags.get("model") or flags.get("server_model")
    return {"model_name": name, "litellm_params": parameters, "model_info": {"side": side}}


def _parser() -> argparse.ArgumentParser:
    parser = commands.Parser("ondevice-router", description=__doc__)
    programs = parser.add_subparsers(dest="command", required=True)
    serve = programs.add_parser(
        "serve",
        help="the router between a device and a server",
        usage="%(prog)s [options]",
        example="ondevice-router serve --config config.yaml --budget 0.3",
    )
    serve.set_defaults(build=build_router)
    serve.add_argument("--config", type=existing, metavar="FILE", help="config.yaml; the flags below override it")
    for side in SIDES:
        group = serve.add_argument_group(f"{side}, without a file")
        group.add_argument(f"--{side}", metavar="URL", help="base URL of an OpenAI-compatible API")
        group.add_argument(f"--{side}-model", metavar="NAME", help="model to ask for (default: its only one)")
        group.add_argument(f"--{side}-key", metavar="VARIABLE", help="environment variable that holds its API key")
    serve.add_argument("--model", metavar="NAME", help="what callers ask for (default: the server's, or any)")
    serve.add_argument("--key", metavar="VARIABLE", help="environment variable that holds the key of callers")
    settings = serve.add_argument_group("router_settings of the file")
    for name, field in config.Settings.model_fields.items():
        default = "" if field.default is None else f" (default: {field.default})"
        settings.add_argument(f"--{name.replace('_', '-')}", metavar="X", help=f"{field.description}{default}")
    replay = programs.add_parser(
        "replay",
        help="an endpoint that replays timing over a deterministic text",
        example="ondevice-router replay --ttft 0.3 --tbt 0.02 --port 8401",
    )
    replay.set_defaults(build=lambda options: create_replay(options.ttft, options.tbt))
    replay.add_argument(
        "--ttft", type=seconds, nargs="+", default=[0.1], metavar="S", help="to the first token, one a request, in turn"
    )
    replay.add_argument("--tbt", type=seconds, default=0.02, metavar="S", help="time between tokens")
    for program, usual, level in ((serve, 8400, "info"), (replay, 8401, "warning")):
        program.add_argument("--host", default="127.0.0.1", help="address to listen on")
        program.add_argument("--port", type=port, default=usual, help="0 takes a free one")
        program.add_argument("--log-level", default=level, choices=("critical", "error", "warning", "info"))
    return parser


if __name__ == "__main__":
    main()

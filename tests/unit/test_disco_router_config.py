"""config.yaml and the state file of DiSCo's router: what is wrong is one sentence, before anything is opened."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from routing import Told, configured, deployment
from starlette.applications import Starlette

from ondevice_papers.disco.budgeted import Dispatcher
from ondevice_programs.router import __main__ as program
from ondevice_programs.router import state
from ondevice_programs.router.config import load
from ondevice_programs.router.endpoints import EndpointError
from ondevice_programs.router.request import ChatRequest
from ondevice_programs.router.router import Router
from ondevice_programs.router.sides import Endpoint

EXAMPLE = """
model_list:
  - model_name: assistant
    litellm_params: {model: openai/phone, api_base: "http://127.0.0.1:8001"}
    model_info: {side: device}
  - model_name: assistant
    litellm_params:
      model: openai/large
      api_base: https://api.example.com/v1/
      api_key: os.environ/EXAMPLE_KEY
      input_cost_per_token: 1.0e-6
      output_cost_per_token: 4.0e-6
    model_info: {side: server, can_continue: true}
router_settings: {budget: 0.3, migration: no}
"""


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], Any]], Path]:
    """The example's file after a change."""
    monkeypatch.setenv("EXAMPLE_KEY", "secret")

    def write(change: Callable[[Any], Any]) -> Path:
        config = yaml.safe_load(EXAMPLE)
        change(config)
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    return write


def test_the_example_says_what_it_means_and_flags_override_it(written: Any) -> None:
    loaded = load(written(lambda _: None), {"router_settings": {"budget": 0.5}})
    device, server = loaded.model_list
    assert (device.litellm_params.api_base, device.model) == ("http://127.0.0.1:8001/v1", "phone")
    assert (server.litellm_params.api_base, server.litellm_params.api_key) == ("https://api.example.com/v1", "secret")
    assert device.model_info.can_continue == "probe" and loaded.model_name == "assistant"
    assert (loaded.router_settings.budget, loaded.router_settings.migration) == (0.5, "no")


def put(*path: Any) -> Callable[[Any], None]:
    """Set what the path leads to: keys, then the value."""

    def change(config: Any) -> None:
        for key in path[:-2]:
            config = config.setdefault(key, {}) if isinstance(config, dict) else config[key]
        config[path[-2]] = path[-1]

    return change


def fleet(config: Any) -> None:
    """The server twice."""
    config["model_list"].append(config["model_list"][1])


def twins(config: Any) -> None:
    """One endpoint on both sides."""
    config["model_list"][1]["litellm_params"] = config["model_list"][0]["litellm_params"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (put("model_list", 0, "litellm_params", "modle", 1), "model_list.0.litellm_params.modle"),
        (put("model_list", 0, "model_info", {}), "model_list.0.model_info.side"),
        (put("model_list", 0, "model_info", "side", "server"), "device"),
        (put("router_settings", "migration", "overlap"), "overlap is not taken any more"),
        (put("model_list", 0, "model_info", "tokenizer", "here"), "tokenizer is not taken any more"),
        (put("model_list", 1, "model_name", "cloud"), "assistant and cloud"),
        (put("model_list", 1, "litellm_params", "api_key", "os.environ/NONE_SUCH"), "NONE_SUCH"),
        (put("model_list", 0, "litellm_params", "api_base", "ftp://host"), "ftp://host"),
        (put("model_list", 0, "litellm_params", "budget_duration", "1 day"), "budget_duration"),
        (put("model_list", 0, "litellm_params", "budget_duration", "0s"), "budget_duration"),
        (put("router_settings", "budget", 1.1), "router_settings.budget"),
        (fleet, "2 deployments whose side is server"),
        (twins, "both sides"),
    ],
)
def test_a_mistake_is_one_sentence_with_its_place(written: Any, change: Any, named: str) -> None:
    with pytest.raises(ValueError) as caught:
        load(written(change), {"router_settings": {}})
    assert named in str(caught.value) and "\n" not in str(caught.value) and "secret" not in str(caught.value)


OVERDRAWN = Dispatcher("server", 0.3).state() | {"account": {"arrived": 10, "spent": -5e9}}


@pytest.mark.parametrize(
    "kept",
    [
        '{"version": 7, "dispatcher": {}, "spent": {}}', '{"version": 1, "disp', "[]",
        json.dumps({"version": 1, "dispatcher": OVERDRAWN, "spent": {}}),
    ],
)  # fmt: skip
def test_a_state_file_that_is_not_ours_or_damaged_is_refused_and_left_alone(tmp_path: Path, kept: str) -> None:
    config = configured(tmp_path, deployment("device"), deployment("server"))
    path = state.path_of(config)
    path.parent.mkdir()
    path.write_text(kept)
    with pytest.raises(ValueError, match=r"disco-\w+\.json"):
        Router(config)
    assert path.read_text() == kept


def test_a_state_that_could_not_be_kept_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="state"):
        state.read(tmp_path / "file" / "state.json")


def test_state_is_kept_whole_or_not_at_all_and_by_default_for_these_deployments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(tmp_path, deployment("device"), deployment("server"))
    router = Router(config, dispatcher=Told())
    router.endpoints["server"].spent = 0.25
    router.save()
    assert json.loads(state.path_of(config).read_text())["spent"]["http://127.0.0.1:1/v1 server"] == 0.25
    Router(configured(tmp_path, deployment("device"), deployment("server"), state="none"), dispatcher=Told()).save()
    assert [*tmp_path.rglob("*.json")] == [state.path_of(config)]
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    paths = {
        state.path_of(configured(tmp_path, deployment("device"), deployment("server", url), state=None))
        for url in ("http://a", "http://b")
    }
    assert len(paths) == 2 and all(path.is_relative_to(tmp_path) for path in paths)


def test_another_budget_keeps_what_was_learned_but_no_debt(tmp_path: Path) -> None:
    def opened(budget: float | None) -> Router:
        return Router(configured(tmp_path, deployment("device"), deployment("server"), budget=budget))

    router = opened(0.9)
    for _ in range(40):
        order = router.dispatcher.arrive(77)
        router.dispatcher.account.take(order.number, 77)
        router.dispatcher.close(order, 5)
    router.save()
    assert opened(0.9).dispatcher.account.spent == 40 * 77
    for budget in (0.1, None):
        dispatcher = opened(budget).dispatcher
        assert dispatcher.account.spent == dispatcher.account.arrived == 0
        assert list(dispatcher.traffic.kept["prompts"])[-40:] == [77] * 40


def test_two_routers_do_not_share_a_state(tmp_path: Path) -> None:
    config = configured(tmp_path, deployment("device"), deployment("server"))
    held = Router(config).lock()
    with pytest.raises(ValueError, match=r"disco-\w+\.json"):
        Router(config).lock()
    held.close()
    Router(config).lock().close()
    assert Router(configured(tmp_path, deployment("device"), deployment("server"), state="none")).lock() is None


def test_both_sides_of_a_command_line_answer_to_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    monkeypatch.setattr(program, "create_app", lambda router: names.append(router.config.model_name) or Starlette())
    urls = ["serve", "--device", "http://127.0.0.1:1", "--server", "http://127.0.0.1:2", "--state", "none"]
    models = ["--device-model", "small", "--server-model", "large"]
    for more in ([], models, [*models, "--model", "mine"]):
        program.build_router(program._parser().parse_args([*urls, *more]))
    assert names == [None, "large", "mine"]


def test_a_variable_overrides_the_file_and_a_flag_overrides_it(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = []
    monkeypatch.setattr(program, "create_app", lambda it: settings.append(it.config.router_settings) or Starlette())
    monkeypatch.setenv("ONDEVICE_ROUTER_BUDGET", "0.5")
    monkeypatch.setenv("ONDEVICE_ROUTER_STATE", "none")
    line = ["serve", "--config", str(written(lambda _: None))]
    for more in ([], ["--budget", "0"]):
        program.build_router(program._parser().parse_args([*line, *more]))
    assert [(it.budget, it.state, it.migration) for it in settings] == [(0.5, "none", "no"), (0.0, "none", "no")]
    monkeypatch.setenv("ONDEVICE_ROUTER_BUDGET", "half")
    with pytest.raises(ValueError, match=r"router_settings\.budget"):
        program.build_router(program._parser().parse_args(line))


def test_a_budget_of_money_begins_anew_after_its_duration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1e9
    monkeypatch.setattr("time.time", lambda: now)
    daily = {"output_cost_per_token": 1.0, "max_budget": 10.0, "budget_duration": "1d"}
    asked = ChatRequest(messages=({"role": "user", "content": "?"},), limits={"max_tokens": 6})

    def server() -> Endpoint:
        return Router(configured(tmp_path, deployment("device"), deployment("server", **daily))).endpoints["server"]

    async def refusal(endpoint: Endpoint) -> EndpointError | None:
        return endpoint.refusal(asked, 1, False, None, False)

    router = Router(configured(tmp_path, deployment("device"), deployment("server", **daily)))
    assert asyncio.run(refusal(router.endpoints["server"])) is None
    router.endpoints["server"].spent = 6.0
    router.save()
    now += 86_399
    assert "max_budget" in str(asyncio.run(refusal(server())))  # another run of the router remembers the period
    now += 1
    assert asyncio.run(refusal(server())) is None

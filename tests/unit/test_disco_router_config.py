"""config.yaml and the state file of DiSCo's router: what is wrong is one sentence, before anything is opened."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from routing import Told, configured, deployment

from ondevice_papers.disco.budgeted import Dispatcher
from ondevice_programs.router import state
from ondevice_programs.router.config import Config, load
from ondevice_programs.router.router import Router

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
    found = load(written(lambda _: None), {"router_settings": {"budget": 0.5}})
    device, server = found.model_list
    assert (device.litellm_params.api_base, device.model) == ("http://127.0.0.1:8001/v1", "phone")
    assert (server.litellm_params.api_base, server.litellm_params.api_key) == ("https://api.example.com/v1", "secret")
    assert (device.model_info.api, device.model_info.can_continue) == ("chat", "probe")
    assert (found.router_settings.budget, found.router_settings.migration) == (0.5, "no")


def put(*path: Any) -> Callable[[Any], None]:
    """Set what the path leads to: keys, then the value."""

    def change(config: Any) -> None:
        for key in path[:-2]:
            config = config.setdefault(key, {}) if isinstance(config, dict) else config[key]
        config[path[-2]] = path[-1]

    return change


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put("colour", 1), "colour is no key that is known here"),
        (put("model_list", 0, "litellm_params", "modle", 1), "model_list.0.litellm_params.modle is no key"),
        (put("model_list", 0, "model_info", {}), "model_list.0.model_info.side: field required"),
        (put("model_list", 0, "model_info", "side", "server"), "has no deployment whose side is device"),
        (put("model_list", 1, "litellm_params", "api_key", "os.environ/NONE_SUCH"), "variable NONE_SUCH holds nothing"),
        (put("model_list", 0, "litellm_params", "api_base", "ftp://host"), "'ftp://host' is not the http(s) URL"),
        (put("router_settings", "budget", 1.1), "router_settings.budget: input should be less than or equal to 1"),
    ],
)
def test_a_mistake_is_one_sentence_with_its_place(written: Any, change: Any, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        load(written(change), {"router_settings": {}})
    assert said in str(caught.value) and "\n" not in str(caught.value) and "secret" not in str(caught.value)


def test_two_endpoints_that_are_one_are_refused() -> None:
    twice = [deployment(side, "http://127.0.0.1:1/v1", model="same") for side in ("device", "server")]
    with pytest.raises(ValueError, match=r"http://127.0.0.1:1/v1 same is on both sides"):
        Config.model_validate({"model_list": twice})


@pytest.mark.parametrize(
    "kept",
    [
        '{"version": 7, "dispatcher": {}, "spent": {}}', '{"version": 1, "disp', "[]", '{"version": 1}',
    ],
)  # fmt: skip
def test_a_state_file_that_is_not_ours_is_refused_and_left_alone(tmp_path: Path, kept: str) -> None:
    (tmp_path / "state.json").write_text(kept)
    with pytest.raises(ValueError, match=r"state\.json is .*; move it away to begin anew"):
        Router(configured(tmp_path, deployment("device"), deployment("server")))
    assert (tmp_path / "state.json").read_text() == kept


@pytest.mark.parametrize("spoiled", [{"arrived": "lots", "spent": -5}, {"arrived": 10, "spent": -5e9}])
def test_a_damaged_account_is_refused_with_its_file(tmp_path: Path, spoiled: dict[str, object]) -> None:
    learned = Dispatcher("server", 0.3).state() | {"account": spoiled}
    state.write(tmp_path / "state.json", learned, {})
    with pytest.raises(ValueError, match=r"state\.json: The kept state is of another version or damaged"):
        Router(configured(tmp_path, deployment("device"), deployment("server")))


def test_a_state_that_could_not_be_kept_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="No state can be kept in"):
        state.read(tmp_path / "file" / "state.json")


def test_state_is_kept_whole_and_by_default_for_these_deployments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = Router(configured(tmp_path, deployment("device"), deployment("server")), dispatcher=Told())
    router.members[1].spent = 0.25
    router.save()
    assert json.loads((tmp_path / "state.json").read_text())["spent"]["http://127.0.0.1:1/v1 server"] == 0.25
    assert [it.name for it in tmp_path.iterdir()] == ["state.json"]
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    paths = {
        state.path_of(configured(tmp_path, deployment("device"), deployment("server", url), state=None))
        for url in ("http://a", "http://b")
    }
    assert len(paths) == 2 and all(path.is_relative_to(tmp_path) for path in paths)

"""config.yaml, in LiteLLM's shape with what a router of two sides needs besides; every mistake is one sentence."""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic import NonNegativeFloat as Cost
from pydantic import PositiveFloat as Positive

from ondevice_papers.disco.migration import Prices
from ondevice_papers.disco.policy import SIDES, Side
from ondevice_programs.router.request import Api


def _base(url: str) -> str:
    """An API's base; one without a path gets /v1."""
    if not re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", url):
        raise ValueError(f"{url!r} is not the http(s) URL of an API")
    url = url.rstrip("/")
    return url if urlsplit(url).path else f"{url}/v1"


def _secret(value: object) -> object:
    """`os.environ/NAME` is what that variable holds."""
    if not isinstance(value, str) or not value.startswith("os.environ/"):
        return value
    name = value.removeprefix("os.environ/")
    if not os.environ.get(name):
        raise ValueError(f"the environment variable {name} holds nothing")
    return os.environ[name]


Url = Annotated[str, AfterValidator(_base)]
Secret = Annotated[str, BeforeValidator(_secret)]
# YAML reads a bare no as false.
Handoff = Annotated[Literal["stop", "overlap", "no"], BeforeValidator(lambda it: "no" if it is False else it)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class Parameters(_Strict):
    """How a deployment is asked. Costs are per token, max_budget in their currency, timeouts in seconds."""

    model: str
    api_base: Url
    api_key: Secret | None = None
    input_cost_per_token: Cost = 0.0
    output_cost_per_token: Cost = 0.0
    weight: Positive = 1.0
    max_budget: Cost | None = None
    timeout: Positive | None = None
    stream_timeout: Positive | None = None


class Info(_Strict):
    """What a deployment is. tokenizer: the local folder whose chat template writes a chat for `api: completions`."""

    side: Side
    api: Api = "chat"
    can_continue: bool | Literal["probe"] = "probe"
    max_output_tokens: int = Field(default=4096, ge=1)
    tokenizer: Path | None = None


class Deployment(_Strict):
    model_name: str
    litellm_params: Parameters
    model_info: Info

    @property
    def model(self) -> str:
        return self.litellm_params.model.removeprefix("openai/")

    @property
    def prices(self) -> Prices:
        return Prices(self.litellm_params.input_cost_per_token, self.litellm_params.output_cost_per_token)

    @property
    def address(self) -> str:
        return f"{self.litellm_params.api_base} {self.model}"


class Settings(_Strict):
    """timeout: seconds for a whole answer. stream_timeout: of silence before a first or a further token.

    A deployment that failed more than `allowed_fails` times in a row rests for `cooldown_time` seconds.
    """

    constrained: Side = "server"
    budget: float = Field(default=1.0, ge=0, le=1)
    pace: Positive | None = None
    migration: Handoff = "stop"
    routing_strategy: Literal["simple-shuffle", "latency-based-routing"] = "simple-shuffle"
    timeout: Positive = 600.0
    stream_timeout: Positive = 30.0
    num_retries: int = Field(default=2, ge=0)
    allowed_fails: int = Field(default=3, ge=0)
    cooldown_time: Cost = 5.0
    device_serves_one: bool = False
    state: Path | None = None


class General(_Strict):
    master_key: Secret | None = None
    forward_authorization: bool = False


class Config(_Strict):
    model_list: list[Deployment]
    router_settings: Settings = Settings()
    general_settings: General = General()

    @model_validator(mode="after")
    def _both_sides(self) -> Self:
        behind = {side: {it.address for it in self.model_list if it.model_info.side == side} for side in SIDES}
        for side, addresses in behind.items():
            if not addresses:
                raise ValueError(f"model_list has no deployment whose side is {side}")
        if twice := behind["device"] & behind["server"]:
            raise ValueError(f"{min(twice)} is on both sides")
        return self


def load(path: Path | None, raw: dict[str, Any]) -> Config:
    """The file's settings, overridden by `raw`, which is of the same shape. Raises ValueError with one sentence."""
    if path is not None:
        try:
            found = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not YAML: {error}.") from None
        if not isinstance(found, dict):
            raise ValueError(f"{path} holds no mapping.")
        sections = {name: found.get(name) or {} for name in raw}
        raw = found | {name: it | raw[name] for name, it in sections.items() if isinstance(it, dict)}
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ValueError(f"{path or 'The command line'}: {_first(error)}.") from None


def _first(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        return f"{where} is no key that is known here"
    said = first["msg"].removeprefix("Value error, ")
    return f"{where}: {said[0].lower()}{said[1:]}" if where else said


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"

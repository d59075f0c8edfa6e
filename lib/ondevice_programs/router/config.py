"""config.yaml, in LiteLLM's shape with what a router of two endpoints needs besides; every mistake is one sentence."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic import NonNegativeFloat as Cost
from pydantic import PositiveFloat as Positive

from ondevice import yaml_file
from ondevice_papers.disco.migration import Prices
from ondevice_papers.disco.policy import SIDES, Side

FLEET = "a fleet goes behind LiteLLM, whose one address is named here (docs/router.md)"
CHAT = "each endpoint is asked by /chat/completions, and writes its own prompts"
LEFT = {  # what an older router took, a key or a value of one, and what to do instead
    "weight": FLEET,
    "routing_strategy": FLEET,
    "tokenizer": CHAT,
    "api": CHAT,
    "migration: overlap": "the endpoint that is left stops at once, which is migration: stop",
}


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


def _seconds(duration: object) -> object:
    """Seconds of a duration as LiteLLM writes it, such as 30s, 15m, 24h, 7d or 1mo (30 days)."""
    parts = re.fullmatch(r"([1-9]\d*)(s|m|h|d|mo)", duration) if isinstance(duration, str) else None
    if parts is None:
        raise ValueError(f"{duration!r} is no duration such as 30s, 15m, 24h, 7d or 1mo")
    return int(parts[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86_400, "mo": 30 * 86_400}[parts[2]]


Url = Annotated[str, AfterValidator(_base)]
Secret = Annotated[str, BeforeValidator(_secret)]
Duration = Annotated[float, BeforeValidator(_seconds)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=0)]
# YAML reads a bare no as false.
Handoff = Annotated[Literal["stop", "no"], BeforeValidator(lambda value: "no" if value is False else value)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_left(cls, values: Any) -> Any:
        for name, value in values.items() if isinstance(values, dict) else ():
            for key in LEFT.keys() & {str(name), f"{name}: {value}"}:
                raise ValueError(f"{key} is not taken any more: {LEFT[key]}")
        return values


class Parameters(_Strict):
    """How an endpoint is asked. Costs are per token, max_budget in their currency, timeouts in seconds.

    model: None is the only one that the endpoint lists. budget_duration: after which max_budget begins anew; None is
    never.
    """

    model: str | None = None
    api_base: Url
    api_key: Secret | None = None
    input_cost_per_token: Cost = 0.0
    output_cost_per_token: Cost = 0.0
    max_budget: Cost | None = None
    budget_duration: Duration | None = None
    timeout: Positive | None = None
    stream_timeout: Positive | None = None


class Info(_Strict):
    """What an endpoint is.

    stream_options: whether a stream is asked for its usage. An endpoint that refuses that is asked without it anyway.
    """

    side: Side
    can_continue: bool | Literal["probe"] = "probe"
    max_output_tokens: int = Field(default=4096, ge=1)
    stream_options: bool = True


class Deployment(_Strict):
    """An entry of model_list. model_name: by which callers ask; None takes any name."""

    model_name: str | None = None
    litellm_params: Parameters
    model_info: Info

    @property
    def side(self) -> Side:
        return self.model_info.side

    @property
    def model(self) -> str | None:
        name = self.litellm_params.model
        return name and name.removeprefix("openai/")

    @property
    def prices(self) -> Prices:
        return Prices(self.litellm_params.input_cost_per_token, self.litellm_params.output_cost_per_token)

    @property
    def address(self) -> str:
        return f"{self.litellm_params.api_base} {self.model or ''}".rstrip()


class Settings(_Strict):
    """How the two endpoints are used: keys of the file, and flags of the command, which override them."""

    constrained: Side = Field(default="server", description="side that the budget limits")
    budget: Share | None = Field(default=None, description="share of input tokens of that side (default: no limit)")
    over_budget: Literal["fallback", "refuse"] = Field(
        default="fallback", description="what to do where only that side could answer"
    )
    pace: Positive | None = Field(default=None, description="tokens per second that are shown (default: at once)")
    migration: Handoff = Field(default="stop", description="with a pace and prices; or no")
    timeout: Positive = Field(default=600.0, description="seconds for a whole answer")
    stream_timeout: Positive | None = Field(
        default=None, description="seconds of silence (default: 30; a long prompt's device has more)"
    )
    num_retries: Count = Field(default=2, description="more tries of each side in a request")
    allowed_fails: Count = Field(default=3, description="failures in a row without a rest")
    cooldown_time: Cost = Field(default=5.0, description="seconds of a rest after more")
    state: Literal["none"] | Path | None = Field(
        default=None, description="folder of what is learned, or none (default: the user's)"
    )


class General(_Strict):
    """Who may ask."""

    master_key: Secret | None = None


class Config(_Strict):
    """All of the file: one endpoint a side, and how they are used."""

    model_list: list[Deployment]
    router_settings: Settings = Settings()
    general_settings: General = General()

    @property
    def model_name(self) -> str | None:
        """By which callers ask; None takes any name."""
        return self.model_list[0].model_name

    @model_validator(mode="after")
    def _one_of_each_side(self) -> Self:
        for side in SIDES:
            count = sum(entry.side == side for entry in self.model_list)
            if not count:
                raise ValueError(f"model_list has no deployment whose side is {side}")
            if count > 1:
                raise ValueError(f"model_list names {count} deployments whose side is {side}; {FLEET}")
        first, second = (entry.model_name for entry in self.model_list)
        if first != second:
            raise ValueError(f"model_list names {first} and {second}; both sides answer to one name")
        if len({entry.address for entry in self.model_list}) == 1:
            raise ValueError(f"{self.model_list[0].address} is on both sides")
        return self


def load(path: Path | None, raw: dict[str, Any]) -> Config:
    """The file's settings, overridden by `raw`, which is of the same shape. Raises ValueError with one sentence."""
    if path is not None:
        mapping = yaml_file.mapping(path)
        sections = {name: mapping.get(name) or {} for name in raw}
        raw = mapping | {name: section | raw[name] for name, section in sections.items() if isinstance(section, dict)}
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        key, message = first_mistake(error)
    raise ValueError(f"{path or 'The command line'}: {f'{key}: ' if key else ''}{message}.")


def first_mistake(error: ValidationError) -> tuple[str, str]:
    """(the key's path with dots, what is wrong with it) of the first of the errors."""
    first = error.errors()[0]
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "this is no key that is known here"
    keys = [str(key) for key in first["loc"] if isinstance(key, int) or key.isidentifier()]  # without types of unions
    return ".".join(keys), f"{message[0].lower()}{message[1:]}"

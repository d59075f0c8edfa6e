"""What a token costs: API prices (Table 8) and a device's arithmetic (Tables 6 and 7, Eqs. 7 to 9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from ondevice import assets
from ondevice_papers.disco.policy import check_constrained

Phase = Literal["prefill", "decode"]
Form = Literal["printed", "fitted", "physical"]

# Appendix E gives 0.3 and 5 "$ per million FLOPs"; the tables only make sense with $ per 1e15 FLOPs.
ENERGY_TO_MONEY = {"server": 0.3e-15, "device": 5e-15}  # $ per FLOP, by the constrained endpoint


@dataclass(frozen=True)
class ModelShape:
    """Shape of a language model: layers, d_model, heads, FFN width, vocabulary; gated: three FFN matrices."""

    layers: int
    d_model: int
    heads: int
    ffn: int
    vocabulary: int
    gated: bool = False


# As printed in Appendix E.1; the vocabularies are those with which Table 7's shares come out.
PRINTED = {
    "BLOOM-1.1B": ModelShape(24, 1024, 16, 4096, 250_880),
    "BLOOM-560M": ModelShape(24, 512, 8, 2048, 250_880),
    "Qwen-0.5B": ModelShape(24, 768, 12, 2048, 151_936),
}
# The published configurations of the models of those names.
PUBLISHED = {
    "BLOOM-1.1B": ModelShape(24, 1536, 16, 6144, 250_880),
    "BLOOM-560M": ModelShape(24, 1024, 16, 4096, 250_880),
    "Qwen-0.5B": ModelShape(24, 1024, 16, 2816, 151_936, gated=True),
}


def components(architecture: ModelShape, length: int, phase: Phase, form: Form = "printed") -> dict[str, float]:
    """Operations per token by component (Eq. 7); length: L tokens.

    printed: Eqs. 8 and 9 as they stand, multiply-adds counted once. fitted: the attention that reproduces Tables 6 and
    7 within two percent for two of the three models: 2 L d a layer, plus L^2 d (1 + 1/heads) in prefill.
    physical: two operations a multiply-add; an average prompt token attends to L / 2 others, an embedding is looked up
    for nothing, and prefill needs the output projection once a prompt.
    """
    a, n, d = architecture, architecture.layers, architecture.d_model
    if not length >= 1:
        raise ValueError(f"A sequence has at least one token, not {length!r}.")
    if phase not in ("prefill", "decode"):
        raise ValueError(f"Unknown phase {phase!r}; there are prefill and decode.")
    if form == "physical":
        matrices = 3 if a.gated else 2
        context = length / 2 if phase == "prefill" else length
        return {
            "embedding": 0.0,
            "attention": 2.0 * n * (4 * d**2 + 2 * context * d),
            "ffn": 2.0 * n * matrices * d * a.ffn,
            "layernorm": 8.0 * n * d,
            "output": 2.0 * a.vocabulary * d / (length if phase == "prefill" else 1),
        }
    if form == "printed":
        context = length * d / a.heads + length * d
        quadratic = length**2 * d / a.heads + length * d
        attention = n * (4 * d**2 + (quadratic if phase == "prefill" else context))
    elif form == "fitted":
        quadratic = length**2 * d * (1 + 1 / a.heads) if phase == "prefill" else 0.0
        attention = n * (4 * d**2 + 2 * length * d + quadratic)
    else:
        raise ValueError(f"Unknown form {form!r}; there are printed, fitted and physical.")
    return {
        "embedding": float(a.vocabulary * d),
        "attention": float(attention),
        "ffn": float(n * 2 * d * a.ffn),
        "layernorm": float(n * 8 * d),
        "output": float(a.vocabulary * d),
    }


@dataclass(frozen=True)
class Prices:
    """Cost of one token in prefill and in decode, $."""

    prefill: float
    decode: float


def server_prices(service: str) -> Prices:
    """API prices of Table 8 for the services traced: GPT, LLaMA, DeepSeek, Command."""
    models = {"GPT": "GPT-4o-mini", "LLaMA": "LLaMa-3.1-70b", "DeepSeek": "DeepSeek-V2.5", "Command": "Command"}
    table = assets.paper_table("disco", "table_08_service_pricing")
    if service not in models:
        raise ValueError(f"No price for {service!r}; there are {', '.join(models)}.")
    row = table[table["model"] == models[service]].iloc[0]  # of LLaMA's two vendors, the first is the one traced
    return Prices(row.input_price_usd_per_million_tokens * 1e-6, row.output_price_usd_per_million_tokens * 1e-6)


def device_prices(model: str, constrained: str, length: int = 32) -> Prices:
    """A device model's prices: operations per token times the exchange rate of the constrained endpoint.

    The operations are Table 6's, interpolated in the length L and held constant outside 32 to 128.
    """
    check_constrained(constrained)
    rate = ENERGY_TO_MONEY[constrained]
    if model not in PRINTED:
        raise ValueError(f"No device model {model!r}; there are {', '.join(PRINTED)}.")
    table = assets.paper_table("disco", "table_06_flops_per_token")
    table = table[table["model"] == model]

    def flops(phase: str) -> float:
        rows = table[table["phase"] == phase].sort_values("sequence_length_tokens")
        return float(np.interp(length, rows["sequence_length_tokens"], rows["flops_billion"])) * 1e9

    return Prices(rate * flops("prefill"), rate * flops("decode"))

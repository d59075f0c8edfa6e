"""Tables 6 to 8 and Equations 7 to 9: what reproduces, and what does not."""

from __future__ import annotations

import pytest

from ondevice import assets
from ondevice_papers.disco import costs

CONSISTENT = ["BLOOM-1.1B", "Qwen-0.5B"]


def table_7(model: str) -> dict[str, float]:
    rows = assets.paper_table("disco", "table_07_flops_component_share")
    rows = rows[rows["model"] == model]
    return dict(zip(rows["component"], rows["share_percent"], strict=True))


def table_6(phase: str) -> dict[tuple[str, int], float]:
    rows = assets.paper_table("disco", "table_06_flops_per_token")
    rows = rows[rows["phase"] == phase]
    return {(r.model, r.sequence_length_tokens): r.flops_billion for r in rows.itertuples()}


def operations(model: str, length: int, phase: costs.Phase, form: costs.Form) -> float:
    return sum(costs.components(costs.PRINTED[model], length, phase, form).values())


def shares(model: str, form: costs.Form) -> dict[str, float]:
    parts = costs.components(costs.PRINTED[model], 128, "decode", form)
    return {name: 100 * value / sum(parts.values()) for name, value in parts.items()}


@pytest.mark.parametrize("model", CONSISTENT)
def test_table_7_is_reproduced_to_the_printed_digit_by_the_fitted_form(model):
    printed = table_7(model)
    assert {name: round(share, 2) for name, share in shares(model, "fitted").items()} == printed


@pytest.mark.parametrize("model", CONSISTENT)
def test_table_7_is_not_what_equation_9_as_printed_gives(model):
    assert shares(model, "printed")["attention"] < table_7(model)["attention"] - 0.3


@pytest.mark.parametrize("form", ["fitted", "printed"])
@pytest.mark.parametrize("model", CONSISTENT)
def test_table_6_decode_is_reproduced(model, form):
    for (name, length), printed in table_6("decode").items():
        if name == model:
            ours = operations(model, length, "decode", form) / 1e9
            assert ours == pytest.approx(printed, abs=0.0051)


@pytest.mark.parametrize("model", CONSISTENT)
def test_equation_8_as_printed_fails_on_prefill_and_the_fit_comes_closer(model):
    for (name, length), printed in table_6("prefill").items():
        if name != model:
            continue
        by_equation, by_fit = (operations(model, length, "prefill", form) / 1e9 for form in ("printed", "fitted"))
        assert by_equation < printed * 0.98
        assert abs(by_fit - printed) < abs(by_equation - printed)
        assert by_fit == pytest.approx(printed, rel=0.025)


def test_physically_an_embedding_is_free_and_prefill_needs_one_output_projection():
    prefill, decode = (
        costs.components(costs.PUBLISHED["Qwen-0.5B"], 100, phase, "physical") for phase in ("prefill", "decode")
    )
    assert prefill["embedding"] == decode["embedding"] == 0
    assert prefill["output"] == pytest.approx(decode["output"] / 100)
    assert prefill["attention"] < decode["attention"]


def test_table_6_is_interpolated_and_held_outside_its_lengths():
    at = {
        n: costs.device_prices("BLOOM-1.1B", "server", n).prefill / costs.ENERGY_TO_MONEY["server"] / 1e9
        for n in (1, 32, 48, 64, 128, 4000)
    }
    assert at[1] == at[32] == pytest.approx(0.85)
    assert at[48] == pytest.approx((0.85 + 0.93) / 2)
    assert at[4000] == at[128] == pytest.approx(1.25)


def test_a_device_token_is_dearer_where_the_device_is_constrained():
    cheap, dear = (costs.device_prices("Qwen-0.5B", side, 32) for side in ("server", "device"))
    assert dear.decode / cheap.decode == pytest.approx(5 / 0.3)
    assert cheap.decode == pytest.approx(0.37e9 * 0.3e-15)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: costs.server_prices("Gemini"), "'Gemini'.*GPT"),
        (lambda: costs.device_prices("Qwen-0.5B", "cloud"), "'cloud'"),
        (lambda: costs.components(costs.PRINTED["Qwen-0.5B"], 1, "decode", "exact"), "'exact'"),
        (lambda: costs.components(costs.PRINTED["Qwen-0.5B"], 0, "decode"), "not 0"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()

"""What is computed from sd.npu's printed numbers, by hand."""

import pytest

from ondevice.evidence import PaperRun
from ondevice_studies.sdnpu import printed, values
from ondevice_studies.sdnpu.claims import CLAIMS


def test_the_line_of_figure_6_meets_both_times():
    assert printed.figure_6([1, 32]).tolist() == pytest.approx([51.1, 182.4])
    assert printed.flat([1, 32]).tolist() == pytest.approx([51.1, 51.1])


def test_throughput_lost_on_a_small_graph():
    eight, many = printed.figure_6([8, 64])
    assert printed.throughput_loss(printed.figure_6) == pytest.approx(100 * (1 - 8 / eight * many / 64))
    assert printed.throughput_loss(printed.flat) == pytest.approx(87.5)


def test_the_papers_parts_do_not_agree_on_a_forward():
    table = printed.forwards().set_index("source")
    assert table.loc["Figure 5, decoding at 4.2 tokens per pass", "high"] == pytest.approx(672)
    assert table.loc["Tables 3 and 4, sd.npu", "high"] == pytest.approx(15.08 * 4.21)
    assert table["low"].max() > 10 * table["high"].min()


def test_a_claim_on_a_line_of_the_paper_has_an_interval_over_its_lines_and_no_sample_would_decide_it():
    lines = (printed.figure_6, printed.flat)
    estimate = values.by_lines(printed.throughput_loss, lines)
    assert estimate.value == printed.throughput_loss(printed.figure_6) == estimate.low < estimate.high == 87.5
    judged = PaperRun("sdnpu", {}, CLAIMS)
    line = judged.judge("sdnpu-c60", CLAIMS["sdnpu-c60"].values({"lines": lines})[0], null=87.5)
    assert line.startswith("undecided") and "would decide" not in line

"""Recorded answers that run again: those that are drawn, and drafters with their state, as DIAA's tables."""

import pandas as pd
import pytest

from ondevice.evidence import agreement, load
from ondevice_papers.diaa.drafter import Diaa
from ondevice_papers.diaa.tables import Tables
from ondevice_studies.diaa import methods, record
from ondevice_studies.diaa.methods import PLAIN, SMALL, Workbench
from ondevice_studies.disco import record as disco
from ondevice_studies.sdnpu import study, workbench
from ondevice_studies.speculation import rerun

UNIT = [*rerun.REQUEST, "method"]
EXACT = ["prompt_sha", "answer_sha", "tokens", "passes"]


@pytest.fixture(scope="module")
def answers():
    return load("diaa", "answers")


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("paper", ["diaa", "sdnpu"])
def test_every_method_runs_again_alone_or_from_the_beginning_of_its_state(answers, paper, seed, capsys):
    recorded = answers if paper == "diaa" else study.of_the_paper(load(paper, "answers"), "method")
    module = record if paper == "diaa" else workbench
    rows = module.drawn(recorded, seed, 0)
    assert set(rows["method"]) == set(recorded["method"]) and not rows.duplicated(UNIT).any()
    assert rows["margin"].min() >= rerun.NEAR
    plain = rows[rows["method"] == PLAIN]
    assert len(plain) == {"diaa": 10, "sdnpu": 4}[paper] and plain["tokens"].max() >= 64
    assert plain.groupby(["model", "set"]).ngroups == recorded.groupby(["model", "set"]).ngroups
    alone = methods.FORGETFUL if paper == "diaa" else ("vanilla", "PLD")
    kept = rows[~rows["method"].str.startswith(alone)]
    assert (kept.groupby("method").size() == rerun.STRETCH).all()
    assert len(kept[[*rerun.TASK, "method"]].drop_duplicates()) == kept["method"].nunique()
    rank = recorded.groupby([*rerun.TASK, "method"])["request"].rank()
    assert recorded.assign(rank=rank).merge(kept[UNIT])["rank"].max() <= rerun.STRETCH
    assert capsys.readouterr().out.startswith(f"drawn by seed {seed}, ")
    assert not rows.equals(module.drawn(recorded, seed + 10, 0)) and rows.equals(module.drawn(recorded, seed, 0))


class Forgetful(Diaa):
    def begin(self, prompt):
        self.tables = Tables.empty(self.vocabulary)
        super().begin(prompt)


def test_tables_that_forget_differ_from_the_record(answers):
    rows = answers[(answers["model"] == SMALL) & (answers["set"] == "tasks") & (answers["task"] == "question")]
    rows = rows[rows["method"].isin(["cold", PLAIN]) & (rows["request"] < rerun.STRETCH)]
    bench = Workbench(SMALL)
    assert agreement(rows, record.run_again({SMALL: bench}, rows)[0], UNIT, EXACT).agree == 2 * rerun.STRETCH
    bench.diaa = Forgetful
    differing = agreement(rows, record.run_again({SMALL: bench}, rows)[0], UNIT, EXACT).differing
    assert differing == [(SMALL, "tasks", "question", 1, "cold")]


def test_an_edited_prompt_is_refused(answers):
    rows = answers[(answers["model"] == SMALL) & (answers["set"] == "tasks") & (answers["request"] == 0)]
    rows = rows[rows["method"] == PLAIN].head(1)
    assert [request.limit for request in record.made_anew(Workbench(SMALL), rows)] == rows["tokens"].tolist()
    with pytest.raises(ValueError, match=str(rows["document"].iloc[0])):
        record.made_anew(Workbench(SMALL), rows.assign(prompt_sha="0" * 12))


def test_drawn_prompts_of_disco_are_of_every_family(capsys):
    recorded = load("disco", "quality")
    tasks = disco.drawn(recorded, 0, 0)
    assert len(tasks) == 10 and {task.family for task in tasks} == set(recorded["family"])
    names = pd.MultiIndex.from_frame(recorded[["family", "document"]])
    assert all((task.family, task.name) in names for task in tasks)


def test_a_near_tie_excuses_few_of_the_recorded_answers(answers):
    """A threshold of 0.1 would excuse two fifths of them."""
    plain = answers[answers["method"] == PLAIN].iloc[::8]
    found = agreement(plain, plain.assign(answer_sha="another"), UNIT, ["answer_sha"], margin="margin")
    assert found.near_ties < 0.01 * found.n and len(found.differing) > 0.99 * found.n

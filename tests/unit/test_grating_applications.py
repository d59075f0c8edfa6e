"""The three applications with rankers and writers that are known in advance, and once with bundled models."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest

from ondevice import assets, corpus
from ondevice.corpus.modules import held_out
from ondevice.grating import agent_memory, applications, findings, long_context, plots, rag, recordings
from ondevice.grating.agent_memory import CALLS, NO_MEMORY, Workload
from ondevice.grating.applications import ANSWER, EMBEDDING, KEYWORDS, RERANKER, Rank, Search
from ondevice.grating.printed import AGENT, CONTEXT, HF, NONE, OFFLOAD, OURS, RAG, STANDS_FOR
from ondevice.grating.pruning import ClusterRule, ranking
from ondevice.grating.recordings import QUESTIONS
from ondevice.grating.replay import measure, replay

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
MODULES = [name for name in (f"pack.part{n}" for n in range(40)) if held_out(name)][:6]
TRAINED = next(name for name in (f"pack.part{n}" for n in range(40)) if not held_out(name))


def document(module: str, number: int, more: int = 0) -> corpus.Document:
    """A documented function. more: parameters beside the first."""
    fields = "".join(
        f"p{n} : int\n    The {NUMBERS[number]} measure with the number {n} of the long list of all of them here.\n"
        for n in range(more + 1)
    )
    text = f"Compute the {NUMBERS[number]} thing of this package.\n\nParameters\n----------\n{fields}"
    return corpus.Document(f"{module}.call{number}", "pack", "function", "(p0)", text.strip(), "")


DOCUMENTS = [document(module, number) for number, module in enumerate([*MODULES, TRAINED])]


@pytest.fixture(autouse=True)
def places(tmp_path, monkeypatch):
    """Indexes go to a temporary folder, and toy documents are all the corpus."""
    real = assets.cache_folder

    def folder(name: str):
        (tmp_path / name).mkdir(exist_ok=True)
        return tmp_path / name if name == "retrieval" else real(name)

    monkeypatch.setattr(assets, "cache_folder", folder)
    monkeypatch.setattr(corpus, "documents", lambda split: ())


def by(score) -> Rank:
    """A method that ranks by a function of query and text."""

    def rank(query: str, documents: Sequence[str], k: int) -> list[tuple[int, float]]:
        found = [score(query, text) for text in documents]
        return [(place, float(found[place])) for place in sorted(range(len(found)), key=lambda i: -found[i])[:k]]

    return rank


class Reader:
    """A model that gives an answer if it stands in what it reads, in a tenth of a second a passage."""

    def __init__(self, known: Sequence[str]) -> None:
        self.known, self.prompts = known, list[str]()

    def __call__(self, prompt: str) -> tuple[str, float]:
        self.prompts.append(prompt)
        shown, _, asked = prompt.partition("<|user|>")
        number = next((word for word in reversed(NUMBERS) if f"call{NUMBERS.index(word)}?" in asked), "")
        said = next((one for one in self.known if f"{number} " in one and one in shown), "nothing of it")
        return said, 0.1 * shown.count("<|passage|>")


def answered(tasks: Sequence[corpus.Task]) -> Rank:
    """Ranks what answers the question first."""
    answer = {task.turns[-1][0]: task.answer for task in tasks}
    return by(lambda query, text: answer[query] in " ".join(text.split()))


# What they share


def test_search_merges_ten_of_either_list_by_their_ranks():
    texts = [f"the {word} thing of a house" for word in NUMBERS] + ["motor car", "vehicle with an engine"]
    found = Search(texts)("motor car", each=2)
    assert found.embedding == [10, 11] and found.places[0] == 10 and set(found.places) > set(found.embedding)
    assert len(found.places) == 3 and found.cosine == pytest.approx(1, abs=1e-5)
    assert set(found.seconds) == {KEYWORDS, EMBEDDING} and min(found.seconds.values()) > 0
    assert len(Search(texts[:3])("motor car").places) == 3


def test_a_time_is_a_mean_over_all_questions_also_of_those_without_the_part():
    cases = [
        {"setting": "s", "method": "m", "question": number, "precision": number, "seconds": seconds}
        for number, seconds in enumerate([{"a": 1.0}, {"a": 1.0, "b": 3.0}])
    ]
    found = applications.tables(RAG, cases)
    assert found.times.set_index("part")["seconds"].to_dict() == {"a": 1.0, "b": 1.5}
    assert list(found.times) == ["application", "setting", "method", "part", "seconds"]
    assert list(found.quality) == ["application", "setting", "method", "precision", "low", "high"]
    assert found.quality.iloc[0].tolist() == [RAG, "s", "m", 0.5, 0.0, 1.0]
    with pytest.raises(ValueError, match="no question for RAG"):
        applications.tables(RAG, [])


def test_methods_take_turns_at_being_first():
    of = {"a": by(lambda *_: 0), "b": by(lambda *_: 0), "c": by(lambda *_: 0)}
    firsts = [next(iter(applications.turns(of, number)))[0] for number in range(4)]
    assert firsts == ["a", "b", "c", "a"]


def test_a_bundled_reranker_ranks_alike_by_all_methods():
    texts = [
        "numpy.dot\nThe matrix product of two arrays.", "os.remove\nDelete a file.",
        "numpy.sort\nReturn a sorted copy of an array.", "io.open\nOpen a file and return it as a stream.",
    ]  # fmt: skip
    with applications.methods("minilm-reranker", None, mode="order", names=(HF, OFFLOAD, OURS)) as of:
        assert list(of) == [HF, OFFLOAD, OURS]
        found = {name: rank("Return a sorted copy of an array.", texts, 3) for name, rank in of.items()}
    scores = [z for _, z in found[HF]]
    assert scores == sorted(scores, reverse=True) and len(scores) == 3
    for name in (OFFLOAD, OURS):
        assert [place for place, _ in found[name]] == [place for place, _ in found[HF]]
        assert [z for _, z in found[name]] == pytest.approx(scores, abs=1e-4)


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match="no method 'other'"), applications.methods("x", None, names=["other"]):
        pass


def test_requests_that_cannot_be_served_are_refused():
    with pytest.raises(ValueError, match="no search 'web'"):
        applications.Request("x", searches=("web",))
    with pytest.raises(ValueError, match="minilm-reranker nothing to rank"):
        applications.Request("x", spec="minilm-reranker")


def test_the_memory_of_a_request_is_that_of_what_it_loads():
    request = applications.Request("What is x?", documents=("a file", "an array"), spec="minilm-reranker")
    wide = applications.footprint(request)
    narrow = applications.footprint(dataclasses.replace(request, method=OURS))
    layers = 6 * 7.1  # MB, in float32, of which GRATING has two
    assert wide["mb"].max() > layers and 14 < narrow["mb"].max() < wide["mb"].max() - 10
    assert wide["seconds"].is_monotonic_increasing and wide["mb"].iloc[0] == 0


def test_a_prompt_that_comes_again_costs_what_it_did():
    writer = applications.Writer("pydocs-lm-small")
    first = writer("<|user|>What is the return value of len?<|assistant|>")
    assert first[1] > 0 and writer("<|user|>What is the return value of len?<|assistant|>") is first
    assert writer.length("a b c d") > writer.length("a") and writer.seconds("<|user|>x", "open the file") > 0
    with pytest.raises(ValueError, match="needs 1 to"):
        writer("word " * writer.context)


# Retrieval-augmented answering


def test_rag_measures_what_was_found_and_what_was_said():
    library = rag.Library.of(DOCUMENTS)
    tasks = rag.questions(library, DOCUMENTS, 5)
    assert not any(task.passages for task in tasks)
    good = answered(tasks)
    bad = by(lambda query, text: -good(query, [text], 1)[0][1])
    reader = Reader([task.answer for task in tasks])
    found = rag.answering(library, tasks, {"r": {HF: good, OURS: good, "worst": bad}}, reader, k=1, each=4)
    quality = found.quality.set_index("method")["precision"]
    assert quality[HF] == quality[OURS] == 1 and quality["worst"] == 0
    cases = found.cases.set_index(["method", "question"])
    assert len(cases) == 4 * len(tasks)  # the one that warms up is not there
    assert cases.loc[HF]["answered"].all() and not cases.loc["worst"]["answered"].any()
    assert (cases.loc[NONE]["precision"] == cases.loc[NONE]["first"]).all()
    times = found.times.set_index(["method", "part"])["seconds"]
    assert times[HF, ANSWER] == pytest.approx(0.1) and (NONE, RERANKER) not in times.index
    assert times[HF, KEYWORDS] == times[OURS, KEYWORDS] > 0
    assert cases.loc[HF]["first"].all() and not cases.loc["worst"]["first"].any()


def test_what_pruning_does_to_the_passages_is_replayed():
    recording = recordings.load("pydocs-reranker")
    pools = recording.of(QUESTIONS)
    rules = {"pydocs-reranker": ClusterRule(0.2)}
    row = rag.replayed([recording], rules).to_dict("records")[0]
    kept = [replay(pools.pool(place), 2, rules["pydocs-reranker"]).chosen for place in range(len(pools))]
    best = [ranking(pools.pool(place)[-1])[:2] for place in range(len(pools))]
    assert row["pools"] == len(pools) > 100
    assert row["same"] == np.mean([set(a) == set(b) for a, b in zip(kept, best, strict=True)]) < 1
    assert row["full"] == pytest.approx(measure(pools, 2).full.mean())
    assert row["change"] == pytest.approx(row["pruned"] - row["full"]) and row["low"] < row["change"] <= row["high"]
    never = rag.replayed([recording], {"pydocs-reranker": ClusterRule(np.inf)})
    assert never["same"].item() == 1 and never["change"].item() == 0
    with pytest.raises(ValueError, match="no recording of other"):
        rag.replayed([recording], {"other": ClusterRule(1.0)})


def test_the_same_passages_make_the_same_prompt_in_whatever_order_they_were_ranked():
    library = rag.Library.of(DOCUMENTS)
    tasks = rag.questions(library, DOCUMENTS, 1)
    up, down = by(lambda _, text: len(text) + hash(text) % 7), by(lambda _, text: -len(text) - hash(text) % 7)
    reader = Reader([tasks[0].answer])
    found = rag.answering(library, tasks, {"r": {HF: up, OURS: down}}, reader, k=7, each=7)
    assert found.cases["candidates"].tolist() == [7] * 3
    assert len(set(reader.prompts)) == 1 and reader.prompts[0].count("<|passage|>") == 7


def test_questions_are_about_modules_that_no_reranker_was_trained_on():
    library = rag.Library.of(DOCUMENTS)
    assert TRAINED not in {task.name.rpartition(".")[0] for task in rag.questions(library, DOCUMENTS, len(MODULES))}
    with pytest.raises(ValueError, match=f"{len(MODULES)} questions that a passage answers, not 7"):
        rag.questions(library, DOCUMENTS, 7)
    with pytest.raises(ValueError, match="at least 1, not 0"):
        rag.questions(library, DOCUMENTS, 0)
    with pytest.raises(ValueError, match="K is at least 1, not 0"):
        rag.answering(library, rag.questions(library, DOCUMENTS, 1), {}, Reader([]), k=0)


def test_the_pipeline_is_of_the_reranker_in_memory():
    times = pd.DataFrame(
        [("r", method, part, seconds * (1 + (method == OURS)))
         for method in (HF, OURS) for part, seconds in ((KEYWORDS, 0.001), (EMBEDDING, 0.02), (RERANKER, 0.4))],
        columns=["setting", "method", "part", "seconds"],
    )  # fmt: skip
    peaks = {KEYWORDS: 10.0, EMBEDDING: 100.0, RERANKER: 120.0}
    stages = rag.pipeline(times, "r", peaks)
    assert stages["latency_ms"].tolist() == [1.0, 20.0, 400.0]
    assert findings.pipeline(stages)["grating-c08"] == pytest.approx(100 * 400 / 421)
    plots.pipeline(stages)
    with pytest.raises(ValueError, match="no peak of 'reranker'"):
        rag.pipeline(times, "r", {KEYWORDS: 1.0, EMBEDDING: 1.0})
    with pytest.raises(ValueError, match="no time"):
        rag.pipeline(times, "other", peaks)


# Agent memory


@pytest.mark.parametrize("name", agent_memory.WORKLOADS)
def test_workloads_are_the_same_every_time_and_tasks_are_worded_anew(name):
    work = agent_memory.workload(name, tasks=20, memory=100, known=0.75)
    assert work == agent_memory.workload(name, tasks=20, memory=100, known=0.75)
    assert work != agent_memory.workload(name, tasks=20, memory=100, known=0.75, seed=1)
    past = {one.actions for one in work.memory}
    assert len(past) == len(work.memory) == 100
    for new in (work.tasks, work.validation):
        assert sum(task.actions in past for task in new) == 15 and len(new) == 20
        assert {task.task for task in new}.isdisjoint({one.task for one in work.memory})
    assert {t.actions for t in work.tasks} - past and not ({t.actions for t in work.tasks} - past) & (
        {t.actions for t in work.validation} - past)  # fmt: skip
    assert not any("{" in one.text for one in (*work.memory, *work.tasks))


def test_every_task_of_the_templates_has_actions_of_its_own():
    work = agent_memory.workload("video", tasks=1, memory=252 - 2, known=0)
    assert len({one.actions for one in (*work.memory, *work.tasks, *work.validation)}) == 252


def test_workloads_that_the_templates_do_not_have_are_refused():
    for options, message in (
        ({"name": "music"}, "no workload 'music'"), ({"tasks": 0}, "at least one task"),
        ({"known": 1.5}, "not 20 and 1.5"),
        ({"memory": 252}, "memory of 252"), ({"memory": 3}, "memory of 3"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            agent_memory.workload(**{"name": "video"} | options)


def test_the_cut_off_is_the_lowest_that_is_precise_enough():
    scores, right = [1.0, 2.0, 3.0, 4.0, 4.0], [False, True, False, True, True]
    assert agent_memory.cut_off(scores, right, 0.6) == 1.0
    assert agent_memory.cut_off(scores, right, 0.75) == 2.0
    assert agent_memory.cut_off(scores, right, 0.9) == 4.0
    assert agent_memory.cut_off(scores, [False] * 5) == np.inf


def knowing(work: Workload, wrong: Sequence[str] = ()) -> Rank:
    """Ranks the past task with the right actions first, by 10 against -10; a wrong one for some tasks, by 10."""
    actions = {task.task: "; ".join(task.actions) for task in (*work.tasks, *work.validation)}

    def score(query: str, text: str) -> float:
        right = text.partition("\n")[2] == actions[query]
        return 10.0 if right is not (query in wrong) else -10.0

    return by(score)


def test_what_is_replayed_costs_no_call_and_what_is_not_known_costs_all():
    work = agent_memory.workload("video", tasks=12, memory=60)
    good = knowing(work)
    found = agent_memory.perform(work, {HF: good, OURS: good}, 2.0, each=60)
    cases = found.cases[found.cases["method"] == OURS]
    assert (cases["replayed"] == cases["known"]).all() and cases["replayed"].sum() == 9
    quality = found.quality.set_index("method")["precision"]
    assert quality[HF] == quality[OURS] == quality[NO_MEMORY] == 1
    calls = found.times[found.times["part"] == CALLS].set_index("method")["seconds"]
    lengths = {task.task: len(task.actions) for task in work.tasks}
    missed = [lengths[row["question"]] for row in cases.to_dict("records") if not row["known"]]
    assert calls[HF] == calls[OURS] == pytest.approx(2 * sum(missed) / 12)
    assert calls[NO_MEMORY] == pytest.approx(2 * sum(lengths.values()) / 12)
    assert set(found.times[found.times["method"] == NONE]["part"]) == {EMBEDDING, CALLS}


def test_a_wrong_replay_is_a_task_that_is_not_done():
    work = agent_memory.workload("community", tasks=12, memory=60)
    odd = [task.task for task in work.tasks][:3]
    found = agent_memory.perform(work, {HF: knowing(work), OURS: knowing(work, odd)}, 1.0, each=60)
    quality = found.quality.set_index("method")["precision"]
    assert quality[HF] == 1 and quality[OURS] == pytest.approx(9 / 12)
    unsure = agent_memory.perform(work, {HF: by(lambda *_: 0.0)}, 1.0)  # on validation, it is hardly ever right
    cases = unsure.cases[unsure.cases["method"] == HF]
    assert not cases["replayed"].any() and (cases["precision"] == 1).all()
    with pytest.raises(ValueError, match="0 seconds or more, not nan"):
        agent_memory.perform(work, {HF: knowing(work)}, float("nan"))


def test_a_call_is_timed_with_prompts_of_its_own():
    work = agent_memory.workload("video", tasks=3, memory=10)
    asked: list[tuple[str, str]] = []

    def seconds(prompt: str, output: str) -> float:
        asked.append((prompt, output))
        return float(len(asked))

    assert agent_memory.call_seconds(seconds, work, 3) == 3.0  # of 2, 3 and 4: the first warms up
    assert all(output in {action for task in work.tasks for action in task.actions} for _, output in asked)
    assert len({prompt for prompt, _ in asked}) == 4


# Long-context selection

LONG = document(MODULES[0], 5, more=40)


def test_a_long_text_is_cut_and_what_answers_is_kept():
    asked = long_context.texts([*DOCUMENTS[1:4], LONG], 1, longer=200, longest=3000, length=64)
    text = asked[0]
    assert len(text.segments) > 10 and text.right.any() and not text.right.all()
    assert text.task.name == LONG.name and text.titled[0].startswith(LONG.name)
    reader = Reader([text.task.answer])
    good = answered([text.task])
    bad = by(lambda query, one: -good(query, [one], 1)[0][1])
    found = long_context.selecting(asked, {"r": {HF: good, OURS: good, "worst": bad}}, reader, len, 1800, k=1)
    cases = found.cases.set_index("method")
    assert cases.loc[HF, "precision"] == 1 and cases.loc["worst", "precision"] == 0
    assert cases.loc[HF, "holds"] and not cases.loc["worst", "holds"]
    assert cases.loc[long_context.FIRST, "kept"] == [0]
    fits = cases.loc[NONE, "kept"]
    room = 1800 - applications.ANSWER_TOKENS
    assert 1 < len(fits) < len(text.segments)
    assert len(text.prompt(fits)) <= room < len(text.prompt([*fits, len(fits)]))
    times = found.times.set_index(["method", "part"])["seconds"]
    assert times[NONE, ANSWER] == pytest.approx(0.1 * len(fits)) and times[long_context.EMBEDDER, EMBEDDING] > 0


def test_kept_segments_are_read_in_the_order_of_the_text():
    asked = long_context.texts([*DOCUMENTS[1:4], LONG], 1, longer=200, longest=3000, length=64)
    last = by(lambda _, text: asked[0].titled.index(text))
    found = long_context.selecting(asked, {"r": {HF: last}}, Reader([]), len, 5000, k=3)
    count = len(asked[0].segments)
    assert found.cases.set_index("method").loc[HF, "kept"] == [count - 3, count - 2, count - 1]


def test_texts_that_are_not_long_or_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="0 questions on documents of such lengths, not 1"):
        long_context.texts(DOCUMENTS, 1)
    asked = long_context.texts([*DOCUMENTS[1:4], LONG], 1, longer=200, longest=3000)
    with pytest.raises(ValueError, match="Not one segment"):
        long_context.selecting(asked, {"r": {HF: by(lambda *_: 0)}}, Reader([]), len, 100)


# Figures and claims


def test_the_tables_are_those_of_the_figures_and_the_claims():
    library = rag.Library.of(DOCUMENTS)
    tasks = rag.questions(library, DOCUMENTS, 2)
    of = {HF: answered(tasks), OURS: answered(tasks)}
    reader = Reader([task.answer for task in tasks])
    works = [agent_memory.workload(name, tasks=4, memory=20) for name in agent_memory.WORKLOADS]
    asked = long_context.texts([*DOCUMENTS[1:4], LONG], 1, longer=200, longest=3000)
    chosen = answered([asked[0].task])
    found = {
        RAG: [rag.answering(library, tasks, dict.fromkeys(STANDS_FOR.values(), of), reader)],
        AGENT: [agent_memory.perform(work, {HF: knowing(work), OURS: knowing(work)}, 1.0) for work in works],
        CONTEXT: [long_context.selecting(asked, {"pydocs-reranker": {HF: chosen, OURS: chosen}}, reader, len, 5000)],
    }
    times, quality = (
        {name: pd.concat([getattr(one, table) for one in rows]) for name, rows in found.items()}
        for table in ("times", "quality")
    )
    keys = pd.concat(times.values())[applications.KEYS].drop_duplicates()
    keys = keys[keys["method"].isin([HF, OURS])]
    footprints = pd.concat([keys.assign(seconds=s, mb=m * (1 + (keys["method"] == HF))) for s, m in ((0, 1), (1, 9))])
    figures = [
        plots.application(RAG, times[RAG], quality[RAG], footprints[footprints["application"] == RAG]),
        *(plots.application(name, times[name], quality[name]) for name in (AGENT, CONTEXT)),
    ]  # fmt: skip
    assert [len(figure.axes) for figure in figures] == [6, 4, 2]
    values = findings.applications(pd.concat(times.values()), pd.concat(quality.values()), footprints, 10.0)
    assert values["grating-c31"] == 0 and values["grating-c36"] == 0.9 and values["grating-c05"] == (50.0, 50.0)

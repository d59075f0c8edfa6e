"""Right answers to private and public questions: by either side alone, by DRAGON, and by the side of larger weight.

Two forms of relevance: BM25's share of the question, and a reranker's. Greedy and in lockstep, so without a clock.

Run: python tests/benchmarks/bench_relevance.py [--split validation] [--model NAME]
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from ondevice import models
from ondevice.causal_lm import CausalLM
from ondevice.retrieval import SparseIndex, embedder
from ondevice_programs.pair import relevance, terminal
from ondevice_programs.pair.guard import Guard
from ondevice_programs.pair.node import WEIGHT_TEMPERATURE, Documents, Node
from ondevice_programs.reranker import Reranker
from ondevice_studies.dragon import sides
from ondevice_studies.dragon.answers import ROUTER
from ondevice_studies.dragon.lockstep import DRAGON, ON_CLOUD, ON_DEVICE

SHARE, RERANKED = "BM25's share", "reranker"
TOGETHER = 6  # questions of a forward
METHODS = {SHARE: (DRAGON,), RERANKED: (ON_DEVICE, ON_CLOUD, DRAGON)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--split", default="test", choices=["validation", "test"])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    options = parser.parse_args()
    nodes, rows = both(options.model, options.split), list[dict[str, object]]()
    for group in sides.groups(sides.questions(options.split), TOGETHER):
        rows += answered(nodes, group)
    show(rows, options)
    show_guard(rows, options)


def both(model: str, split: sides.Split) -> dict[str, dict[str, Node]]:
    """By form of relevance, the two sides."""
    loaded = models.load(model)
    lm = CausalLM(loaded.model)
    reranker = Reranker(relevance.RERANKER, memory_budget=relevance.MEMORY, mode="order", calibration=False)
    scorer = relevance.Scorer(reranker, embedder())
    nodes: dict[str, dict[str, Node]] = {SHARE: {}, RERANKED: {}}
    for side, texts in sides.texts(split).items():
        plain = Documents(texts, SparseIndex.build(texts))
        scored = relevance.Scored(plain.texts, plain.index, scorer=scorer)
        for form, documents in ((SHARE, plain), (RERANKED, scored)):
            over = relevance.TEMPERATURE if form == RERANKED else WEIGHT_TEMPERATURE
            nodes[form][side] = Node(lm, loaded.tokenizer, documents, weight_temperature=over, name=model)
    return nodes


def answered(nodes: dict[str, dict[str, Node]], group: Sequence[sides.SideQuestion]) -> list[dict[str, object]]:
    """A row a question, form and method."""
    rows = list[dict[str, object]]()
    for form, pair in nodes.items():
        tokenizer = pair["device"].tokenizer
        answers = sides.answers(pair, [question.text for question in group], METHODS[form])
        for question, answer in zip(group, answers, strict=True):
            tokens_of = dict(answer.tokens)
            if answer.router in tokens_of:
                tokens_of[ROUTER] = tokens_of[answer.router]
            for method, tokens in tokens_of.items():
                text = str(tokenizer.decode(tokens, skip_special_tokens=True))
                rows.append({
                    "question": question.text, "holder": question.holder, "form": form, "method": method,
                    "right": question.right(text), "text": text, "tokens": tokens, "log_h": answer.log_weights,
                })  # fmt: skip
    return rows


def show(rows: list[dict[str, object]], options: argparse.Namespace) -> None:
    """Right answers, and how many are lost and gained against the side alone that holds the answer."""

    def right(form: str, method: str, holder: str) -> dict[str, bool]:
        return {
            str(row["question"]): bool(row["right"]) for row in rows
            if (row["form"], row["method"], row["holder"]) == (form, method, holder)
        }  # fmt: skip

    print(f"{options.model}, {options.split} split, greedy")
    print(f"{'relevance':14}{'method':20}{'private':>22}{'public':>22}")
    for form, method in ((RERANKED, ON_DEVICE), (RERANKED, ON_CLOUD), (RERANKED, ROUTER), (SHARE, DRAGON),
                         (RERANKED, DRAGON)):  # fmt: skip
        cells = []
        for holder, alone in (("device", ON_DEVICE), ("cloud", ON_CLOUD)):
            new, old = right(form, method, holder), right(RERANKED, alone, holder)
            lost = sum(old[question] and not new[question] for question in old)
            gained = sum(new[question] and not old[question] for question in old)
            cells.append(f"{sum(new.values())} of {len(new)} (-{lost} +{gained})")
        print(f"{form:14}{method:20}" + "".join(f"{cell:>22}" for cell in cells))


def show_guard(rows: list[dict[str, object]], options: argparse.Namespace) -> None:
    """DRAGON's answers under a guard of each length: how many it stops, and what of private text has left by then.

    told: the expected answer had left. words: of private notes, neither function words nor the question's, had left.
    """
    tokenizer = models.load(options.model).tokenizer
    notes = sides.texts(options.split)["device"]
    ids = [list(tokenizer(note, add_special_tokens=False).input_ids) for note in notes]
    private = {word.lower() for note in notes for word in terminal.WORD.findall(note)} - terminal.FUNCTION_WORDS
    asked = {question.text: question for question in sides.questions(options.split)}
    print(f"{'guard':>6}{'private: stopped':>18}{'told':>7}{'words':>7}{'public: stopped':>18}{'right ones':>12}")
    for length in (2, 3, 4, 5, 6, 8, 0):
        guard = Guard(ids, length) if length else None
        counts = dict.fromkeys(("stopped", "told", "words", "public", "right"), 0)
        for row in rows:
            if (row["form"], row["method"]) != (RERANKED, DRAGON):
                continue
            tokens = list[int](row["tokens"])  # type: ignore[call-overload]
            ends = (end for end in range(len(tokens)) if guard is not None and guard.quotes(tokens[: end + 1]))
            left = next(ends, len(tokens))
            text = str(tokenizer.decode(tokens[:left], skip_special_tokens=True))
            question = asked[str(row["question"])]
            stopped = left < len(tokens)
            if row["holder"] == "device":
                of_question = {word.lower() for word in terminal.WORD.findall(question.text)}
                counts["stopped"] += stopped
                counts["told"] += question.right(text)
                counts["words"] += sum(
                    word.lower() in private - of_question for word in terminal.WORD.findall(text)
                )
            else:
                counts["public"] += stopped
                counts["right"] += stopped and bool(row["right"])
        print(f"{length or 'off':>6}{counts['stopped']:>18}{counts['told']:>7}{counts['words']:>7}"
              f"{counts['public']:>18}{counts['right']:>12}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

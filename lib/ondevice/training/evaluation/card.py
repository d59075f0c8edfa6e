"""Model cards: Markdown from evaluation.json alone, so that a card can be written again without measuring."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ondevice import assets
from ondevice.training.evaluation.bars import BARS, Bar, closed_book_is_well_below
from ondevice.training.evaluation.retrieval_gain import STEPS
from ondevice.training.evaluation.tasks import CLOSED
from ondevice.training.language_model import Recipe

EVALUATION = "evaluation.json"
Evaluation = Mapping[str, Any]


def read(folder: Path) -> Evaluation | None:
    """A folder's evaluation of a language model, None where there is none."""
    path = folder / EVALUATION
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    return found if found and "results" in found and "perplexity" in found["results"] else None


def write_card(folder: Path) -> None:
    """Write a folder's README.md; the sibling folders' models are what it is compared with."""
    evaluation = read(folder)
    if evaluation is None:
        raise FileNotFoundError(f"{folder.name} has no {EVALUATION} of a language model.")
    others = {place.name: found for place in sorted(folder.resolve().parent.iterdir())
              if place.name != folder.resolve().name and place.is_dir() and (found := read(place))}  # fmt: skip
    assets.write_text(folder / "README.md", card(folder.resolve().name, evaluation, others))


def card(name: str, evaluation: Evaluation, others: Mapping[str, Evaluation]) -> str:
    """The model card. others: evaluations of other models; a `base` is compared with a `small` among them."""
    parts = [
        f"# Model card: {name}\n\n{_opening(evaluation)}",
        f"## Measured on held-out documents\n{_bars_table(evaluation, others)}\n\n{_method(evaluation)}",
        f"## Retrieval, mixed as in DRAGON's Eq. 2\n{_retrieval_table(evaluation)}",
        f"## Tasks\n{_tasks_table(evaluation)}",
        f"## Training\n{_training(evaluation)}",
        f"## Use and limits\n{_limits(evaluation)}",
        f"## Licences\n{_licences(evaluation)}",
    ]
    return "\n\n".join(parts) + "\n"


def verdict(met: bool | None) -> str:
    """How a table says whether a bar is met."""
    return {True: "met", False: "**not met**", None: "no bar"}[met]


def shown(estimate: Mapping[str, float] | None, percent: bool = False) -> str:
    """`12.3 ± 0.4`: a value and its standard error."""
    if estimate is None:
        return "-"
    value, error = estimate["value"], estimate["standard_error"]
    if percent:
        return f"{100 * value:.1f} ± {100 * error:.1f} %"
    digits = 2 if abs(value) >= 1 else 3
    return f"{value:.{digits}f} ± {error:.{digits}f}"


def _opening(evaluation: Evaluation) -> str:
    model = evaluation["model"]
    return (
        f"A causal language model of the Llama architecture with {model['parameters'] / 1e6:.1f} million parameters "
        f"({model['num_hidden_layers']} layers of width {model['hidden_size']}, {model['num_attention_heads']} heads, "
        f"feed-forward {model['intermediate_size']}, {model['vocab_size']} byte-level BPE entries tied to the output, "
        f"context {model['max_position_embeddings']}), trained from random weights for this repository on docstrings "
        "of Python packages ([corpus card](../../corpus/README.md)). It stands in for models that are too large to "
        "commit and to run on a CPU in seconds. Weights are stored in bfloat16."
    )


def _bars_table(evaluation: Evaluation, others: Mapping[str, Evaluation]) -> str:
    results, size = evaluation["results"], evaluation["model"]["size"]
    lines = ["| what | bar | measured | 95 % interval | over | met? |", "|---|---|---|---|---|---|"]
    for bar in BARS:
        found = bar.measured(results)
        low, high = (_plain(found[key], bar) for key in ("low", "high"))
        lines.append(f"| {bar.label} | {_limit(bar, size)} | {shown(found, bar.percent)} | {low} to {high} | "
                     f"{found['count']} | {verdict(bar.met(results, size))} |")  # fmt: skip
    families = results["tasks"]["families"]
    closed = f"{shown(families[CLOSED]['hit'], True)}; `question`: {shown(families['question']['hit'], True)}"
    met = closed_book_is_well_below(results) if size == "base" else None
    lines.append(f"| The same questions without passages | {'under half' if size == 'base' else '-'} | {closed} | | "
                 f"{families[CLOSED]['hit']['count']} | {verdict(met)} |")  # fmt: skip
    lines += [_comparison(evaluation, name, other) for name, other in others.items()
              if size == "base" and other["model"]["size"] == "small"]  # fmt: skip
    return "\n".join(lines)


def _comparison(evaluation: Evaluation, name: str, other: Evaluation) -> str:
    worse = [bar.label for bar in BARS if not bar.better(evaluation["results"], other["results"])]
    found = f"not on: {'; '.join(worse)}" if worse else f"{len(BARS)} of {len(BARS)} rows"
    return f"| Better than {name} on every row above with a number | every row | {found} | | | {verdict(not worse)} |"


def _plain(value: float, bar: Bar) -> str:
    return f"{100 * value:.1f} %" if bar.percent else f"{value:.{2 if abs(value) >= 1 else 3}f}"


def _limit(bar: Bar, size: str | None) -> str:
    limit = bar.limits.get(size or "")
    return "-" if limit is None else f"{bar.sense} {100 * limit:g} %" if bar.percent else f"{bar.sense} {limit:g}"


def _method(evaluation: Evaluation) -> str:
    results = evaluation["results"]
    copies, samples = results["copying"], evaluation["limit"]
    partial = "" if samples == 1 else f" **Only {100 * samples:g} % of the samples were used.**"
    return (
        f"Test split; tasks in {evaluation['arithmetic']['tasks']}, the other numbers in "
        f"{evaluation['arithmetic']['others']}; ± is a bootstrap standard error "
        f"({evaluation['bootstrap']['draws']} draws, seed {evaluation['bootstrap']['seed']}) over windows, texts or "
        f"tasks, `evaluation.json` has every number.{partial} A met or missed bar is judged by the value alone.\n\n"
        f"- Perplexity: windows of 512 tokens evenly spaced over the split, each read on its own. On the validation "
        f"split it is {shown(results['perplexity']['validation'])}.\n"
        "- Copying: the first 128 tokens of a document, the end token, the same again. With the first copy as a "
        f"passage and the second behind the document marker the ratio is {shown(copies['passage'])}.\n"
        "- Outputs: greedy, at most 256 new tokens, a loop being an 8-gram of tokens that occurs three times; the "
        "share is the mean over the seven families, as each weighs the same.\n"
        "- Answered: the same words as the reference, or a word F1 (ROUGE-1) above 0.8."
    )


def _retrieval_table(evaluation: Evaluation) -> str:
    found = evaluation["results"]["retrieval"]
    lines = ["| passages | perplexity | fall against none | fall against the row before | fall with another text's "
             "passages |", "|---|---|---|---|---|",
             f"| 0 | {shown(found['perplexity']['0'])} | | | |"]  # fmt: skip
    for count in map(str, STEPS):
        columns = ("reduction", "reduction_from_step_before", "reduction_with_another_texts_passages")
        cells = [shown(found["perplexity"][count]), *(shown(found[column][count], True) for column in columns)]
        lines.append(f"| {count} | {' | '.join(cells)} |")
    lines.append(
        f"\n{found['perplexity']['0']['count']} test documents: the heading and 32 tokens of the docstring are given "
        f"and are the query, the next 64 to 96 are scored. Retriever: {found['retriever']} ({found['passages']:,}). "
        "Every passage stands alone before the text (`<|passage|>title, text<|document|>heading, ...`, the format of "
        "training; without one the text follows an end token, as documents do), and the next-token distributions are "
        f"averaged with weights softmax(score / {found['temperature']:g}), the scores taken once, at the query. The "
        f"temperature is that of least loss at 8 passages on {found['texts_for_temperature']} validation documents. "
        "The last column shows what the format and the averaging do without relevance."
    )
    return "\n".join(lines)


def _tasks_table(evaluation: Evaluation) -> str:
    tasks = evaluation["results"]["tasks"]
    lines = ["| family | tasks | ended, no loop | answered | of answers not in train | exact | ROUGE-1 "
             "| teacher-forced tokens right | repeated 4-grams (reference) |",
             "|---|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for family, row in tasks["families"].items():
        unseen = row["hit_of_answers_not_in_train"]
        cells = [
            family, str(row["ended"]["count"]), shown(row["ends_well"], True), shown(row["hit"], True),
            f"{shown(unseen, True)}{' of ' + str(unseen['count']) if unseen else ''}", shown(row["exact"], True),
            shown(row["rouge1"]), shown(row["teacher_forced_accuracy"], True),
            f"{_share(row['repeated_4grams'])} ({_share(row['repeated_4grams_of_reference'])})",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    free, difference = tasks["free_running"], tasks["rag_minus_passages_removed"]
    lines.append(
        f"\nPassages raise the answered share of the `rag` questions by {shown(difference, True)}. Single sentences "
        "repeat across documents (inherited parameters), so a reference answer can stand word for word in a train "
        "document although its own document does not: the fifth column leaves those out.\n\n"
        f"Free-running (256 greedy tokens after a document's heading, past its end): {_share(free['repeated_4grams'])} "
        f"of 4-grams repeat an earlier one of the same text, against {_share(free['repeated_4grams_of_documents'])} in "
        f"256 tokens of the documents themselves; {shown(free['loops'], True)} of the texts loop."
    )
    return "\n".join(lines)


def _share(estimate: Mapping[str, float] | None) -> str:
    return "-" if estimate is None else f"{100 * estimate['value']:.1f} %"


def _training(evaluation: Evaluation) -> str:
    splits, run = evaluation["corpus"]["splits"], evaluation.get("training")
    train = splits["train"]
    later = ", one in two while the rate decays" if run and run.get("more_tasks_in_decay") else ""
    data = (
        f"Train split: {train['documents']:,} documents ({train['tokens']:,} tokens) and {train['task_tokens']:,} "
        f"tokens of task texts made from them; one row in four is task text{later}. Validation and test: "
        f"{splits['validation']['documents']:,} and {splits['test']['documents']:,} documents, split by a hash of the "
        "qualified name, near-duplicates removed. The package versions' sha256 is "
        f"`{evaluation['corpus']['sha256_of_packages'][:16]}`."
    )
    if run is None:
        return f"{data}\n\nThe run's log was not at hand when this card was written."
    passes = run["tokens"] / (train["tokens"] + train["task_tokens"])
    recipe = (
        f"Muon for the layers' matrices (peak rate {run['peak_matrix_rate']:g}), AdamW for embeddings and norms (peak "
        f"rate {run['peak_vector_rate']:g}), warm-up over {Recipe.warmup} steps, constant, then linear decay over the "
        f"last 40 %; gradients clipped at 1, no dropout. {run['tokens']:,} tokens in {run['steps']:,} steps of "
        f"{run['tokens_a_step']:,} ({passes:.2f} passes over the data), {run['minutes']:g} minutes on {run['machine']}."
    )
    unfinished = "" if run["finished"] else "\n\n**The run had not finished: its learning rate had not come to zero.**"
    return (f"{data}\n\n{recipe}{unfinished}\n\n"
            "![training loss and validation perplexity against tokens](curve.png)\n\nRows: `curve.csv`.")  # fmt: skip


def _limits(evaluation: Evaluation) -> str:
    return (
        "For measuring inference methods: how tokens are drafted and accepted, mixed, cached and scheduled, with a "
        "model that has learnt something. Not for answering questions about Python: what it says of parameters is "
        "often wrong, and closed-book answers are mostly invented.\n\n"
        "- It knows one genre, English docstrings; perplexity on other text is far higher.\n"
        "- Tasks are templates filled from docstrings; their scores do not carry over to the benchmarks whose place "
        "they take.\n"
        "- Held-out documents come from the same packages as the training text, near-duplicates removed by whole "
        "documents, not by sentences: part of what is scored stands somewhere in train, and retrieval finds such "
        "passages. The numbers compare methods and models on this corpus and are no measure of generalisation beyond "
        "it.\n"
        f"- Prompt and output together hold {evaluation['model']['max_position_embeddings']} tokens."
    )


def _licences(evaluation: Evaluation) -> str:
    groups: dict[str, list[str]] = {}
    for package, licence in sorted(evaluation["corpus"]["licences"].items()):
        groups.setdefault(licence, []).append(package)
    rows = [f"- {licence}: {', '.join(names)}" for licence, names in sorted(groups.items(), key=lambda g: -len(g[1]))]
    return (
        "The weights are published under this repository's licence. The training text is not distributed; it is "
        "docstrings of these packages, under the licences they name:\n\n" + "\n".join(rows)
    )

"""Every drafter on hundreds of prompts, in float32, and what the machine takes: the records of the notebook.

`make record PAPER=sdnpu` records all; it goes on where it was stopped. `--parts drafts --models pydocs-lm-base` records
a part, so that several processes share the work; times (`ondevice_studies.sdnpu.timing`) need a quiet machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product

import torch

from ondevice import corpus, models
from ondevice.evidence import Recorder
from ondevice_papers.sdnpu.drafter import methods
from ondevice_studies.sdnpu import compiler, similarity, spec_bench, timing
from ondevice_studies.sdnpu.workbench import (
    BASE,
    COUNT,
    LONG_ANSWER,
    LONG_COUNT,
    LONG_PROMPT,
    LONGEST,
    PLAIN,
    SETS,
    SMALL,
    Workbench,
    requests,
    run_method,
)
from ondevice_studies.speculation import plain


def recorders() -> dict[str, Recorder]:
    """A method on a set is the unit, and goes into all."""
    parameters = {
        "requests a task": COUNT,
        "tokens": LONGEST,
        "long prompts": LONG_PROMPT,
        "long answers": LONG_ANSWER,
        "long requests a task": LONG_COUNT,
        "threads": 1,
        "dtype": "float32",
    }
    return {
        name: Recorder("sdnpu", name, ["model", "set", "method"], parameters, [BASE, SMALL])
        for name in ("answers", "passes", "rejections")
    }


def record(model: str) -> None:
    """Record what is missing of a model, a set at a time."""
    bench = Workbench(model)
    for request_set in SETS:
        kept = recorders()
        done = kept["passes"].done
        missing = [method for method in methods(bench.lm.vocabulary) if (model, request_set, method) not in done]
        if not missing:
            continue
        chosen = requests(bench, request_set)
        plain = run_method(bench, PLAIN, request_set, chosen)
        right = plain[0][["margin", "answer_sha"]].to_numpy()
        for method in missing:
            answers, passes, rejections = plain if method == PLAIN else run_method(bench, method, request_set, chosen)
            answers = answers.assign(margin=right[:, 0].astype(float), identical=answers["answer_sha"] == right[:, 1])
            for name, table in (("answers", answers), ("rejections", rejections), ("passes", passes)):
                if len(table):
                    kept[name].add(table)
                    kept[name].checkpoint()
            same = f"{answers['identical'].sum()} of {len(answers)} identical"
            rate = passes["emitted"].mean()
            print(f"{model} {request_set} {method}: {rate:.3f} tokens a pass, {same}", flush=True)


def similar(specs: Sequence[str]) -> None:
    """Figure 3: cosines of answers' and contexts' embeddings, overlaps, and what is copied; no drafter has a part."""
    names = ("cosines", "contexts", "copied")
    kept = {name: Recorder("sdnpu", name, ["model"], {"requests a task": COUNT}, specs) for name in names}
    for model in specs:
        if (model,) not in kept["copied"].done:
            bench = Workbench(model)
            tokenizer = corpus.tokenizer()
            chosen = requests(bench, "tasks")
            kept["cosines"].add(similarity.of_answers(chosen, model, tokenizer))
            kept["contexts"].add(similarity.of_contexts(chosen, model, tokenizer))
            kept["copied"].add(similarity.copied(chosen, model))
    print(*(recorder.finish() for recorder in kept.values()), sep="\n")


def finish() -> None:
    """Write the record once nothing is missing."""
    kept = recorders()
    names = methods(len(corpus.tokenizer()))
    if set(product((BASE, SMALL), SETS, names)) <= kept["passes"].done:
        print(*(recorder.finish() for recorder in kept.values()), sep="\n")


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parts = ["drafts", "similarity", "spec-bench", *timing.PARTS, *compiler.PARTS]
    parser = argparse.ArgumentParser(prog="make record PAPER=sdnpu", description=__doc__)
    parser.add_argument("--models", nargs="+", default=[BASE, SMALL], choices=[BASE, SMALL])
    parser.add_argument("--public", default=models.SMOLLM2, choices=list(plain.LABELS), help="of spec-bench and times")
    parser.add_argument("--methods", nargs="+", default=[], choices=list(spec_bench.METHODS), metavar="NAME",
                        help="of spec-bench; all without it")  # fmt: skip
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    for part in options.parts:
        if part == "drafts":
            for model in options.models:
                record(model)
            finish()
        elif part == "similarity":
            similar(options.models)
        elif part == "spec-bench":
            spec_bench.record(options.public, options.methods)
        elif part in timing.PARTS:
            timing.PARTS[part]([options.public])
        else:
            compiler.PARTS[part]()


if __name__ == "__main__":
    main()

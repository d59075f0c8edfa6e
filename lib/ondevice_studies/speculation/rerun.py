"""Recorded answers that run again: those that the seed draws, and their requests made anew."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator

import pandas as pd

from ondevice.evidence import sampled
from ondevice_studies.speculation.prompts import digest
from ondevice_studies.speculation.request_set import Request

TASK = ["model", "set", "task"]
REQUEST = [*TASK, "request"]
STRETCH = 2  # requests by which a state that lasts is checked
NEAR = 1e-4  # a logit's lead, below which a token is a near-tie
Prompts = Callable[[str, str, Collection[str]], Iterator[tuple[str, list[int]]]]


def drawn(answers: pd.DataFrame, seed: int, number: int, forgetful: Collection[str]) -> pd.DataFrame:
    """The recorded answers that the seed draws to run again; what was drawn is printed.

    forgetful: methods that keep nothing from request to request. They answer `number` requests, drawn over all of them
    (`sampled`). The state of any other method is known only from its beginning on: it answers the first STRETCH
    requests of a task in their order. The seed draws the model, the set and the task, for every method.
    Requests with a near-tie are left out: another machine may answer them otherwise, and its counts would differ.
    """
    each = answers.drop_duplicates(REQUEST).sort_values(REQUEST)
    first = each.groupby(TASK).head(STRETCH).groupby(TASK).filter(lambda rows: rows["margin"].min() >= NEAR)
    each = each[each["margin"] >= NEAR]
    requests = sampled(each, seed, number, strata=TASK, length="tokens", name="request")
    keeps = ~answers["method"].isin(forgetful)
    begun = answers[keeps].merge(first[REQUEST])
    shuffled = begun[[*TASK, "method"]].drop_duplicates().sample(frac=1, random_state=seed)
    stretches = shuffled.drop_duplicates("method")
    print(f"and the first {STRETCH} requests of a drawn task for each of {len(stretches)} methods that keep a state")
    return pd.concat([answers[~keeps].merge(requests[REQUEST]), begun.merge(stretches)], ignore_index=True)


def made_anew(rows: pd.DataFrame, prompts: Prompts, end: int) -> list[Request]:
    """The requests of recorded answers of one model: prompts from the corpus, lengths from the record.

    prompts: (document, token ids) of a set and task, of these documents. end: the id that ends an answer. Raises
    ValueError where a prompt is not the recorded one, as after a change of the corpus.
    """
    requests: list[Request] = []
    columns = ["request", "document", "prompt_sha", "tokens"]
    for (request_set, task), of_task in rows.groupby(["set", "task"], sort=False):
        ids_of = dict(prompts(str(request_set), str(task), set(of_task["document"])))
        for index, document, sha, tokens in of_task.sort_values("request")[columns].to_numpy().tolist():
            ids = tuple(ids_of.get(document, ()))
            if digest(ids) != sha:
                raise ValueError(f"The prompt on {document} ({task}) is not the recorded one: the corpus changed.")
            requests.append(Request(str(task), index, document, ids, (), tokens, frozenset({end})))
    return requests


def runs(
    rows: pd.DataFrame, requests_of: Callable[[str, pd.DataFrame], list[Request]]
) -> Iterator[tuple[str, str, str, list[Request]]]:
    """(model, method, set, the requests) of recorded answers. requests_of: of a model's rows on one set."""
    requests: dict[Hashable, Request] = {}
    for (model, request_set), part in rows.drop_duplicates(REQUEST).groupby(TASK[:2]):
        for request in requests_of(str(model), part):
            requests[model, request_set, request.task, request.prompt] = request
    for (model, request_set, method), part in rows.groupby([*TASK[:2], "method"], sort=False):
        units = part.sort_values(REQUEST)[REQUEST].itertuples(index=False, name=None)
        yield str(model), str(method), str(request_set), [requests[unit] for unit in units]

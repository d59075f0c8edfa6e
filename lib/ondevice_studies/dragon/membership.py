"""What a curious cloud learns of the device's documents, as an attack: which of N passages were in its context?

The cloud keeps to the protocol, remembers what crossed and has the same model. So it can compute what the
model says after each candidate passage alone, and compare that with what it has seen. Of each candidate:

- The query alone, which crosses in every mode: its relevance to the query. This is the null.
- Device aggregates: how likely the target tokens are with it (`from_tokens`).
- Shared randomness: also the noise is known, so a candidate foretells each token itself (`from_noise`).
- Cloud aggregates: how well it foretells the distributions that the device's drafts were drawn from
  (`from_distributions`).

Not used: log h, where the cloud aggregates; which drafts were rejected; drafts past a rejected one. What is measured is
therefore a lower bound of what could be learned. Sampling temperature is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata

from ondevice.batching import by_length
from ondevice.retrieval import SparseIndex
from ondevice_papers.dragon import codec
from ondevice_papers.dragon.aggregation import Floats
from ondevice_papers.dragon.decisions import Choose, decision, drafts
from ondevice_papers.dragon.messages import Begin, DraftMessage, Mode
from ondevice_papers.dragon.speculative_aggregation import Stream, choose, gumbels
from ondevice_programs.pair.decoder import Decoder
from ondevice_programs.pair.node import WEIGHT_TEMPERATURE, Node

Singles = NDArray[np.float32]
ETA = 0.5  # the device's share of the target as the cloud takes it to be: it does not know the device's weight
CAPS = (8, 64, 512, 4096)  # bytes a distribution
_BATCH_TOKENS = 4096  # padded
_BATCH_LOGITS = 2**23  # of all padded tokens: 32 MiB


@dataclass(frozen=True, eq=False)
class Transcript:
    """A session of n tokens, seen from both sides, and where the device's documents are.

    tokens: [n] the target's, the end token included. p_device, p_cloud: [n, V] each side's own mixture before the
    codec. prior: [n, V] of the model without documents. accepted: [n, 2] whether the device's and the cloud's drafts
    were. places: [k] indices of the device's documents. seed: of the session's random numbers.
    """

    tokens: NDArray[np.int64]
    p_device: Singles
    p_cloud: Singles
    prior: Singles
    accepted: NDArray[np.bool_]
    places: tuple[int, ...]
    seed: int


Evidence = Callable[[Singles, Transcript], Floats]  # [B, n, V] log p(.|c) and the session: [B], higher for a member
Named = Mapping[tuple[str, int], Evidence]  # by mode and cap


# The session


def transcript(
    device: Node, cloud: Node, query: str, k: int, limit: int, mode: Mode, seed: int, temperature: float = 1.0
) -> Transcript:
    """Both sides in lockstep, up to `limit` tokens or the end token; the device aggregates.

    mode: "speculative" (Algorithm 1) or "shared" (shared randomness). Raises ValueError on others and on a limit
    below 1, and what a decoder raises.
    """
    if mode not in ("speculative", "shared") or limit < 1:
        raise ValueError(f"A transcript is speculative or shared and has a token, not {mode} and {limit}.")
    begin = Begin("membership", seed, mode, k, query, limit, "device", temperature=temperature)
    decoders = [node.decoder(query, k, temperature)[0] for node in (device, cloud)]
    draws = [drafts(begin, stream) for stream in (Stream.DEVICE, Stream.CLOUD)]
    tokens, accepted, mixtures, priors = list[int](), list[list[bool]](), list[list[Floats]](), dict[int, Floats]()
    decide = decision(begin, priors)
    while len(tokens) < limit and not decoders[0].ended:
        position = len(tokens)
        both = [_draft(begin, decoder, draw) for decoder, draw in zip(decoders, draws, strict=True)]
        mixtures.append([np.exp(decoder.next_distribution()) for decoder in decoders])
        priors[position] = np.asarray(decoders[0].prior)
        token, *kept = decide(both[0], both[1], position)
        for decoder in decoders:
            decoder.commit(token)
        tokens.append(token)
        accepted.append(kept)
    p_device, p_cloud = np.array(mixtures, np.float32).swapaxes(0, 1)
    prior = np.array(list(priors.values()), np.float32)
    indices = tuple(device.documents.positions(query, k)[0])
    return Transcript(np.array(tokens), p_device, p_cloud, prior, np.array(accepted), indices, seed)


def _draft(begin: Begin, decoder: Decoder, draw: Choose) -> DraftMessage:
    """A side's next one, drawn from its distribution as the other side reads it."""
    p = np.exp(decoder.next_distribution())
    payload = codec.encode(p, begin.cap, decoder.prior)
    with np.errstate(divide="ignore"):
        token = draw(decoder.position, np.log(codec.decode(payload, len(p))))
    return DraftMessage(begin.session, 0, decoder.position, token, payload, decoder.log_weight)


# The candidates


@lru_cache(1)
def _index(pool: tuple[str, ...]) -> SparseIndex:
    return SparseIndex.build(pool)


def candidates(query: str, members: Sequence[str], pool: Sequence[str], count: int = 1000) -> list[str]:
    """The members, and the passages of the pool nearest to the query by BM25: `count` different texts.

    Random ones would be told from members by the query alone. Raises ValueError where there are too few.
    """
    nearest = _index(tuple(pool)).search([query], len(pool))[1][0]
    texts = list(dict.fromkeys([*members, *(pool[index] for index in nearest)]))
    if not len(members) <= count <= len(texts):
        raise ValueError(
            f"{len(members)} members and their pool give from {len(members)} to {len(texts)} candidates, not {count}."
        )
    return texts[:count]


def relevance(query: str, passages: Sequence[str]) -> Floats:
    """[N] the query's share that each passage covers: BM25 of an index of the passages, over its ceiling."""
    index = SparseIndex.build(passages)
    scores, indices = index.search([query], len(passages))
    shares = np.empty(len(passages))
    shares[indices[0]] = scores[0] / (index.ceiling(query) or 1.0)  # 0 of a query without words
    return shares


@torch.inference_mode()
def candidate_log_probs(
    node: Node, passages: Sequence[str], query: str, tokens: Sequence[int]
) -> Iterator[tuple[list[int], Singles]]:
    """Batches of like length: B indices of passages, and [B, n, V] log p(. | passage, query, tokens so far), in nats.

    Each passage stands alone in its prompt. Raises ValueError without tokens, and where a prompt with them does not fit
    into the context.
    """
    if not len(tokens):
        raise ValueError("There is no token to compute a probability of.")
    suffix = node.template.suffix(node.tokenizer, query)
    prompts = [node.template.prefix(node.tokenizer, passage)[: node.longest] + suffix for passage in passages]
    rows = [[*prompt, *map(int, tokens[:-1])] for prompt in prompts]
    model = node.lm.model
    if (longest := max(map(len, rows), default=0)) > node.lm.context:
        raise ValueError(f"A prompt of {longest} tokens does not fit the model's context of {node.lm.context}.")
    for batch in by_length([len(row) for row in rows], min(_BATCH_TOKENS, _BATCH_LOGITS // node.lm.vocabulary)):
        ids = torch.zeros(len(batch), max(len(rows[index]) for index in batch), dtype=torch.long)
        for row, index in enumerate(batch):  # padded on the right, where a causal model does not look
            ids[row, : len(rows[index])] = torch.tensor(rows[index])
        starts = torch.tensor([len(prompts[index]) - 1 for index in batch])
        first = int(starts.min())  # logits before it are of no use
        logits = model(input_ids=ids.to(model.device), use_cache=False, logits_to_keep=ids.shape[1] - first).logits
        read = (starts - first)[:, None] + torch.arange(len(tokens))
        wanted = logits.float().cpu()[torch.arange(len(batch))[:, None], read]
        yield batch, wanted.log_softmax(-1).numpy()


# Evidence


def from_tokens(log_probs: Singles, seen: Transcript) -> Floats:
    """[B] log probability of the target tokens: sum_t log((1 - eta) p_cloud(x_t) + eta p(x_t|c)).

    log_probs: [B, n, V] log p(.|c), here and below.
    """
    at = np.arange(len(seen.tokens)), seen.tokens
    p_cloud = seen.p_cloud[at].astype(float)
    p_candidate = np.exp(log_probs[:, *at].astype(float))
    return np.log((1 - ETA) * p_cloud + ETA * p_candidate).sum(-1)


def from_noise(log_probs: Singles, seen: Transcript) -> Floats:
    """[B] how many tokens the noise would give with the candidate; of equal counts, the likelier tokens.

    sum_t [x_t = argmax_v log((1 - eta) p_cloud(v) + eta p(v|c)) + gumbel_t(v)], plus the tokens' geometric mean
    probability, which is below one.
    """
    count, vocabulary = seen.p_cloud.shape
    noise = np.stack([gumbels(seen.seed, position, vocabulary) for position in range(count)])
    foretold = choose((1 - ETA) * seen.p_cloud + ETA * np.exp(log_probs), noise)
    return (foretold == seen.tokens).sum(-1) + np.exp(from_tokens(log_probs, seen) / count)


def from_distributions(cap: int) -> Evidence:
    """Evidence from what the cloud reads of the device's distributions: [B] sum_t sum_v w_t(v) log p(v|c).

    w_t: what the device's draft was drawn from, of `cap` bytes. But for a constant it is the divergence, with a minus,
    of p(.|c) from w_t.
    """

    def evidence(log_probs: Singles, seen: Transcript) -> Floats:
        total = np.zeros(len(log_probs))
        for position, kept in enumerate(received_distributions(seen, cap)):
            total += log_probs[:, position, kept.ids].astype(float) @ (kept.weights / kept.weights.sum())
        return total

    return evidence


@lru_cache(8)
def received_distributions(seen: Transcript, cap: int) -> list[codec.Kept]:
    """[n] what the cloud reads of each of the device's distributions."""
    vocabulary = seen.prior.shape[1]
    sent = (codec.encode(p, cap, prior) for p, prior in zip(seen.p_device, seen.prior, strict=True))
    return [codec.read(payload, vocabulary) for payload in sent]


# The attack


def standing(scores: Floats, members: NDArray[np.bool_]) -> tuple[int, int, float]:
    """(top1, best_rank, auc) of N candidates' scores.

    top1: 1 where the best candidate is a member. best_rank: of the best member, from 1. Of both, ties with others count
    against the attacker. auc: chance that a member is above another candidate, ties half. members: [N] who is one.
    Raises ValueError where nobody or everybody is one.
    """
    m = int(members.sum())
    others = int((~members).sum())
    if not (m and others):
        raise ValueError(f"There are {m} members and {others} others: an attack needs both.")
    best_rank = 1 + int((scores[~members] >= scores[members].max()).sum())
    auc = (rankdata(scores)[members].sum() - m * (m + 1) / 2) / (m * others)
    return int(best_rank == 1), best_rank, float(auc)


def attack(
    device: Node, cloud: Node, query: str, candidates: Sequence[str], k: int = 2, limit: int = 20, seed: int = 0,
    caps: Sequence[int] = CAPS, prior: Floats | None = None,
    from_tokens: Evidence = from_tokens, from_noise: Evidence = from_noise,
    from_distributions: Callable[[int], Evidence] = from_distributions,
) -> list[dict[str, Any]]:  # fmt: skip
    """How the device's k passages stand among the candidates, by what crossed: a row a mode, cap and use of the query.

    Columns: mode, cap (bytes; 0 where no distribution crosses), with_query (whether relevance, as a log prior, is
    added), top1, best_rank, auc (`standing`), tokens (that the evidence is of), candidates (N).
    prior: [N] log-probability of the candidates by the query, but for a constant; None: by BM25's share of the query.
    from_tokens, from_noise, from_distributions: the functions above, or an experiment's.
    Raises ValueError where one of the device's passages is not among the candidates.
    """
    members = {device.documents.texts[index] for index in device.documents.positions(query, k)[0]}
    if missing := members - set(candidates):
        raise ValueError(f"{len(missing)} of the device's {len(members)} passages are not among the candidates.")
    chosen = np.array([text in members for text in candidates])
    relevant = relevance(query, candidates) / WEIGHT_TEMPERATURE if prior is None else prior
    rows = list[dict[str, Any]]()

    def add(mode: str, cap: int, with_query: bool, scores: Floats, tokens: int) -> None:
        top1, best_rank, auc = standing(scores, chosen)
        rows.append(dict(mode=mode, cap=cap, with_query=with_query, top1=top1, best_rank=best_rank, auc=auc,
                         tokens=tokens, candidates=len(candidates)))  # fmt: skip

    add("query alone", 0, False, relevant, 0)
    distributions: Named = {("cloud aggregates", cap): from_distributions(cap) for cap in caps}
    sessions: dict[Mode, Named] = {
        "speculative": {("device aggregates", 0): from_tokens, **distributions},
        "shared": {("shared randomness", 0): from_noise},
    }
    for session, evidence in sessions.items():
        seen = transcript(device, cloud, query, k, limit, session, seed)
        for (mode, cap), scores in _weighed(cloud, candidates, query, seen, evidence).items():
            add(mode, cap, False, scores, len(seen.tokens))
            add(mode, cap, True, scores + relevant, len(seen.tokens))
    return rows


def _weighed(
    cloud: Node, candidates: Sequence[str], query: str, seen: Transcript, evidence: Named
) -> dict[tuple[str, int], Floats]:
    """[N] of each evidence, with one run of the model for all."""
    scores = {key: np.empty(len(candidates)) for key in evidence}
    for batch, log_probs in candidate_log_probs(cloud, candidates, query, seen.tokens.tolist()):
        for key, weigh in evidence.items():
            scores[key][batch] = weigh(log_probs, seen)
    return scores

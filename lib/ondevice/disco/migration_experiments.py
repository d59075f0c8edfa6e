"""The experiments on migration: what the reader sees (Table 3) and what it saves (Figure 7)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ondevice.disco import costs, migration, simulation, traces
from ondevice.disco.distributions import DEVICES, Device, Lengths
from ondevice.disco.experiments import CONSTRAINTS, policies
from ondevice.disco.handoff import Handoff
from ondevice.disco.policy import Constrained

MODEL_OF_DEVICE = dict(zip(DEVICES, costs.PRINTED, strict=True))


@dataclass(frozen=True)
class Requests:
    """R requests, drawn once and answered with and without migration. All arrays [R].

    prompt, answer: tokens. server_ttft: of the first request; handover_ttft: of the one that takes an answer over.
    server_gap: seconds between the server's tokens.
    """

    prompt: np.ndarray
    answer: np.ndarray
    server_ttft: np.ndarray
    handover_ttft: np.ndarray
    server_gap: np.ndarray


@dataclass(frozen=True)
class Setting:
    """One cell of the experiment. service: one of the paper's; budget: b; alpha: DiSCo-D's tail share."""

    service: str
    device: Device
    constrained: Constrained
    budget: float
    alpha: float
    handoff: Handoff = "stop"


def migration_sweep(
    services: Sequence[str],
    lengths: Lengths,
    budgets: Sequence[float],
    alpha: float,
    requests: int,
    seed: int,
    server_tbt: str,
    *,
    cap: int = 128,
    handoff: Handoff = "stop",
    answers: Lengths | None = None,
    free_prefill: bool = False,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """(costs by setting, what readers of migrated streams see) over services, devices, constraints and budgets.

    server_tbt: the measured series whose times between tokens stand for the server's. cap: most output tokens.
    answers: output lengths (Alpaca's by default). free_prefill: leave the second prefill out of the bill.
    First table: service, device, constrained, budget, cost and cost_without ($ a request), migrated (share of them).
    Second, pooled over all migrated streams of a service and constraint: streams, buffered_mean and buffered_p99
    (tokens), late_mean (tokens), stalled (share of streams with a late token), tbt_p99_s (over their tokens).
    """
    answers = answers or traces.lengths(field="tokens_reference_output")
    remaining = migration.expected_remaining(np.repeat(answers.support, answers.counts[answers.support]), cap)
    rows = []
    pooled: dict[tuple[str, str], list[migration.Streams]] = defaultdict(list)
    for number, service in enumerate(services):
        for device in DEVICES.values():
            for constrained in CONSTRAINTS:
                for budget in budgets:
                    rng = np.random.default_rng([seed, number])  # the same requests for every setting
                    sample = draw(service, lengths, answers, cap, server_tbt, requests, rng)
                    setting = Setting(service, device, constrained, float(budget), alpha, handoff)
                    found, streams = _answer(sample, setting, lengths, remaining, free_prefill, rng)
                    pooled[service, constrained].append(streams)
                    rows.append((service, device.name, constrained, budget, *found))
    columns = ["service", "device", "constrained", "budget", "cost", "cost_without", "migrated"]
    seen = [{"service": s, "constrained": c, **_seen(streams)} for (s, c), streams in pooled.items()]
    return pd.DataFrame(rows, columns=columns), pd.DataFrame(seen)


def draw(
    service: str, lengths: Lengths, answers: Lengths, cap: int, server_tbt: str, size: int, rng: np.random.Generator
) -> Requests:
    """`size` independent requests."""
    ttft, gap = traces.server(service).samples, traces.measured(server_tbt, "tbt_s").samples
    return Requests(
        prompt=lengths.sample(size, rng),
        answer=np.minimum(cap, answers.sample(size, rng)),
        server_ttft=rng.choice(ttft, size),
        handover_ttft=rng.choice(ttft, size),
        server_gap=rng.choice(gap, size),
    )


def _answer(
    sample: Requests,
    setting: Setting,
    lengths: Lengths,
    remaining: np.ndarray,
    free_prefill: bool,
    rng: np.random.Generator,
) -> tuple[tuple[float, float, float], migration.Streams]:
    """((cost, cost without migration, share migrated), the streams that the constrained endpoint won).

    A loser's prefill is paid in full, its decoding not at all; only streams that the constrained endpoint won migrate.
    """
    device, constrained = setting.device, setting.constrained
    server = traces.server(setting.service)
    policy = policies(constrained, lengths, server, device, setting.budget, setting.alpha)[0]
    played = simulation.play(policy, sample.prompt, sample.server_ttft, device, rng)
    on_server = costs.server_prices(setting.service)
    on_device = costs.device_prices(MODEL_OF_DEVICE[device.name], constrained, round(lengths.mean))
    device_gap = np.full(len(sample.prompt), 1 / device.decode_rate)
    if constrained == "device":
        won, source, target, gaps = played.device_won, on_device, on_server, (device_gap, sample.server_gap)
        rule = migration.to_server(
            source, target, server, remaining, handoff=setting.handoff, source_rate=device.decode_rate
        )
        delay = sample.handover_ttft
    else:
        won, source, target, gaps = ~played.device_won, on_server, on_device, (sample.server_gap, device_gap)
        rate = float(1 / np.median(sample.server_gap))
        rule = migration.to_device(source, target, device, remaining, handoff=setting.handoff, source_rate=rate)
        delay = np.full(len(won), device.overhead)
    streams = migration.stream(
        rule, sample.prompt[won], sample.answer[won], played.ttft[won], gaps[0][won], delay[won], gaps[1][won]
    )
    prefill = sample.prompt * (played.device_ran * on_device.prefill + played.server_ran * on_server.prefill)
    without = prefill + sample.answer * np.where(won, source.decode, target.decode)
    cost = without.copy()
    cost[won] = prefill[won] + streams.source_tokens * source.decode + streams.target_tokens * target.decode
    if not free_prefill:
        cost[won] += streams.target_prefill * target.prefill
    return (float(cost.mean()), float(without.mean()), float(streams.migrated.sum() / len(won))), streams


def _seen(parts: Sequence[migration.Streams]) -> dict[str, float]:
    """What the readers of the migrated streams see, pooled."""
    buffered = np.concatenate([part.buffered[part.migrated] for part in parts])
    late = np.concatenate([part.late[part.migrated] for part in parts])
    tbt = np.concatenate([part.tbt(part.migrated) for part in parts])
    if not len(buffered):
        return dict.fromkeys(("buffered_mean", "buffered_p99", "late_mean", "stalled", "tbt_p99_s"), np.nan) | {
            "streams": 0
        }
    return {
        "streams": len(buffered),
        "buffered_mean": float(buffered.mean()),
        "buffered_p99": float(np.quantile(buffered, 0.99)),
        "late_mean": float(late.mean()),
        "stalled": float((late > 0).mean()),
        "tbt_p99_s": float(np.quantile(tbt, 0.99)),
    }

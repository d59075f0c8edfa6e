"""Requests played one by one: sampled or replayed TTFTs, users who come back before the device is free, drift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from ondevice.disco.distributions import Device
from ondevice.disco.online import OnlineDispatcher
from ondevice.disco.policy import DispatchPolicy


@dataclass(frozen=True)
class Played:
    """One entry per request: lengths in tokens, ttft in seconds, and which endpoint ran and gave the first token."""

    lengths: np.ndarray
    ttft: np.ndarray
    device_ran: np.ndarray
    server_ran: np.ndarray
    device_won: np.ndarray

    def use(self, endpoint: str) -> float:
        """Share of input tokens that `device` or `server` processed."""
        ran = self.device_ran if endpoint == "device" else self.server_ran
        return float(self.lengths[ran].sum() / self.lengths.sum())

    def p99(self) -> float:
        """P99 of TTFT, seconds."""
        return float(np.quantile(self.ttft, 0.99, method="inverted_cdf"))


def joined(parts: Sequence[Played]) -> Played:
    """Runs one after the other, as one."""
    return Played(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(Played)))


def play(
    policy: DispatchPolicy, lengths: np.ndarray, server_ttft: np.ndarray, device: Device, rng: np.random.Generator
) -> Played:
    """Play independent requests of the given lengths against the given server TTFTs, both [N]."""
    _check(lengths, server_ttft)
    at = np.minimum(lengths, len(policy.chance) - 1)
    coin = (rng.random(len(lengths)) < policy.chance[at]).astype(int)
    device_at = policy.wait_device[coin, at] + device.ttft(lengths)
    server_at = policy.wait_server[coin, at] + server_ttft
    return _outcome(lengths, policy.wait_device[coin, at], device_at, policy.wait_server[coin, at], server_at)


def play_user(
    policy: DispatchPolicy,
    arrivals: np.ndarray,
    lengths: np.ndarray,
    answers: np.ndarray,
    server_ttft: np.ndarray,
    device: Device,
    rng: np.random.Generator,
) -> Played:
    """Play one user's requests in order; the single device serves one at a time, so that a burst queues on it.

    arrivals: [N] seconds, ascending. answers: [N] output tokens. server_ttft: [N], the server's at each arrival.
    A device that loses is free at once; one that wins is busy until its answer is decoded.
    """
    _check(lengths, server_ttft)
    at = np.minimum(lengths, len(policy.chance) - 1)
    coin = (rng.random(len(lengths)) < policy.chance[at]).astype(int)
    wait_d, wait_s = policy.wait_device[coin, at], policy.wait_server[coin, at]
    prefill = device.ttft(lengths)
    device_at, server_at = np.empty(len(lengths)), wait_s + server_ttft
    starts = np.empty(len(lengths))
    free_at = 0.0
    for i, now in enumerate(arrivals):
        starts[i] = max(wait_d[i], free_at - now)
        device_at[i] = starts[i] + prefill[i]
        if starts[i] < server_at[i]:
            won = device_at[i] <= server_at[i]
            end = device_at[i] + answers[i] / device.decode_rate if won else server_at[i]
            free_at = now + end
    return _outcome(lengths, starts, device_at, wait_s, server_at)


def play_online(dispatcher: OnlineDispatcher, lengths: np.ndarray, server_ttft: np.ndarray, device: Device) -> Played:
    """Play requests through a dispatcher that learns; it sees a server TTFT only when the server answers first."""
    _check(lengths, server_ttft)
    waits = np.empty(len(lengths))
    prefill = device.ttft(lengths)
    for i, (length, ttft) in enumerate(zip(lengths.tolist(), server_ttft.tolist(), strict=True)):
        decision = dispatcher.decide(length)
        waits[i] = decision.wait
        device_at = decision.wait + prefill[i]
        started = decision.wait == 0 or decision.wait < ttft
        dispatcher.observe(decision, min(ttft, device_at), server_answered=ttft <= device_at, device_started=started)
    return _outcome(lengths, waits, waits + prefill, np.zeros(len(lengths)), server_ttft)


def _check(lengths: np.ndarray, server_ttft: np.ndarray) -> None:
    if len(lengths) == 0 or len(lengths) != len(server_ttft):
        raise ValueError(f"{len(lengths)} prompts and {len(server_ttft)} server TTFTs: one each is needed.")
    if not lengths.min() >= 1:
        raise ValueError(f"A prompt has at least one token; the smallest length given is {lengths.min()}.")
    if not server_ttft.min() >= 0:  # a NaN is its array's minimum, and compares false
        raise ValueError("A server TTFT is negative or not a number.")


def _outcome(
    lengths: np.ndarray, wait_d: np.ndarray, device_at: np.ndarray, wait_s: np.ndarray, server_at: np.ndarray
) -> Played:
    """An endpoint runs unless the other one's first token came before its own start."""
    device_ran = np.isfinite(wait_d) & ((wait_d == 0) | (wait_d < server_at))
    server_ran = np.isfinite(wait_s) & ((wait_s == 0) | (wait_s < device_at))
    ttft = np.minimum(np.where(device_ran, device_at, np.inf), np.where(server_ran, server_at, np.inf))
    return Played(
        lengths, ttft, device_ran, server_ran, device_ran & (device_at <= np.where(server_ran, server_at, np.inf))
    )

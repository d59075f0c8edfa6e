"""Requests played one by one: sampled or replayed TTFTs, users who come back before the device is free, drift."""

from __future__ import annotations

from dataclasses import dataclass

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


def play(
    policy: DispatchPolicy, lengths: np.ndarray, server_ttft: np.ndarray, device: Device, rng: np.random.Generator
) -> Played:
    """Play independent requests of the given lengths against the given server TTFTs, both [N]."""
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


def play_online(
    dispatcher: OnlineDispatcher, lengths: np.ndarray, server_ttft: np.ndarray, device: Device
) -> Played:
    """Play requests through a dispatcher that learns; it sees a server TTFT only when the server answers first."""
    waits = np.empty(len(lengths))
    prefill = device.ttft(lengths)
    for i, (length, ttft) in enumerate(zip(lengths.tolist(), server_ttft.tolist(), strict=True)):
        waits[i] = dispatcher.decide(length)
        started = waits[i] == 0 or waits[i] < ttft
        answered = ttft <= waits[i] + prefill[i]
        dispatcher.observe(length, min(ttft, waits[i] + prefill[i]), server_answered=answered, device_started=started)
    return _outcome(lengths, waits, waits + prefill, np.zeros(len(lengths)), server_ttft)


def _outcome(
    lengths: np.ndarray, wait_d: np.ndarray, device_at: np.ndarray, wait_s: np.ndarray, server_at: np.ndarray
) -> Played:
    """An endpoint runs unless the other one's first token came before its own start."""
    device_ran = np.isfinite(wait_d) & ((wait_d == 0) | (wait_d < server_at))
    server_ran = np.isfinite(wait_s) & ((wait_s == 0) | (wait_s < device_at))
    ttft = np.minimum(np.where(device_ran, device_at, np.inf), np.where(server_ran, server_at, np.inf))
    return Played(lengths, ttft, device_ran, server_ran, device_ran & (device_at <= np.where(server_ran, server_at,
                                                                                             np.inf)))

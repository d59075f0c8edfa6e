"""The hard budget of the online policy: it holds after every request, whatever the service does."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ondevice.disco.budget import TokenBucket
from ondevice.disco.distributions import Device
from ondevice.disco.online import OnlineDispatcher
from ondevice.disco.simulation import play_online

LENGTHS = st.lists(st.integers(1, 3000), min_size=30, max_size=120)
DRIFT = st.lists(st.sampled_from([0.0, 0.01, 0.3, 1.0, 8.0, 60.0]), min_size=3, max_size=8)


@settings(deadline=None, max_examples=25)
@given(LENGTHS, DRIFT, st.floats(0, 1), st.integers(0, 2**16))
def test_online_use_never_exceeds_the_budget_at_any_request_under_drift(lengths, levels, budget, seed):
    device, tokens = Device("d", 50.0, 10.0), np.array(lengths)
    level = np.repeat(levels, -(-len(tokens) // len(levels)))[: len(tokens)]
    ttft = level * np.random.default_rng(seed).lognormal(0, 0.5, len(tokens))
    played = play_online(OnlineDispatcher(device, budget, window=40, refit=3), tokens, ttft, device)
    used = np.cumsum(tokens * played.device_ran)
    assert np.all(used <= budget * np.cumsum(tokens) * (1 + 1e-9))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(1, 5000), st.booleans()), min_size=1, max_size=60), st.floats(0, 1),
       st.floats(1, 4000))
def test_a_bucket_never_goes_below_zero_nor_refuses_what_it_holds(requests, budget, burst):
    bucket, spent, seen = TokenBucket(budget, burst), 0, 0
    for tokens, wanted in requests:
        seen += tokens
        allowed = bucket.arrive(tokens)
        assert allowed == (bucket.level >= tokens * (1 - 1e-12))
        if allowed and wanted:
            bucket.spend(tokens)
            spent += tokens
        assert bucket.level >= -1e-6
        assert spent <= budget * seen * (1 + 1e-9)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 200), min_size=5, max_size=60), st.floats(0.05, 1))
def test_a_bucket_that_is_always_asked_spends_the_budget_within_one_request(requests, budget):
    bucket, spent = TokenBucket(budget, burst=1e9), 0
    for tokens in requests:
        if bucket.arrive(tokens):
            bucket.spend(tokens)
            spent += tokens
    assert spent > budget * sum(requests) - max(requests) * (1 + 1e-9)

"""Policies by name: each builds, is for the right endpoint, and says what is wrong with a name."""

import pytest

from ondevice.disco import dispatch, traces
from ondevice.disco.distributions import DEVICES
from ondevice.disco.expectation import evaluate
from ondevice.disco.named_policies import POLICIES, Known, named_policy
from ondevice.disco.online import OnlineDispatcher
from ondevice.disco.policy import DispatchPolicy

KNOWN = Known(traces.lengths(), traces.server("together-70b"), DEVICES["Pixel 7 Pro, Bloom-560M"])
NUMBERS = {"hedge": ":0.5", "disco-d": ":0.1"}


@pytest.mark.parametrize("name", POLICIES)
def test_each_name_builds_a_policy_that_keeps_its_budget(name):
    policy, constrained = named_policy(name + NUMBERS.get(name, ""), None, 0.3, KNOWN)
    if isinstance(policy, OnlineDispatcher):
        assert constrained == "device" and policy.budget == 0.3
        return
    assert isinstance(policy, DispatchPolicy) and constrained == (POLICIES[name][0] or "server")
    used = evaluate(policy, KNOWN.lengths, KNOWN.server, KNOWN.device).use(constrained)
    if name in ("server-only", "device-only"):  # these have no budget
        assert used == pytest.approx(float(name == "server-only"))
    elif name == "hedge":  # a later start is used less often
        assert 0 < used < 0.3
    else:
        assert used <= 0.3 + 1e-9


def test_a_name_gives_the_policy_of_its_function():
    policy, _ = named_policy("disco-d:0.1", None, 0.3, KNOWN)
    direct = dispatch.disco_d(KNOWN.lengths, KNOWN.server, 0.3, 0.1)
    assert (policy.wait_device == direct.wait_device).all() and (policy.chance == direct.chance).all()


def test_the_constrained_endpoint_can_be_named_where_the_policy_suits_both():
    assert named_policy("race", "device", 0.3, KNOWN)[0].constrained == "device"
    assert named_policy("race", None, 0.3, KNOWN)[0].constrained == "server"


@pytest.mark.parametrize(
    ("name", "constrained", "budget", "says"),
    [
        ("fastest", None, 0.3, "no policy 'fastest'; there are server-only"),
        ("disco-d", None, 0.3, "takes a number, disco-d:ALPHA"),
        ("race:2", None, 0.3, "takes no number"),
        ("hedge:soon", None, 0.3, "number of seconds of at least 0, not 'soon'"),
        ("hedge:-1", None, 0.3, "at least 0"),
        ("disco-d:2", None, 0.3, r"alpha is a share in \(0, 1\)"),
        ("disco-s", "device", 0.3, "for a constrained server"),
        ("disco-s", None, 1.2, r"in \[0, 1\], not 1.2"),
    ],
)
def test_a_wrong_name_is_one_clear_error(name, constrained, budget, says):
    with pytest.raises(ValueError, match=says):
        named_policy(name, constrained, budget, KNOWN)

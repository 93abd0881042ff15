"""Which calls get which faults, without gRPC."""

import json

import pytest

from ctr_ps.protos.errors import UsageError
from ctr_ps.protos.wire.calls import CALLS
from ctr_ps.ps_worker.extras.chaos.channels import Chaos, Fate, Fates, Fault


def fates_of(*faults: Fault, seed: str = "7", server: int = 0) -> Fates:
    return Fates(Chaos(seed=seed, faults=faults), server)


def first(fates: Fates, call: str, n: int = 200) -> list[Fate]:
    return [fates.next(call) for _ in range(n)]


HALF = Fault("drop", "pushes", 0.5)


def test_fates_depend_on_seed_server_and_call_alone():
    """Calls of other names in between change nothing."""
    every = [HALF, Fault("duplicate", "calls", 0.3)]
    mixed = fates_of(*every)
    pushes = []
    for _ in range(200):
        mixed.next("PullSparse")
        pushes.append(mixed.next("PushGrad"))

    assert pushes == first(fates_of(*every), "PushGrad")
    assert pushes != first(fates_of(*every, seed="8"), "PushGrad")
    assert pushes != first(fates_of(*every, server=1), "PushGrad")


def test_calls_of_different_names_have_different_fates():
    fates = fates_of(Fault("duplicate", "calls", 0.3))

    assert first(fates, "PushGrad") != first(fates, "PullSparse")


def test_a_share_is_that_of_the_calls_and_replies_are_lost_as_often_as_requests():
    fates = first(fates_of(Fault("drop", "pushes", 0.2)), "PushGrad", 20_000)

    requests = sum(fate.is_request_lost for fate in fates)
    replies = sum(fate.is_reply_lost for fate in fates)
    assert 1850 < requests < 2150
    assert 1850 < replies < 2150
    assert not any(fate.is_request_lost and fate.is_reply_lost for fate in fates)


@pytest.mark.parametrize(
    ("calls", "names"),
    [
        ("pushes", {name for name in CALLS if name.startswith("Push")}),
        ("pulls", {name for name in CALLS if "Pull" in name}),
        ("calls", set(CALLS)),
    ],
)
def test_faults_are_those_of_the_calls_they_name(calls, names):
    fates = fates_of(Fault("drop", calls, 1.0))

    assert {name for name in CALLS if fates.next(name) != Fate()} == names


def test_all_faults_that_are_chosen_happen():
    fates = fates_of(
        Fault("duplicate", "calls", 1.0),
        Fault("delay", "pushes", 0.02),
        Fault("delay", "calls", 0.01),
    )

    assert fates.next("PushGrad") == Fate(is_duplicated=True, delay_s=0.03)
    assert fates.next("PushGrad").faults == ["duplicated", "delayed"]


def test_request_that_is_lost_has_no_other_fault():
    assert Fate(is_request_lost=True, is_duplicated=True, delay_s=1.0).faults == ["request_lost"]


def test_chaos_is_read_from_json():
    text = json.dumps({"seed": 3, "journal": "j", "faults": [["delay", "pulls", 0.5]]})

    assert Chaos.from_json(text) == Chaos(
        seed="3", journal="j", faults=[Fault("delay", "pulls", 0.5)]
    )


@pytest.mark.parametrize(
    "text",
    [
        "drop",
        "[]",
        '{"seed": 1}',
        '{"seed": 1, "faults": [["drop", "pushes"]]}',
        '{"seed": 1, "faults": [["drop", "pushs", 1]]}',
        '{"seed": 1, "faults": [["lose", "pushes", 1]]}',
    ],
)
def test_what_cannot_be_read_is_a_usage_error(text):
    with pytest.raises(UsageError, match="CTR_PS_CHAOS"):
        Chaos.from_json(text)

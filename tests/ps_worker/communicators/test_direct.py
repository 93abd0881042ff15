"""Training straight on a store."""

import numpy as np
import pytest

from ctr_ps.protos.store import Staleness
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.communicators.communicator import DirectCommunicator, StepPush
from tests.ps_worker.communicators.test_lockstep import (
    EXAMPLES,
    KEYS,
    NUM_PARAMS,
    declared,
    gradient,
)
from tests.support.stores import member
from tests.support.training import together


@pytest.fixture
def store() -> ParameterStore:
    return declared(ParameterStore())


@pytest.fixture
def communicator(store: ParameterStore) -> DirectCommunicator:
    return DirectCommunicator(store, member=member(), num_params=NUM_PARAMS)


def test_push_is_applied_when_it_returns(
    store: ParameterStore, communicator: DirectCommunicator
) -> None:
    rows = communicator.pull(KEYS).result().rows["embedding"]
    with communicator.params() as params:
        before = params.copy()

    communicator.push(StepPush(gradient(2.0), EXAMPLES, pulled=0))

    moved = 0.1 * 2.0 / EXAMPLES
    np.testing.assert_allclose(
        communicator.pull(KEYS).result().rows["embedding"], rows - moved, rtol=1e-5
    )
    with communicator.params() as params:
        np.testing.assert_allclose(params, before - moved, rtol=1e-5, atol=1e-7)
    assert store.status().examples == {0: EXAMPLES}


def test_push_is_as_stale_as_what_was_applied_since_its_pull(
    store: ParameterStore, communicator: DirectCommunicator
) -> None:
    communicator.push(StepPush(gradient(2.0), EXAMPLES, pulled=0))
    pulled = communicator.pull(KEYS).result().version

    for _ in range(2):
        communicator.push(StepPush(gradient(2.0), EXAMPLES, pulled=pulled))

    assert communicator.pull(KEYS).result().version == 3
    assert store.status().staleness == Staleness().add(0, 2).add(1)


def test_parameters_of_one_thread_do_not_change_when_another_reads(
    communicator: DirectCommunicator,
) -> None:
    def push_and_read() -> None:
        communicator.push(StepPush(gradient(2.0), EXAMPLES, pulled=0))
        with communicator.params() as params:
            seen.append(params.copy())

    seen: list[np.ndarray] = []
    with communicator.params() as mine:
        before = mine.copy()
        together(push_and_read)
        assert mine.tobytes() == before.tobytes()

    assert (seen[0] != before).all()

"""The values before a step, for a worker that repeats its part of it."""

import numpy as np
import pytest

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.gradients import Gradients, SparseGrad, Values
from ctr_ps.protos.spec import ExpirySpec, InitializerSpec, StatisticsSpec, TableSpec
from ctr_ps.protos.store import Lease, Missing, WorkerLoss
from ctr_ps.ps_server.coordination.pushes import PushIntake, StepOutcome
from ctr_ps.ps_server.coordination.steps import CompleteStep
from ctr_ps.ps_server.store import ParameterStore
from tests.support.optimizers import plain_optimizer
from tests.support.stores import INCARNATION, push_id

WAIT = Lease(seconds=10.0, on_worker_loss=WorkerLoss.WAIT)
OLD_KEYS = np.arange(4, dtype=np.uint64)


def new_store(max_rows: int = 0) -> ParameterStore:
    """Returns a store whose table has rows for `OLD_KEYS`, at version 1."""
    store = ParameterStore()
    store.join(0, INCARNATION, terms={}, lease=WAIT).result()
    store.create_table(
        TableSpec(
            name="t",
            dim=1,
            initializer=InitializerSpec(),
            optimizer=plain_optimizer("sgd"),
            num_shards=1,
            statistics=StatisticsSpec(),
            expiry=ExpirySpec(max_rows=max_rows) if max_rows else None,
        )
    )
    take_step(store, OLD_KEYS, 0)
    return store


def take_step(store: ParameterStore, keys: np.ndarray, step: int) -> None:
    ones = np.ones((keys.size, 1), np.float32)
    counts = np.tile(np.array([1, 0], np.uint32), (keys.size, 1))
    gradients = Gradients({"t": SparseGrad(keys, ones, 1, counts)})
    store.push_grad(gradients, push_id(), at=step).result()


def rows_at(store: ParameterStore, version: int) -> Values:
    return (
        store.pull_sparse({"t": OLD_KEYS}, missing=Missing.INITIAL, at=version).result().rows["t"]
    )


def step_that_is_read_halfway(store: ParameterStore, keys: np.ndarray) -> Values:
    """Takes step 1; returns what is read of version 1 when the step is applied, but not yet the version."""
    apply, read = PushIntake.step_applied, []

    def read_first(pushes: PushIntake, step: CompleteStep) -> StepOutcome:
        try:
            read.append(rows_at(store, 1))
        except ProtocolError as error:
            read.append(error)
        return apply(pushes, step)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(PushIntake, "step_applied", read_first)
        take_step(store, keys, 1)
    if isinstance(read[0], ProtocolError):
        raise read[0]
    return read[0]


def test_half_applied_step_shows_the_values_before_it() -> None:
    store = new_store()
    before = rows_at(store, 1)

    halfway = step_that_is_read_halfway(store, OLD_KEYS[:2])

    np.testing.assert_array_equal(halfway, before)
    np.testing.assert_array_equal(rows_at(store, 1), before)
    assert not np.array_equal(rows_at(store, 2), before)


def test_nobody_reads_values_before_a_step_that_evicts() -> None:
    """It changed rows that are not among its keys, too; half applied as well as later."""
    store = new_store(max_rows=OLD_KEYS.size)

    with pytest.raises(ProtocolError, match="no longer has the values of version 1"):
        step_that_is_read_halfway(store, np.array([77], np.uint64))

    assert store.status().tables["t"].evicted > 0
    with pytest.raises(ProtocolError, match="no longer has the values of version 1"):
        rows_at(store, 1)

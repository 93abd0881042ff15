"""Numbers, digests and states to messages and back: nothing is lost on the way."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.errors import ProtocolError
from protos.store import (
    Reduced,
    ReduceOp,
    SaveStatus,
    ServerStatus,
    Shrunk,
    Staleness,
    StoreStatus,
    TableStatus,
    WorkerProgress,
)
from protos.v1 import parameter_server_pb2
from protos.wire import control_messages
from protos.wire.calls import ALL_REDUCE, GET_DIGEST, GET_STATUS, RESUME, SHRINK
from protos.wire.control_messages import AllReduce, Resume
from tests.support.local_transport import through

NAMES = st.text(min_size=1, max_size=20)
UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
STALENESS = st.builds(
    Staleness, counts=st.lists(UINT64, max_size=9).map(tuple), total=UINT64, largest=UINT64
)
WORKERS = st.dictionaries(st.integers(0, 9), UINT64, max_size=5)
PROGRESS = st.dictionaries(
    st.integers(0, 9),
    st.builds(WorkerProgress, incarnation=UINT64, sequence=UINT64, step=UINT64, position=st.text()),
    max_size=5,
)
TABLES = st.builds(
    TableStatus, rows=UINT64, size_bytes=UINT64, candidates=UINT64, candidate_bytes=UINT64
)
STATUSES = st.builds(
    lambda version, tables, examples, done, staleness, progress, last_save: StoreStatus(
        version=version,
        tables=tables,
        examples=dict.fromkeys(progress, 0) | examples,
        left=frozenset(done) & examples.keys(),
        staleness=staleness,
        progress=progress,
        last_save=last_save,
    ),
    UINT64,
    st.dictionaries(NAMES, TABLES, max_size=4),
    WORKERS,
    st.sets(st.integers(0, 9)),
    STALENESS,
    PROGRESS,
    st.none()
    | st.builds(
        SaveStatus,
        pause_s=st.floats(0, 1e9),
        duration_s=st.floats(0, 1e9),
        is_over=st.booleans(),
    ),
)


@given(status=STATUSES)
def test_status_survives_the_wire(status: StoreStatus) -> None:
    server = ServerStatus(status, 2, 3)

    assert through(GET_STATUS.answer, server) == server


@given(numbers=st.lists(st.floats()), op=st.sampled_from(ReduceOp), worker=UINT32, step=UINT64)
def test_numbers_brought_to_a_barrier_survive_the_wire(
    numbers: list[float], op: ReduceOp, worker: int, step: int
) -> None:
    values = np.array(numbers, np.float64)

    request = AllReduce(name="auc", worker=worker, values=values, op=op, step=step)
    found = through(ALL_REDUCE.request, request)

    assert found.values.tobytes() == values.tobytes()
    assert replace(found, values=values) == request


@pytest.mark.parametrize("op", [0, 9])
def test_unknown_op_is_refused(op: int) -> None:
    message = parameter_server_pb2.AllReduceRequest(name="end", op=op)  # type: ignore[arg-type]

    with pytest.raises(ProtocolError, match=f"'end' has the unknown op {op}"):
        control_messages.all_reduce_from_message(message)


@given(numbers=st.lists(st.floats()), version=UINT64)
def test_reduced_numbers_survive_the_wire(numbers: list[float], version: int) -> None:
    values = np.array(numbers, np.float64)

    found = through(ALL_REDUCE.answer, Reduced(values, version))

    assert (found.values.tobytes(), found.version) == (values.tobytes(), version)


SHRUNK = st.dictionaries(NAMES, st.builds(Shrunk, rows=UINT64, size_bytes=UINT64), max_size=4)


@given(shrunk=SHRUNK)
def test_what_was_removed_survives_the_wire(shrunk: dict[str, Shrunk]) -> None:
    assert through(SHRINK.answer, shrunk) == shrunk


@given(digests=st.dictionaries(st.tuples(NAMES, UINT32), st.binary(max_size=32)))
def test_digests_survive_the_wire(digests: dict[tuple[str, int], bytes]) -> None:
    assert through(GET_DIGEST.answer, digests) == digests


@given(version=UINT64, progress=PROGRESS)
def test_run_to_go_on_with_survives_the_wire(
    version: int, progress: dict[int, WorkerProgress]
) -> None:
    request = Resume(version=version, progress=progress)

    assert through(RESUME.request, request) == request

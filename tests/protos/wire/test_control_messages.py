"""Numbers, digests and states to messages and back: nothing is lost on the way."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.errors import ProtocolError
from protos.store import (
    Reduced,
    ReduceOp,
    SaveStatus,
    Shrunk,
    Staleness,
    StoreStatus,
    TableStatus,
    WorkerProgress,
)
from protos.v1 import control_plane_pb2
from protos.wire import control_messages

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
    data = control_messages.status_to_message(status, 0, 1).SerializeToString()

    message = control_plane_pb2.GetStatusResponse.FromString(data)
    assert control_messages.status_from_message(message) == status


def test_status_names_its_server() -> None:
    status = StoreStatus(
        version=0, tables={}, examples={}, left=frozenset(), staleness=Staleness(), progress={}
    )

    message = control_messages.status_to_message(status, 2, 3)

    assert (message.server_index, message.num_servers) == (2, 3)


@given(numbers=st.lists(st.floats()), op=st.sampled_from(ReduceOp), worker=UINT32, step=UINT64)
def test_numbers_brought_to_a_barrier_survive_the_wire(
    numbers: list[float], op: ReduceOp, worker: int, step: int
) -> None:
    values = np.array(numbers, np.float64)

    data = control_messages.all_reduce_request("auc", worker, values, op, step).SerializeToString()

    request = control_plane_pb2.BarrierRequest.FromString(data)
    brought = control_messages.brought_numbers(request)
    assert (request.name, request.worker, request.step) == ("auc", worker, step)
    assert brought is not None
    assert (brought[0].tobytes(), brought[1]) == (values.tobytes(), op)


def test_barrier_may_be_met_without_numbers() -> None:
    assert control_messages.brought_numbers(control_plane_pb2.BarrierRequest(name="end")) is None


def test_op_that_is_none_is_refused() -> None:
    request = control_plane_pb2.BarrierRequest(name="end", op=9)  # type: ignore[arg-type]

    with pytest.raises(ProtocolError, match="'end' has op 9"):
        control_messages.brought_numbers(request)


@given(numbers=st.lists(st.floats()), version=UINT64)
def test_reduced_numbers_survive_the_wire(numbers: list[float], version: int) -> None:
    values = np.array(numbers, np.float64)

    data = control_messages.reduced_to_message(Reduced(values, version)).SerializeToString()

    found = control_messages.reduced_from_message(
        control_plane_pb2.BarrierResponse.FromString(data)
    )
    assert (found.values.tobytes(), found.version) == (values.tobytes(), version)


SHRUNK = st.dictionaries(NAMES, st.builds(Shrunk, rows=UINT64, size_bytes=UINT64), max_size=4)


@given(shrunk=SHRUNK)
def test_what_was_removed_survives_the_wire(shrunk: dict[str, Shrunk]) -> None:
    data = control_messages.shrunk_to_message(shrunk).SerializeToString()

    message = control_plane_pb2.ShrinkResponse.FromString(data)
    assert control_messages.shrunk_from_message(message) == shrunk


@given(digests=st.dictionaries(st.tuples(NAMES, UINT32), st.binary(max_size=32)))
def test_digests_survive_the_wire(digests: dict[tuple[str, int], bytes]) -> None:
    data = control_messages.digests_to_message(digests).SerializeToString()

    message = control_plane_pb2.GetDigestResponse.FromString(data)
    assert control_messages.digests_from_message(message) == digests


@given(version=UINT64, progress=PROGRESS)
def test_run_to_go_on_with_survives_the_wire(
    version: int, progress: dict[int, WorkerProgress]
) -> None:
    data = control_messages.resume_request(version, progress).SerializeToString()

    request = control_plane_pb2.ResumeRequest.FromString(data)
    assert control_messages.resumed_run(request) == (version, progress)

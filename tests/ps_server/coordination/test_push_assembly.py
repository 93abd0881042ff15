"""Pushes that arrive in chunks."""

from dataclasses import replace

import numpy as np
import pytest

from ctr_ps.protos.chunking import PushChunk
from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.gradients import DenseGrad
from ctr_ps.protos.role import Members
from ctr_ps.protos.store import BlockState, StateChunk
from ctr_ps.ps_server.coordination import push_assembly
from ctr_ps.ps_server.coordination.push_assembly import WINDOW, PushAssembler
from tests.support import stores

WORKERS = Members(4)


def push_id(sequence=0, worker=0, incarnation=7):
    return replace(stores.push_id(worker, sequence), incarnation=incarnation)


def part(number, of):
    return PushChunk(sparse=[], dense=[], chunk=number, num_chunks=of)


def test_push_in_one_part_is_complete_at_once():
    assembler = PushAssembler(WORKERS)

    assert assembler.add(push_id(), part(0, 1)) == [part(0, 1)]
    assert len(assembler.waiting()) == 0


def test_push_is_complete_with_its_last_part_and_in_order():
    assembler = PushAssembler(WORKERS)

    assert assembler.add(push_id(), part(2, 3)) is None
    assert assembler.add(push_id(), part(0, 3)) is None
    assert assembler.add(push_id(), part(1, 3)) == [part(0, 3), part(1, 3), part(2, 3)]
    assert len(assembler.waiting()) == 0


def test_pushes_and_workers_do_not_mix():
    assembler = PushAssembler(WORKERS)

    for sequence, worker in [(0, 0), (1, 0), (0, 1)]:
        assert assembler.add(push_id(sequence, worker), part(0, 2)) is None
    assert len(assembler.waiting()) == 3
    assert assembler.add(push_id(1, 0), part(1, 2)) is not None
    assert len(assembler.waiting()) == 2


def test_contradicting_part_is_refused():
    assembler = PushAssembler(WORKERS)
    assembler.add(push_id(), part(1, 3))

    with pytest.raises(
        ProtocolError, match=r"push 0 of worker 0 has chunk . of .*, but earlier chunks \[1\]"
    ):
        assembler.add(push_id(), part(2, 4))


def test_part_that_comes_again_counts_once():
    assembler = PushAssembler(WORKERS)

    assert assembler.add(push_id(), part(0, 2)) is None
    assert assembler.add(push_id(), part(0, 2)) is None
    assert assembler.add(push_id(), part(1, 2)) == [part(0, 2), part(1, 2)]


def test_parts_that_wait_for_others_are_bounded(monkeypatch):
    monkeypatch.setattr(push_assembly, "MAX_INCOMPLETE_VALUES", 100)
    assembler = PushAssembler(WORKERS)
    dense = [("tower", 0, DenseGrad(np.zeros(60, np.float32), 1))]
    large = PushChunk(sparse=[], dense=dense, chunk=0, num_chunks=2)
    assembler.add(push_id(0), large)

    with pytest.raises(
        ProtocolError, match="push 1 of worker 0 is refused: incomplete pushes have"
    ):
        assembler.add(push_id(1), large)

    assert assembler.add(push_id(0), part(1, 2)) is not None


def test_every_number_of_a_chunk_of_state_counts(monkeypatch):
    """Those that a block has once, too: a sender may say that they are many."""
    monkeypatch.setattr(push_assembly, "MAX_INCOMPLETE_VALUES", 100)
    block = BlockState(
        weights=np.zeros(2, np.float32),
        element_state=np.zeros((1, 2), np.float32),
        scalars=np.zeros(97, np.float32),
        optimizer="adam",
    )
    large = StateChunk(rows=[], blocks=[("tower", 0, block)], chunk=0, num_chunks=2)

    with pytest.raises(ProtocolError, match="have 101 numbers in all, expected up to 100"):
        PushAssembler(WORKERS).add(push_id(0), large)


@pytest.mark.parametrize(("number", "of"), [(3, 3), (0, 0)])
def test_part_beyond_the_last_is_refused(number, of):
    with pytest.raises(ProtocolError, match=f"has chunk {number} of {of}"):
        PushAssembler(WORKERS).add(push_id(), part(number, of))


def test_new_incarnation_drops_what_the_old_one_began():
    assembler = PushAssembler(WORKERS)
    assembler.add(push_id(incarnation=7), part(0, 2))

    assert assembler.add(push_id(incarnation=8), part(1, 2)) is None
    assert len(assembler.waiting()) == 1


def test_incomplete_push_is_dropped_after_a_window_and_its_late_part_refused():
    assembler = PushAssembler(WORKERS)
    for sequence in range(WINDOW + 1):
        assembler.add(push_id(sequence), part(0, 2))

    assert len(assembler.waiting()) == WINDOW
    with pytest.raises(ProtocolError, match=f"push 0 of worker 0 .*push {WINDOW} has begun"):
        assembler.add(push_id(0), part(1, 2))
    assert assembler.add(push_id(1), part(1, 2)) is not None


def test_push_that_is_refused_late_is_forgotten():
    """Its error is raised where it was checked; here another one would hide that."""
    assembler = PushAssembler(WORKERS)
    for number in (0, 1):
        assembler.add(push_id(0), part(number, 2))
    for sequence in range(1, WINDOW + 1):
        assembler.add(push_id(sequence), part(0, 2))

    assembler.refuse(push_id(0), ProtocolError("it does not fit"))

    assert not assembler.is_complete(push_id(0))
    assert assembler.refusal(push_id(0)) is None
    with pytest.raises(ProtocolError, match="is incomplete, but push"):
        assembler.add(push_id(0), part(0, 2))

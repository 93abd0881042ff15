"""Pushes that arrive in parts."""

import pytest

from protos.chunking import PushPart
from protos.errors import ProtocolError
from protos.store import Stamp
from ps_server.coordination.push_assembly import WINDOW, PartAssembler


def stamp(sequence=0, worker=0, incarnation=7):
    return Stamp(
        worker=worker,
        incarnation=incarnation,
        sequence=sequence,
        step=0,
        examples=1,
        batches=1,
        pulled=0,
    )


def part(number, of):
    return PushPart(sparse=[], dense=[], part=number, num_parts=of)


def test_push_in_one_part_is_complete_at_once():
    assembler = PartAssembler()

    assert assembler.add(stamp(), part(0, 1)) == [part(0, 1)]
    assert assembler.num_incomplete == 0


def test_push_is_complete_with_its_last_part_and_in_order():
    assembler = PartAssembler()

    assert assembler.add(stamp(), part(2, 3)) is None
    assert assembler.add(stamp(), part(0, 3)) is None
    assert assembler.add(stamp(), part(1, 3)) == [part(0, 3), part(1, 3), part(2, 3)]
    assert assembler.num_incomplete == 0


def test_pushes_and_workers_do_not_mix():
    assembler = PartAssembler()

    for sequence, worker in [(0, 0), (1, 0), (0, 1)]:
        assert assembler.add(stamp(sequence, worker), part(0, 2)) is None
    assert assembler.num_incomplete == 3
    assert assembler.add(stamp(1, 0), part(1, 2)) is not None
    assert assembler.num_incomplete == 2


@pytest.mark.parametrize("number", [1, 2], ids=["same-part", "other-count"])
def test_contradicting_part_is_refused(number):
    assembler = PartAssembler()
    assembler.add(stamp(), part(1, 3))

    with pytest.raises(
        ProtocolError, match=r"push 0 of worker 0 has part . of .* beside parts \[1\]"
    ):
        assembler.add(stamp(), part(number, 3 if number == 1 else 4))


@pytest.mark.parametrize(("number", "of"), [(3, 3), (0, 0)])
def test_part_beyond_the_last_is_refused(number, of):
    with pytest.raises(ProtocolError, match=f"has part {number} of {of}"):
        PartAssembler().add(stamp(), part(number, of))


def test_new_incarnation_drops_what_the_old_one_began():
    assembler = PartAssembler()
    assembler.add(stamp(incarnation=7), part(0, 2))

    assert assembler.add(stamp(incarnation=8), part(1, 2)) is None
    assert assembler.num_incomplete == 1
    with pytest.raises(ProtocolError, match="from before the worker was restarted"):
        assembler.add(stamp(incarnation=7), part(1, 2))


def test_incomplete_push_is_dropped_after_a_window_and_its_late_part_refused():
    assembler = PartAssembler()
    for sequence in range(WINDOW + 1):
        assembler.add(stamp(sequence), part(0, 2))

    assert assembler.num_incomplete == WINDOW
    with pytest.raises(ProtocolError, match=f"push 0 of worker 0 .*push {WINDOW} began already"):
        assembler.add(stamp(0), part(1, 2))
    assert assembler.add(stamp(1), part(1, 2)) is not None

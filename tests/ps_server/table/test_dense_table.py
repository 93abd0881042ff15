"""A server's piece of a dense block."""

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np
import pytest

from ctr_ps.protos.errors import CheckpointError, GradientError, SpecError
from ctr_ps.protos.gradients import DenseGrad
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.spec import DenseSegment, DenseSpec, InitializerSpec, OptimizerSpec
from ctr_ps.ps_server.optimizers.registry import OPTIMIZERS
from ctr_ps.ps_server.table.contents import DensePiece
from ctr_ps.ps_server.table.dense_table import DenseTable
from tests.support.optimizers import plain_optimizer

ELEMENTWISE = [name for name, optimizer in OPTIMIZERS.items() if optimizer.is_elementwise]
ZEROS = InitializerSpec()
UNIFORM = InitializerSpec(kind="uniform", scale=1.0)
LIMIT_S = 10.0


def spec_of(**changes: object) -> DenseSpec:
    fields: dict[str, object] = {
        "name": "d",
        "segments": (
            DenseSegment(length=4, initializer=UNIFORM),
            DenseSegment(length=3, initializer=ZEROS),
        ),
        "optimizer": OptimizerSpec(name="sgd", params={"learning_rate": 1.0}),
    }
    return DenseSpec(**(fields | changes))  # type: ignore[arg-type]


def pulled(block: DenseTable) -> list[float]:
    out = np.empty(block.length, np.float32)
    block.pull(out)
    return out.tolist()


def test_segments_start_as_they_say() -> None:
    weights = pulled(DenseTable(spec_of()))

    assert all(-1 <= weight < 1 and weight != 0 for weight in weights[:4])
    assert weights[4:] == [0, 0, 0]


@pytest.mark.parametrize("num_servers", [2, 3, 7, 9])
def test_pieces_start_as_the_whole_block(num_servers: int) -> None:
    given = DenseSegment(length=5, initializer=UNIFORM, values=(1.5, -2.0, 0.0, 4.0, 5.0))
    spec = spec_of(segments=(*spec_of().segments, given))
    pieces = [
        DenseTable(spec, server_index=server, shard_map=ShardMap.of(num_servers))
        for server in range(num_servers)
    ]

    together = [weight for piece in pieces for weight in pulled(piece)]
    assert together == pulled(DenseTable(spec))
    assert together[7:] == [1.5, -2.0, 0.0, 4.0, 5.0]


def test_blocks_of_other_names_and_seeds_start_elsewhere() -> None:
    starts = [
        pulled(DenseTable(spec))[0] for spec in (spec_of(), spec_of(name="e"), spec_of(seed=1))
    ]

    assert len(set(starts)) == 3


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_restored_block_trains_like_the_exported_one(name: str) -> None:
    spec = spec_of(optimizer=plain_optimizer(name))
    trained, copy = DenseTable(spec), DenseTable(spec)
    gradient = DenseGrad(np.arange(7, dtype=np.float32), 2)
    for _ in range(3):
        trained.push(gradient)

    copy.restore(trained.export())
    for block in (trained, copy):
        block.push(gradient)

    assert pulled(copy) == pulled(trained)


@pytest.mark.parametrize(
    "shapes", [(7, (0, 7), 16), (7, (1, 7), 9), (7, (2, 7), 1), (1, (2, 7), 2)]
)
def test_piece_of_other_shapes_is_not_restored(shapes: tuple[int, tuple[int, int], int]) -> None:
    """Some have as many numbers as Adam's state of 7 elements, or one that numpy would repeat."""
    block = DenseTable(spec_of(optimizer=OptimizerSpec(name="adam")))
    before = pulled(block)
    weights, states, scalars = (np.ones(shape, np.float32) for shape in shapes)

    with pytest.raises(
        CheckpointError, match=r"expected \(\(7,\), \(2, 7\), \(2,\)\): it has another"
    ):
        block.restore(DensePiece(0, weights, states, scalars))

    assert pulled(block) == before
    assert not block.export().element_state.any()


def test_export_is_a_copy() -> None:
    block = DenseTable(spec_of(optimizer=OptimizerSpec(name="adam")))
    before = pulled(block)

    piece = block.export()
    for array in (piece.weights, piece.element_state, piece.scalars):
        array[:] = 9

    assert pulled(block) == before
    assert 9 not in block.export().element_state
    assert 9 not in block.export().scalars


@pytest.mark.parametrize("shape", [(6,), (8,), (0,), (7, 1), (1, 7)])
def test_gradient_of_another_length_is_refused(shape: tuple[int, ...]) -> None:
    block = DenseTable(spec_of())

    with pytest.raises(GradientError, match=r"'d' has .* values, expected 7: elements 0 to 7"):
        block.check(DenseGrad(np.zeros(shape, np.float32), 1))


def test_piece_names_its_elements_when_it_refuses() -> None:
    block = DenseTable(spec_of(), server_index=1, shard_map=ShardMap.of(2))

    with pytest.raises(GradientError, match="has 7 values, expected 4: elements 3 to 7"):
        block.check(DenseGrad(np.zeros(7, np.float32), 1))


def test_gradient_of_another_type_is_refused() -> None:
    with pytest.raises(GradientError, match="float64, expected float32"):
        DenseTable(spec_of()).check(DenseGrad(np.zeros(7), 1))  # type: ignore[arg-type]


@pytest.mark.parametrize("examples", [0, -1, 2**64 - 1])
def test_gradient_over_no_examples_or_too_many_is_refused(examples: int) -> None:
    with pytest.raises(GradientError, match=re.escape(f"is a sum over {examples:g} examples")):
        DenseTable(spec_of()).check(DenseGrad(np.zeros(7, np.float32), examples))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "a b"}, "invalid name 'a b'"),
        (
            {"optimizer": OptimizerSpec(name="adagrad_row")},
            "'adagrad_row', which is for tables only",
        ),
        ({"optimizer": OptimizerSpec(name="ada")}, "unknown optimizer 'ada'"),
        ({"seed": -1}, "seed -1"),
        (
            {
                "segments": (
                    DenseSegment(length=1, initializer=InitializerSpec(kind="xavier")),
                    DenseSegment(length=1, initializer=ZEROS),
                )
            },
            "initializer 'xavier'",
        ),
        (
            {"segments": (DenseSegment(length=-1, initializer=ZEROS, name="none", shape=(-1,)),)},
            "dense block 'd' has a tensor 'none' with -1 elements",
        ),
        (
            {"segments": (DenseSegment(length=6, initializer=ZEROS, name="bias", shape=(2, 2)),)},
            "dense block 'd' has a tensor 'bias' of shape [2, 2] with 6 elements",
        ),
        (
            {
                "segments": (
                    DenseSegment(length=2, initializer=ZEROS, name="b", shape=(2,), values=(1,)),
                )
            },
            "dense block 'd' has 1 initial values for the 2 elements of tensor 'b'",
        ),
        (
            {"segments": (DenseSegment(length=1, initializer=ZEROS, values=(float("nan"),)),)},
            "not finite float32 numbers: [nan]",
        ),
    ],
)
def test_impossible_spec_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        DenseTable(spec_of(**changes))


def test_tensor_without_elements_takes_no_place() -> None:
    """As the weights of numbers that a schema does not have."""
    none = DenseSegment(length=0, initializer=ZEROS, name="weight", shape=(0,))
    bias = DenseSegment(length=2, initializer=ZEROS, name="bias", shape=(2,), values=(1.0, 2.0))

    for segments in ((none, bias), (bias, none), (none, bias, none)):
        out = np.empty(2, np.float32)
        DenseTable(spec_of(segments=segments)).pull(out)
        assert out.tolist() == [1, 2]


def test_declaring_afresh_keeps_weights_and_takes_the_new_rate() -> None:
    block = DenseTable(spec_of(segments=(DenseSegment(length=1, initializer=ZEROS),)))
    gradient = DenseGrad(np.ones(1, np.float32), 1)
    block.push(gradient)

    block.declare(
        spec_of(
            segments=(DenseSegment(length=1, initializer=ZEROS),),
            optimizer=OptimizerSpec(name="sgd", params={"learning_rate": 0.25}),
        )
    )
    block.push(gradient)

    assert pulled(block) == [-1.25]


class AnnouncedLock:
    """A lock that puts "asks" into a queue before it waits."""

    def __init__(self, events: SimpleQueue[str]) -> None:
        self._lock = threading.Lock()
        self._events = events

    def __enter__(self) -> None:
        self._events.put("asks")
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


CALLS: dict[str, Callable[[DenseTable], object]] = {
    "push": lambda block: block.push(DenseGrad(np.ones(7, np.float32), 1)),
    "add": lambda block: block.add(np.ones(7, np.float32)),
    "pull": lambda block: block.pull(np.empty(7, np.float32)),
    "export": lambda block: block.export(),
    "restore": lambda block: block.restore(DenseTable(spec_of()).export()),
}


@pytest.mark.parametrize("call", CALLS)
def test_calls_wait_while_weights_are_lent(call: str) -> None:
    """What comes next from the calling thread is that it asks for the lock, never that it is done."""
    events: SimpleQueue[str] = SimpleQueue()
    block = DenseTable(spec_of())
    block._lock = AnnouncedLock(events)

    def work() -> None:
        CALLS[call](block)
        events.put("is done")

    with ThreadPoolExecutor(1) as thread:
        with block.lend() as weights:
            assert events.get(timeout=LIMIT_S) == "asks"  # for lending
            before = weights.copy()
            thread.submit(work)

            assert events.get(timeout=LIMIT_S) == "asks"
            assert weights.tolist() == before.tolist()
        assert events.get(timeout=LIMIT_S) == "is done"

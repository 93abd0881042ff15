"""Schedules of learning rates against those of PyTorch, and what they are not for."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from ctr_ps.protos.errors import SpecError
from ctr_ps.protos.gradients import DenseGrad, SparseGrad
from ctr_ps.protos.spec import (
    DenseSegment,
    DenseSpec,
    InitializerSpec,
    OptimizerSpec,
    ScheduleSpec,
    TableSpec,
)
from ctr_ps.protos.store import Missing
from ctr_ps.ps_server.optimizers.registry import (
    OPTIMIZERS,
    WEIGHT_DECAY,
    Tuning,
    factor_at,
    require_schedule,
)
from ctr_ps.ps_server.table.dense_table import DenseTable
from ctr_ps.ps_server.table.sparse_table import SparseTable
from tests.support.optimizers import CUSTOM_PARAMS

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

STEPS = 40
LENGTH = 12


def linear(optimizer: Any, *, start: float, end: float, steps: int) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, start, end, steps)


SCHEDULES: list[tuple[ScheduleSpec, Callable[[Any], Any]]] = [
    (
        ScheduleSpec(kind="linear", total_steps=25, end_factor=0.2),
        lambda optimizer: linear(optimizer, start=1.0, end=0.2, steps=25),
    ),
    (
        ScheduleSpec(kind="step", step_size=7, gamma=0.3),
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.3),
    ),
    (
        ScheduleSpec(kind="constant", warmup_steps=8),
        lambda optimizer: linear(optimizer, start=1 / 8, end=1.0, steps=7),
    ),
    (
        ScheduleSpec(kind="cosine", warmup_steps=8, total_steps=28),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                linear(optimizer, start=1 / 8, end=1.0, steps=7),
                torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
            ],
            milestones=[8],
        ),
    ),
    (
        ScheduleSpec(kind="step", warmup_steps=5, step_size=7, gamma=0.3),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                linear(optimizer, start=1 / 5, end=1.0, steps=4),
                torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.3),
            ],
            milestones=[5],
        ),
    ),
]
KINDS = [spec.kind for spec, _ in SCHEDULES]


@pytest.mark.parametrize(("spec", "new_scheduler"), SCHEDULES, ids=KINDS)
def test_rates_are_those_of_torch(spec: ScheduleSpec, new_scheduler: Callable[[Any], Any]) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    scheduler = new_scheduler(optimizer)
    tuning = Tuning(OptimizerSpec(name="sgd", params={"learning_rate": 0.5}, schedule=spec))
    # The cosine of PyTorch goes up again after its end; ours has come to stay.
    last = spec.total_steps if spec.kind == "cosine" else STEPS

    for step in range(last):
        expected = optimizer.param_groups[0]["lr"]
        assert tuning.rate_at(step) == pytest.approx(expected, rel=1e-6, abs=1e-9)
        assert tuning.at(step).hyper.learning_rate == np.float32(tuning.rate_at(step))
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_rate_stays_where_it_ends(kind: str) -> None:
    spec = ScheduleSpec(kind=kind, warmup_steps=3, total_steps=10, end_factor=0.25)

    assert [factor_at(spec, step) for step in (3, 10, 11, 2**40)] == [1.0, 0.25, 0.25, 0.25]


def dense_block(optimizer: OptimizerSpec) -> DenseTable:
    segment = DenseSegment(length=LENGTH, initializer=InitializerSpec(kind="normal", scale=1.0))
    return DenseTable(DenseSpec(name="block", segments=(segment,), optimizer=optimizer, seed=3))


def pulled(block: DenseTable) -> np.ndarray:
    out = np.empty(block.length, np.float32)
    block.pull(out)
    return out


def table_of(optimizer: OptimizerSpec) -> SparseTable:
    return SparseTable(
        TableSpec(
            name="rows",
            dim=LENGTH,
            initializer=InitializerSpec(kind="normal", scale=1.0),
            optimizer=optimizer,
            num_shards=1,
        )
    )


def random_gradients(num: int = STEPS) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.normal(size=LENGTH).astype(np.float32) for _ in range(num)]


@pytest.mark.parametrize(
    ("name", "new_optimizer"),
    [
        ("sgd", lambda of: torch.optim.SGD(of, lr=0.25, weight_decay=0.5)),
        ("adam", lambda of: torch.optim.AdamW(of, lr=0.25, weight_decay=0.5)),
    ],
)
def test_decay_and_schedule_of_dense_blocks_are_those_of_torch(
    name: str, new_optimizer: Callable[[Sequence[Any]], Any]
) -> None:
    """The weight decay of SGD is one and the same, decoupled or a penalty of L2; AdamW's is decoupled."""
    spec, new_scheduler = SCHEDULES[3]
    params = {"learning_rate": 0.25, WEIGHT_DECAY: 0.5}
    block = dense_block(OptimizerSpec(name=name, params=params, schedule=spec))
    expected = torch.nn.Parameter(torch.from_numpy(pulled(block)))
    optimizer = new_optimizer([expected])
    scheduler = new_scheduler(optimizer)

    for step, values in enumerate(random_gradients(28)):
        block.push(DenseGrad(values * np.float32(4), 4), step=step)
        expected.grad = torch.from_numpy(values)
        optimizer.step()
        scheduler.step()

    np.testing.assert_allclose(pulled(block), expected.detach().numpy(), rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("name", [name for name, each in OPTIMIZERS.items() if each.decays])
def test_row_decays_when_it_is_trained_and_never_else(name: str) -> None:
    params = {**CUSTOM_PARAMS[name], "learning_rate": 0.25, WEIGHT_DECAY: 0.5}
    table = table_of(OptimizerSpec(name=name, params=params))
    keys = np.array([1, 2], np.uint64)
    zeros = np.zeros((1, LENGTH), np.float32)
    before = table.pull(keys, Missing.INITIAL)

    for _ in range(3):
        table.push(SparseGrad(keys[:1], zeros, 1))

    trained, other = table.pull(keys, Missing.INITIAL)
    np.testing.assert_allclose(trained, before[0] * (1 - 0.25 * 0.5) ** 3, rtol=1e-6)
    np.testing.assert_array_equal(other, before[1])


@pytest.mark.parametrize("name", [name for name, each in OPTIMIZERS.items() if each.scheduled])
def test_rate_of_0_leaves_weights_as_they_are(name: str) -> None:
    """FTRL keeps its zeros too: penalties do not go with the rate."""
    schedule = ScheduleSpec(kind="step", warmup_steps=0, step_size=1, gamma=1e-30)
    params = {**CUSTOM_PARAMS[name], **({"l2": 0.0, "l1": 0.5} if name == "ftrl" else {})}
    table = table_of(OptimizerSpec(name=name, params=params, schedule=schedule))
    key = np.array([1], np.uint64)
    gradients = random_gradients(20)
    for values in gradients[:10]:
        table.push(SparseGrad(key, values.reshape(1, -1), 1), step=0)
    before = table.pull(key, Missing.INITIAL)

    for values in gradients[10:]:
        table.push(SparseGrad(key, values.reshape(1, -1), 1), step=2)

    after = table.pull(key, Missing.INITIAL)
    if name == "ftrl":
        assert 0 < np.count_nonzero(before == 0) < LENGTH
        np.testing.assert_array_equal(after == 0, before == 0)
    else:
        np.testing.assert_array_equal(after, before)


def test_ftrl_without_penalties_takes_steps_of_the_scheduled_rate() -> None:
    """Those of gradient descent with the rate f * learning_rate / (beta + sqrt(n)); see its module."""
    schedule = ScheduleSpec(kind="linear", warmup_steps=5, total_steps=STEPS, end_factor=0.1)
    spec = OptimizerSpec(name="ftrl", params={"learning_rate": 0.5, "beta": 2.0}, schedule=schedule)
    block = dense_block(spec)
    w, n = pulled(block).astype(np.float64), np.zeros(LENGTH)

    for step, values in enumerate(random_gradients()):
        block.push(DenseGrad(values, 1), step=step)
        n += values.astype(np.float64) ** 2
        w -= 0.5 * factor_at(schedule, step) * values / (2.0 + np.sqrt(n))

    np.testing.assert_allclose(pulled(block), w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            ScheduleSpec(kind="exponential"),
            "kind of schedule is 'exponential', expected one of const",
        ),
        (
            ScheduleSpec(kind="constant", warmup_steps=-1),
            "warmup_steps of schedule 'constant' is -1",
        ),
        (
            ScheduleSpec(kind="linear"),
            "total_steps of schedule 'linear' is 0, expected more than warmup_steps = 0",
        ),
        (
            ScheduleSpec(kind="cosine", warmup_steps=9, total_steps=9),
            "total_steps of schedule 'cosine' is 9, expected more than warmup_steps = 9",
        ),
        (
            ScheduleSpec(kind="cosine", total_steps=9, end_factor=math.nan),
            "end_factor of schedule 'cosine' is nan, expected 0 to 1",
        ),
        (ScheduleSpec(kind="step", gamma=0.5), "step_size of schedule 'step' is 0"),
        (ScheduleSpec(kind="step", step_size=5, gamma=0.0), "gamma of schedule 'step' is 0"),
        (ScheduleSpec(kind="step", step_size=5, gamma=math.nan), "gamma of schedule 'step' is nan"),
    ],
)
def test_impossible_schedule_is_refused_by_the_name_of_its_setting(
    spec: ScheduleSpec, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        require_schedule(spec)
    with pytest.raises(SpecError, match=message):
        table_of(OptimizerSpec(name="adagrad", schedule=spec))


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        (
            "ftrl",
            {WEIGHT_DECAY: 0.1},
            "'ftrl' has no weight_decay: use its own penalties, l1",
        ),
        ("sum", {WEIGHT_DECAY: 0.1}, "'sum' has no weight_decay$"),
        (
            "adam",
            {WEIGHT_DECAY: -0.1},
            "weight_decay of optimizer 'adam' is -0.1, expected at least 0",
        ),
        ("adam", {WEIGHT_DECAY: math.nan}, "weight_decay of optimizer 'adam' is nan"),
        (
            "sgd",
            {"learning_rate": 0.5, WEIGHT_DECAY: 2.5},
            "is 2.5, expected at least 0, and at most 1 when multiplied by the learning rate 0.5",
        ),
    ],
)
def test_weight_decay_without_a_meaning_is_refused(
    name: str, params: dict[str, float], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        Tuning(OptimizerSpec(name=name, params=params))


def test_optimizer_without_a_rate_has_no_schedule() -> None:
    with pytest.raises(SpecError, match="'sum' has no learning rate, so it takes no schedule"):
        Tuning(OptimizerSpec(name="sum", schedule=ScheduleSpec(warmup_steps=3)))

"""The optimizers of a script are those of the servers, with arguments as Paddle has them."""

import inspect
from typing import Any

import pytest

from ctr_ps.protos.errors import JobError, UsageError
from ctr_ps.protos.spec import ScheduleSpec
from ctr_ps.ps_server.optimizers.registry import OPTIMIZERS
from ctr_ps.ps_worker.fleet import executor, optimizer
from ctr_ps.ps_worker.fleet.executor import distributed_optimizer
from ctr_ps.ps_worker.fleet.task import Task
from ctr_ps.ps_worker.job import override_job
from ctr_ps.ps_worker.job.model import table_specs
from tests.support.training import small_model

ADDS_ONLY = "sum"  # of metrics and deltas, no optimizer to train with
CLASSES = [
    each
    for each in vars(optimizer).values()
    if inspect.isclass(each)
    and issubclass(each, optimizer.Optimizer)
    and each is not optimizer.Optimizer
]
lr = optimizer.lr


def new(kind: type[Any]) -> optimizer.Optimizer:
    found: optimizer.Optimizer = kind(learning_rate=0.1)
    return found


def test_every_optimizer_has_its_class_with_its_hyper_parameters_and_defaults() -> None:
    found = {new(each).choice["name"]: new(each).choice for each in CLASSES}

    assert found.keys() == OPTIMIZERS.keys() - {ADDS_ONLY}
    for name, choice in found.items():
        known = OPTIMIZERS[name]
        defaults = known.hyper(learning_rate=0.1)
        expected = {parameter: getattr(defaults, parameter) for parameter in known.ranges}
        if name == "adagrad":
            del expected["initial_accumulator"]  # rows start by the size of a batch
        assert choice == {"name": name, **expected}


def test_arguments_are_hyper_parameters_and_the_rate_comes_first() -> None:
    chosen = optimizer.Adam(0.01, epsilon=1e-6, weight_decay=0.5).choice

    assert chosen == {
        "name": "adam",
        "learning_rate": 0.01,
        "beta1": 0.9,
        "beta2": 0.999,
        "epsilon": 1e-6,
        "weight_decay": 0.5,
    }


@pytest.mark.parametrize("wrong", [0.02, "adam", optimizer.Adam, (0.001, 0.9, 0.999, 1e-8)])
def test_what_is_no_optimizer_is_refused(wrong: object) -> None:
    with pytest.raises(UsageError, match=r"is not an optimizer: give for example fleet.optimizer."):
        optimizer.require_optimizer(wrong)


@pytest.mark.parametrize(
    ("scheduler", "rate", "schedule"),
    [
        (
            lr.StepDecay(0.5, step_size=30, gamma=0.5),
            0.5,
            ScheduleSpec(kind="step", step_size=30, gamma=0.5),
        ),
        (
            lr.CosineAnnealingDecay(0.5, T_max=90, eta_min=0.125),
            0.5,
            ScheduleSpec(kind="cosine", total_steps=90, end_factor=0.25),
        ),
        (
            lr.PolynomialDecay(0.5, 90, end_lr=0.0),
            0.5,
            ScheduleSpec(kind="linear", total_steps=90),
        ),
        (
            lr.LinearWarmup(lr.CosineAnnealingDecay(0.5, 90), warmup_steps=10, end_lr=0.5),
            0.5,
            ScheduleSpec(kind="cosine", warmup_steps=10, total_steps=100),
        ),
        (lr.LinearWarmup(0.25, 10), 0.25, ScheduleSpec(kind="constant", warmup_steps=10)),
    ],
)
def test_schedules_of_paddle_are_those_of_a_job(
    scheduler: lr.LRScheduler, rate: float, schedule: ScheduleSpec
) -> None:
    job = override_job(
        {"optimizer": {"dense": optimizer.Adam(scheduler).choice}}, [], source="test"
    )

    spec = job.optimizer.of_dense()

    assert spec.schedule == schedule
    assert spec.params["learning_rate"] == rate


@pytest.mark.parametrize(
    ("new_one", "message"),
    [
        (
            lambda: lr.StepDecay(0.5, 30).step(),
            r"remove the call of StepDecay\.step\(\): servers count",
        ),
        (lambda: lr.PolynomialDecay(0.5, 30, power=2.0), "here it is linear and runs once"),
        (lambda: lr.CosineAnnealingDecay(0.5, 30, eta_min=0.75), "eta_min is 0.75, expected 0 to"),
        (lambda: lr.LinearWarmup(0.5, 30, start_lr=0.25), "from 0 to the learning rate, 0.5"),
        (
            lambda: lr.LinearWarmup(lr.LinearWarmup(0.5, 3), 30),
            "a LinearWarmup is inside a LinearWarmup",
        ),
        (lambda: lr.StepDecay("fast", 3), "learning_rate is 'fast', expected a number"),
        (lambda: optimizer.SGD(None), r"learning_rate of fleet\.optimizer\.SGD is None"),
        (lambda: optimizer.Adam(weight_decay="L2"), "weight_decay .* is 'L2', expected a number"),
        (
            lambda: optimizer.Adam(grad_clip=1.0),
            r"expected for example fleet.optimizer.ClipGradByGlobalNorm",
        ),
        (
            lambda: optimizer.ClipGradByGlobalNorm(0.0),
            "clip_norm is 0.0, expected a number above 0",
        ),
        (
            lambda: optimizer.Adam(parameters=[1]),
            r"Adam has no parameters\. Its arguments are learning_rate, beta1, beta2, epsilon, "
            "lazy_mode, weight_decay, grad_clip",
        ),
        (lambda: optimizer.Adam(rescale_grad=0.0), "Adam has no rescale_grad"),
        (
            lambda: optimizer.Adagrad(initial_accumulator_value=1),
            "initial_accumulator_value, did you mean 'initial_accumulator'",
        ),
        (lambda: optimizer.Adam(beta_1=0.5), "has no beta_1, did you mean 'beta1'"),
        (
            lambda: optimizer.Ftrl(weight_decay=0.5),
            r"Ftrl has no weight_decay\. .* beta, l1, l2, grad",
        ),
        (lambda: optimizer.Ftrl(regularization=0.5), "Ftrl has no regularization"),
    ],
)
def test_what_has_no_counterpart_is_refused_with_what_to_write(new_one: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        new_one()


def test_arguments_of_paddle_that_ask_for_nothing_are_taken() -> None:
    assert optimizer.Adam(0.1, name=None, multi_precision=False, use_multi_tensor=False).choice == (
        optimizer.Adam(0.1).choice
    )


def test_signatures_show_the_arguments() -> None:
    shown = "(learning_rate=0.05, initial_g2sum=3.0, *, weight_decay=None, grad_clip=None)"

    assert str(inspect.signature(optimizer.AdagradRow)) == shown
    with pytest.raises(TypeError, match="missing a required argument: 'learning_rate'"):
        optimizer.SGD()


def test_lazy_mode_is_what_rows_do() -> None:
    distributed_optimizer(optimizer.Adam(lazy_mode=True), dense=optimizer.Adam(lazy_mode=False))

    with pytest.raises(UsageError, match=r"lazy_mode=False is not supported.*Leave lazy_mode out"):
        distributed_optimizer(optimizer.Adam(lazy_mode=False))


def test_rows_and_dense_parameters_are_clipped_by_one_norm() -> None:
    one, two = (optimizer.SGD(0.1, grad_clip=optimizer.ClipGradByGlobalNorm(n)) for n in (1, 2))

    with pytest.raises(UsageError, match=r"different grad_clip, \[1\.0, 2\.0\]"):
        distributed_optimizer(one, dense=two)


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    found: list[Task] = []
    monkeypatch.setattr(executor.FLEET, "minimize", found.append)
    executor.FLEET.init()
    return found


def test_model_is_minimized_as_the_optimizers_say(task: list[Task]) -> None:
    clip = optimizer.ClipGradByGlobalNorm(0.5)
    rate = lr.StepDecay(0.1, step_size=10)
    for_rows = optimizer.Adagrad(rate, weight_decay=0.25, grad_clip=clip)

    distributed_optimizer(for_rows, dense=optimizer.Ftrl()).minimize(small_model(), dropout=0.25)

    train, optimizers = task[0].job.train, task[0].job.optimizer
    assert (train.clip_norm, train.dropout) == (0.5, 0.25)
    assert optimizers.sparse.spec().params["weight_decay"] == 0.25
    assert optimizers.sparse.spec().schedule == ScheduleSpec(kind="step", step_size=10, gamma=0.1)
    assert optimizers.of_dense().name == "ftrl"


@pytest.mark.parametrize(("given", "start"), [(None, 2 / 128**2), (0.0, 0.0), (0.5, 0.5)])
def test_rows_of_adagrad_start_by_the_size_of_a_batch_unless_the_script_says(
    task: list[Task], given: float | None, start: float
) -> None:
    model = small_model()
    distributed_optimizer(optimizer.Adagrad(0.1, initial_accumulator=given)).minimize(model)

    for spec in table_specs(model, task[0].job):
        assert spec.optimizer.params["initial_accumulator"] == start


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_norm": 2.0}, r"clip_norm is 2\.0, but grad_clip is 0\.5"),
        ({"dropout": 1.5}, r"minimize.dropout=. is 1\.5"),
        ({"clip_norm": -1.0}, r"train\.clip_norm|but grad_clip is"),
    ],
)
def test_wrong_setting_is_refused_before_a_run_begins(
    task: list[Task], settings: dict[str, float], message: str
) -> None:
    clipped = optimizer.SGD(0.1, grad_clip=optimizer.ClipGradByGlobalNorm(0.5))

    with pytest.raises((UsageError, JobError), match=message):
        distributed_optimizer(clipped).minimize(small_model(), **settings)
    assert not task

"""Heterogeneous training gives the model of the same job without heter trainers."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from torch import Tensor, nn  # noqa: E402

from ctr_ps.ctr_model.batch import Batch as NumpyBatch  # noqa: E402
from ctr_ps.ctr_model.schema import Schema  # noqa: E402
from ctr_ps.ctr_model.torch import Batch, TorchModel  # noqa: E402
from ctr_ps.protos.errors import CtrPsError, JobError, UsageError  # noqa: E402
from ctr_ps.protos.store import Member, Missing, ReduceOp, Store  # noqa: E402
from ctr_ps.protos.wire.heter import Train  # noqa: E402
from ctr_ps.ps_server.store import ParameterStore  # noqa: E402
from ctr_ps.ps_worker.extras.heter.connect import require_heter, takes_over  # noqa: E402
from ctr_ps.ps_worker.extras.heter.dense_part import DensePart  # noqa: E402
from ctr_ps.ps_worker.job import Job, override_job  # noqa: E402
from ctr_ps.ps_worker.job.model import DENSE_BLOCK  # noqa: E402
from ctr_ps.ps_worker.run.run import Run  # noqa: E402
from tests.support.heter import HeterCluster, run_job  # noqa: E402
from tests.support.task_modules import SharedBottom  # noqa: E402
from tests.support.torch_models import Attention, SlotProducts, WideDeep  # noqa: E402
from tests.support.training import (  # noqa: E402
    NUM_DENSE,
    NUM_SLOTS,
    job,
    random_batches,
    small_model,
    worker_run,
)

SCHEMA = Schema.numbered(NUM_DENSE, NUM_SLOTS)
ADAGRAD = ("optimizer.sparse=adagrad", "optimizer.dense=adagrad")


def wide_deep() -> TorchModel:
    return TorchModel(SCHEMA, WideDeep, {"dim": 4, "hidden": [16, 8]}, seed=3)


def slot_products() -> TorchModel:
    return TorchModel(SCHEMA, SlotProducts, seed=3)


def attention() -> TorchModel:
    return TorchModel(SCHEMA, Attention, seed=3)


def shared_bottom() -> TorchModel:
    return TorchModel(
        dataclasses.replace(SCHEMA, label="click", other_labels=("bought",)), SharedBottom, seed=3
    )


class Parameters:
    """All parameters at the end of a job."""

    def __init__(self, model: TorchModel) -> None:
        self._model = model
        self.dense: Any = None
        self.rows: dict[str, Any] = {}

    def read(self, store: Store) -> None:
        keys = np.unique(np.concatenate([each.keys for each in random_batches(40, 64, seed=5)]))
        self.dense = np.empty(self._model.num_params, np.float32)
        store.pull_dense({DENSE_BLOCK: self.dense}).result()
        of_tables = {table.name: keys for table in self._model.tables}
        self.rows = dict(store.pull_sparse(of_tables, missing=Missing.ZEROS).result().rows)


def assert_close(found: Parameters, expected: Parameters, atol: float) -> None:
    np.testing.assert_allclose(found.dense, expected.dense, atol=atol)
    for table, rows in expected.rows.items():
        np.testing.assert_allclose(found.rows[table], rows, atol=atol)


def batches_of(
    worker: int, num_batches: int, *, several_keys: bool = False, two_labels: bool = False
) -> list[NumpyBatch]:
    found = random_batches(num_batches, 16 + 5 * worker, seed=worker)
    if two_labels:
        others = [np.roll(each.labels, 1).reshape(-1, 1) for each in found]
        return [
            dataclasses.replace(each, other_labels=other)
            for each, other in zip(found, others, strict=True)
        ]
    return [with_several_keys(each, 2 + worker) for each in found] if several_keys else found


def with_several_keys(batch: NumpyBatch, per_slot: int) -> NumpyBatch:
    """Returns a batch whose first example has `per_slot` keys in its first slot."""
    return NumpyBatch(
        labels=batch.labels,
        dense=batch.dense,
        keys=np.concatenate([np.arange(per_slot - 1, dtype=np.uint64), batch.keys]),
        offsets=np.concatenate([[0], batch.offsets[1:] + per_slot - 1]).astype(np.int32),
        num_slots=batch.num_slots,
    )


def trained(
    build: Any,
    settings: Job,
    *,
    num_heter: int,
    num_batches: Sequence[int] = (12, 12),
    several_keys: bool = False,
    two_labels: bool = False,
    **cluster: Any,
) -> tuple[Parameters, HeterCluster, list[float]]:
    """Returns the parameters after two epochs, and each worker's mean loss of the second.

    Of asynchronous training the first epoch shows how late its first gradients are, which is chance.
    """
    found, losses = Parameters(build()), [0.0] * len(num_batches)

    def work(run: Run, index: int) -> None:
        data = batches_of(
            index, num_batches[index], several_keys=several_keys, two_labels=two_labels
        )
        for _ in range(2):
            before = run.progress.counts()
            run.train(data)
            run.barrier()
        after = run.progress.counts()
        assert run.all_reduce(np.array([1.0]), ReduceOp.SUM) == len(num_batches)
        assert run.all_reduce(np.array([-1.0 * index]), ReduceOp.MAX) == 0.0
        losses[index] = (after.loss - before.loss) / (after.weight - before.weight)
        if index == 0:
            found.read(run.store)

    job_ = run_job(
        build, settings, work, num_workers=len(num_batches), num_heter=num_heter, **cluster
    )
    return found, job_, losses


def trained_without_and_with_heter(
    settings: Job, data: Sequence[list[NumpyBatch]], *, num_skipped: int
) -> list[Parameters]:
    """Trains two jobs on the same batches, of which both skip so many."""
    both = [Parameters(wide_deep()) for _ in range(2)]
    for num_heter, found in enumerate(both):

        def work(run: Run, index: int, found: Parameters = found) -> None:
            run.train(data[index])
            run.barrier()
            skipped = run.all_reduce(np.array([float(run.non_finite.skipped)]), ReduceOp.SUM)
            assert skipped[0] == num_skipped
            if index == 0:
                found.read(run.store)

        run_job(wide_deep, settings, work, num_heter=num_heter)
    return both


@pytest.mark.parametrize(
    ("build", "num_batches", "num_heter", "options"),
    [
        (wide_deep, (12, 12), 1, {"num_servers": 2}),
        (wide_deep, (12, 5, 9), 2, {}),
        (attention, (8, 8), 1, {"several_keys": True}),
        (shared_bottom, (8, 8), 1, {"two_labels": True}),
    ],
    ids=["two-servers", "uneven-data-and-two-heter-trainers", "attention", "two-labels"],
)
def test_sync_gives_the_model_of_the_same_job_without_heter_trainers(
    build: Any, num_batches: Sequence[int], num_heter: int, options: Any
) -> None:
    settings = job("sync", *ADAGRAD)
    expected, _, losses = trained(build, settings, num_heter=0, num_batches=num_batches, **options)

    found, job_, own_losses = trained(
        build, settings, num_heter=num_heter, num_batches=num_batches, **options
    )

    assert_close(found, expected, 1e-5)
    assert all(np.abs(rows).max() > 0.01 for rows in expected.rows.values())
    assert own_losses == pytest.approx(losses, rel=1e-4)
    examples = sum(2 * n * (16 + 5 * worker) for worker, n in enumerate(num_batches))
    assert sum(each["examples"] for each in job_.figures) == examples
    assert job_.left == set(range(len(num_batches) + num_heter))


@pytest.mark.parametrize("build", [wide_deep, slot_products])
def test_both_sides_of_the_cut_train_in_bfloat16(build: Any) -> None:
    """With a single CPU trainer, so that sums are rounded in the same places."""
    bfloat16 = job("sync", *ADAGRAD, "train.compute=bfloat16")
    expected, _, _ = trained(build, bfloat16, num_heter=0, num_batches=(12,))
    exact, _, _ = trained(build, job("sync", *ADAGRAD), num_heter=0, num_batches=(12,))

    found, _, _ = trained(build, bfloat16, num_heter=1, num_batches=(12,))

    assert np.abs(found.dense - exact.dense).max() > 1e-4
    assert_close(found, expected, 1e-6)


@pytest.mark.parametrize(("mode", "num_heter"), [("async", 2), ("half_async", 1)])
def test_other_modes_learn_no_less(
    mode: str, num_heter: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Jobs with heter trainers have no head start of worker 0.
    monkeypatch.setattr("ctr_ps.ps_worker.communicators.asynchronous.FIRST_BATCHES", 0)
    own = ["heter.max_joined=3", "train.thread_num=2", "cluster.on_worker_loss=continue"]
    settings = job(mode, *ADAGRAD, *own[: 3 if num_heter == 2 else 2])
    _, _, losses = trained(wide_deep, settings, num_heter=0, num_batches=(60, 60))

    _, job_, found = trained(wide_deep, settings, num_heter=num_heter, num_batches=(60, 60))

    # Fresh dense parameters for each step: where the job without merges dense gradients, this learns sooner.
    assert np.mean(found) < np.mean(losses) + 0.02
    assert np.mean(found) < 0.4  # untrained: 0.69
    assert sum(each["batches"] for each in job_.figures) == 240


def test_a_batch_that_is_not_finite_is_skipped_alone() -> None:
    settings = job("sync", *ADAGRAD, "train.non_finite=skip")
    data = [batches_of(index, 6) for index in range(2)]
    dense = data[1][3].dense.copy()
    dense[0, 0] = np.inf
    data[1][3] = dataclasses.replace(data[1][3], dense=dense)

    expected, found = trained_without_and_with_heter(settings, data, num_skipped=1)

    assert_close(found, expected, 1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["strategy.mode=geo"], "strategy.mode is 'geo', expected one of"),
        (["cluster.on_worker_loss=wait"], "lost processes cannot be replaced"),
        (["strategy.mode=sync", "train.thread_num=2"], "start more CPU trainers"),
        (["data.shuffle=global", "data.in_memory=true"], 'set "local"'),
        (["train.clip_norm=1.0"], "no process has the whole gradient of a batch"),
        (["data.negative_rate=0.5", "data.negative_correction=weight"], 'set "logit"'),
    ],
)
def test_what_heter_trainers_cannot_train_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(JobError, match=message):
        require_heter(override_job({}, settings, source="test"), wide_deep())


def test_a_schema_with_weights_is_refused() -> None:
    model = TorchModel(
        dataclasses.replace(SCHEMA, weight="w"), WideDeep, {"dim": 4, "hidden": [16, 8]}
    )

    with pytest.raises(JobError, match=r"data\.schema: the schema has the weight 'w', but heter"):
        require_heter(job("sync"), model)


def test_a_model_that_is_no_module_is_refused() -> None:
    with pytest.raises(JobError, match=r"model\.name: .* the model is a CtrDnn"):
        require_heter(job("sync"), small_model())


def test_other_models_on_both_sides_of_the_cut_end_the_job() -> None:
    class Renamed(WideDeep):
        def __init__(self, schema: Schema, **options: Any) -> None:
            super().__init__(schema, **options)
            self.deep = self.embedding
            del self.embedding

    models = iter([wide_deep(), wide_deep()])
    other = TorchModel(SCHEMA, Renamed, {"dim": 4, "hidden": [16, 8]}, seed=3)
    for table, own in zip(other.tables, wide_deep().tables, strict=True):
        object.__setattr__(table, "name", own.name)

    with pytest.raises(
        CtrPsError, match=r"activations come from the layers .*embedding.*same model file"
    ):
        run_job(
            lambda: next(models, other),
            job("sync", *ADAGRAD),
            lambda run, index: run.train(batches_of(index, 3)),
        )


def test_error_of_the_module_is_told_to_cpu_trainers() -> None:
    class Broken(WideDeep):
        def forward(self, batch: Batch) -> Tensor:
            raise ZeroDivisionError("of the user")

    told: list[str] = []

    def work(run: Run, index: int) -> None:
        with pytest.raises(CtrPsError) as error:
            run.train(batches_of(index, 3))
        told.append(str(error.value))
        raise error.value

    with pytest.raises((CtrPsError, ZeroDivisionError)):
        run_job(
            lambda: TorchModel(SCHEMA, Broken, {"dim": 4, "hidden": [16, 8]}),
            job("sync", *ADAGRAD),
            work,
        )

    assert len(told) == 2
    assert any("heter trainer failed: ZeroDivisionError: of the user" in each for each in told)


def test_a_batch_whose_dense_gradient_alone_is_not_finite_is_answered_so() -> None:
    """The rest of its answer is finite, and its CPU trainer would push the gradients of its rows."""

    class Zeros(WideDeep):
        def __init__(self, schema: Schema, **options: Any) -> None:
            super().__init__(schema, **options)
            for each in self.parameters():
                nn.init.zeros_(each)

    model = TorchModel(SCHEMA, Zeros, {"dim": 4, "hidden": [16]})
    part = DensePart(model)
    outputs = {
        "wide": [np.zeros((4, NUM_SLOTS, 1), np.float32)],
        "embedding": [np.zeros((4, NUM_SLOTS, 4), np.float32)],
    }
    labels = np.zeros(4, np.float32)
    batches = [
        Train(
            member=Member(worker, 1),
            number=0,
            settled=0,
            dense=np.full((4, NUM_DENSE), scale, np.float32),
            labels=labels,
            outputs=outputs,
        )
        for worker, scale in enumerate((1.0, 3e38))
    ]

    _, examples, answers = part.train(model.initial_values, batches)

    assert examples == 4
    assert [bool(np.isfinite(each.loss)) for each in answers] == [True, False]


def test_a_step_whose_batches_are_all_skipped_moves_nothing() -> None:
    settings = job("sync", "optimizer.dense=adam", ADAGRAD[0], "train.non_finite=skip")
    data = [batches_of(index, 4) for index in range(2)]
    for own in data:
        own[2] = dataclasses.replace(own[2], dense=np.full_like(own[2].dense, np.inf))

    expected, found = trained_without_and_with_heter(settings, data, num_skipped=2)

    assert_close(found, expected, 1e-5)


def test_nobody_takes_over_in_a_synchronous_job() -> None:
    found = {
        mode: takes_over(job(mode, "cluster.on_worker_loss=continue")) for mode in ("sync", "async")
    }

    assert found == {"sync": False, "async": True}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(
        UsageError,
        match=r'the device is "cuda", but PyTorch finds no GPU on this machine: .* or set cpu',
    ):
        DensePart(wide_deep(), device="cuda")


def test_tables_on_a_device_are_trained_without_heter_trainers() -> None:
    on_device = job("sync", "device.tables=pass", "device.kind=cpu", "data.in_memory=true")

    with pytest.raises(JobError, match=r"device\.tables: is .*has 1 heter trainers: start none"):
        worker_run(
            ParameterStore(),
            wide_deep(),
            on_device,
            worker=0,
            num_workers=1,
            num_heter=1,
            is_in_process=False,
        )

"""What worker 0 saves: told to end, without rows, and in the place of a lost process."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ctr_ps.protos.errors import SnapshotLostError
from ctr_ps.protos.store import SaveRequest
from ctr_ps.ps_server.checkpoint.publish import write_best
from ctr_ps.ps_server.store import ParameterStore
from ctr_ps.ps_worker.checkpoints.resume import Validation
from ctr_ps.ps_worker.checkpoints.retention import checkpoints_of_runs
from ctr_ps.ps_worker.extras.data_tools.generate import generate
from ctr_ps.ps_worker.job import override_job
from ctr_ps.ps_worker.run.plan import plan_of
from ctr_ps.ps_worker.run.training_job import checkpoints
from ctr_ps.ps_worker.run.training_job.checkpoints import JobCheckpoints, Start
from ctr_ps.ps_worker.run.training_job.train_job import train_job
from tests.support.stores import in_process
from tests.support.training import job_of


def asked_of_saver(
    *,
    number: int,
    files: bool,
    stream: str,
    is_within: bool,
    examples: int,
    is_owed: bool = False,
    is_repeating: bool = False,
) -> list[str]:
    """Returns what pass `number` of a job, with 2 epochs if it has files, asks for after 80 saved rows."""
    asked: list[str] = []
    job = SimpleNamespace(
        train=SimpleNamespace(epochs=2),
        data=SimpleNamespace(stream=stream),
        checkpoint=SimpleNamespace(is_within_epochs=is_within),
    )
    found: Any = SimpleNamespace(
        _job=job,
        _plan=SimpleNamespace(train_files=["part-0"] * files),
        _run=SimpleNamespace(
            progress=SimpleNamespace(steps=7),
            is_repeating=is_repeating,
            store=SimpleNamespace(status=lambda: SimpleNamespace(num_examples=examples)),
        ),
        _saved_examples=80,
        _saver=SimpleNamespace(
            save_within=lambda step, _: asked.append(f"step {step}"),
            wait=lambda: None,
            is_owed=is_owed,
        ),
    )
    each: Any = SimpleNamespace(number=number)
    JobCheckpoints.save_when_told(found, each)
    return asked


@pytest.mark.parametrize(
    ("number", "files", "stream", "is_within", "is_saved"),
    [
        (1, False, "kafka://broker/clicks", False, True),
        (2, True, "kafka://broker/clicks", False, False),
        (3, True, "kafka://broker/clicks", False, True),
        (2, True, "kafka://broker/clicks", True, True),
        (1, True, "", False, False),
        (1, True, "", True, True),
    ],
)
def test_passes_of_a_stream_are_saved_and_epochs_of_files_only_if_others_within_are(
    number: int, stream: str, *, files: bool, is_within: bool, is_saved: bool
) -> None:
    asked = partial(asked_of_saver, number=number, files=files, stream=stream, is_within=is_within)

    assert asked(examples=96) == ["step 7"] * is_saved
    assert asked(examples=80) == [], "nothing was trained since the last one"
    assert asked(examples=80, is_owed=True) == ["step 7"] * is_saved, "which was lost"
    assert asked(examples=96, is_repeating=True) == [], "others may have gone on"


def checkpoints_of(
    settings: list[str], monkeypatch: pytest.MonkeyPatch, *, examples: int, is_replacement: bool
) -> tuple[Any, Any]:
    """Returns the checkpoints of a run, and a saver that notes what it is asked for."""
    saver: Any = SimpleNamespace(names=[], save=lambda name, *_, **__: saver.names.append(name))

    def new_saver(*_: object, **known: Any) -> Any:
        saver.known = known
        return saver

    monkeypatch.setattr(checkpoints, "Saver", new_saver)
    monkeypatch.setattr(checkpoints, "values_of_job", lambda *_: None)
    run: Any = SimpleNamespace(
        is_first=True,
        is_replacement=is_replacement,
        is_repeating=False,
        progress=SimpleNamespace(steps=5),
        store=SimpleNamespace(status=lambda: SimpleNamespace(num_examples=examples)),
    )
    job = override_job({}, settings, source="test")
    plan: Any = SimpleNamespace(job=job, schema=None, train_files=())
    none: Any = None
    return JobCheckpoints(plan, run, none, Start(files="", claim=None)), saver


@pytest.mark.parametrize(
    ("settings", "saved"),
    [
        ([], ["epoch-2", "step-5", "epoch-4"]),
        (["data.reader_num=2"], ["epoch-2", "epoch-4"]),
    ],
    ids=["rows in order", "no order"],
)
def test_a_save_after_a_pass_that_a_server_has_lost_is_repeated_within_the_next_one(
    settings: list[str], saved: list[str], tmp_path: Path
) -> None:
    """Unless no run could resume there."""
    asked: list[str] = []

    class LosingStore(ParameterStore):
        def save(self, request: SaveRequest) -> str:
            asked.append(request.url.rpartition("/")[2])
            if asked == ["epoch-2"]:
                raise SnapshotLostError("server 0 was restarted")
            return super().save(request)

    generate(tmp_path, rows=40, test_rows=20, files=1, test_files=1, seed=1)
    own = [f"data.train={tmp_path}/train/*", f"checkpoint.dir={tmp_path / 'model'}", *settings]
    own += ["checkpoint.every_epochs=2", "train.epochs=4", "train.batch_size=20"]

    train_job(plan_of(job_of(*own, "model.hidden=[4]")), LosingStore())

    assert asked == saved
    assert {*checkpoints_of_runs(str(tmp_path / "model"))} == {*saved[1:]}


@pytest.mark.parametrize("examples", [0, 10])
def test_a_pass_of_a_stream_that_had_no_row_yet_is_not_saved(
    examples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [f"checkpoint.dir={tmp_path}", "data.stream=redis://host/clicks", "data.train=[]"]
    found, saver = checkpoints_of(settings, monkeypatch, examples=examples, is_replacement=False)
    monkeypatch.setattr(found, "_attachments", lambda *_, **__: {})

    found.save_after(SimpleNamespace(number=3), is_best=False, is_published=False)

    assert saver.names == (["epoch-3"] if examples else [])


@pytest.mark.parametrize("is_replacement", [False, True])
def test_a_process_in_the_place_of_worker_0_knows_the_checkpoints_of_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_replacement: bool
) -> None:
    monkeypatch.setattr(checkpoints, "checkpoints_of_runs", lambda _: ("step-5",))

    settings = [f"checkpoint.dir={tmp_path}"]
    _, saver = checkpoints_of(settings, monkeypatch, examples=0, is_replacement=is_replacement)

    assert saver.known["own"] == (("step-5",) if is_replacement else ())


def test_best_model_of_a_lost_process_is_known_before_best_names_it(tmp_path: Path) -> None:
    store = in_process()
    for name in ("epoch-1", "epoch-2"):
        store.save(SaveRequest(url=str(tmp_path / name)))
    write_best(tmp_path, "epoch-1")
    job = override_job({}, [f"checkpoint.dir={tmp_path}"], source="test")
    found: Any = SimpleNamespace(_saver=object(), _job=job)

    names = [
        JobCheckpoints.name_before(found, Validation(epoch=epoch, step=9, auc=0.5, log_loss=0.5))
        for epoch in (2, 3)
    ]

    assert names == ["epoch-2", "epoch-1"], "that of epoch 3 was lost with a server"

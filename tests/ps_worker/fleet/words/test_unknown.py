"""Calls and names as in Paddle are taken, or show what there is."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_worker import fleet
from tests.support.training import random_batches, small_model

PROGRAM, DATASET, EXECUTOR = object(), random_batches(2, 8, seed=1), fleet.Executor()
TRAIN = r"executor\.train_from_dataset\(dataset, fetch_handler=print"
SAVE = r"fleet\.save_persistables\(dirname\)"


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Iterator[fleet.Executor]:
    monkeypatch.delenv("TRAINING_ROLE", raising=False)
    fleet.init()
    executor = fleet.distributed_optimizer(fleet.optimizer.SGD(0.1)).minimize(small_model())
    fleet.init_worker()
    yield executor
    fleet.running.FLEET.abandon()


@pytest.mark.parametrize(
    ("call", "arguments", "settings", "shown"),
    [
        (EXECUTOR.train_from_dataset, (), {}, TRAIN),
        (EXECUTOR.train_from_dataset, (DATASET,), {"epochs": 5}, TRAIN),
        (EXECUTOR.train_from_dataset, (PROGRAM,) * 11, {}, TRAIN),
        (EXECUTOR.infer_from_dataset, (), {"program": PROGRAM}, "infer_from_dataset"),
        (fleet.save_persistables, (), {"executor": EXECUTOR}, SAVE),
        (fleet.save_persistables, (EXECUTOR, "folder", None, 0, 1), {}, SAVE),
    ],
)
def test_call_that_is_of_neither_is_shown(
    call: Any, arguments: tuple[Any, ...], settings: dict[str, Any], shown: str
) -> None:
    with pytest.raises(UsageError, match=f"call .* as in .*{shown}"):
        call(*arguments, **settings)


def test_calls_of_paddle_do_what_ours_do(
    trained: fleet.Executor,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    trained.train_from_dataset(
        PROGRAM, DATASET, None, 0, False, ["auc"], fetch_info=["auc"], print_period=10
    )  # type: ignore[call-arg]
    trained.train_from_dataset(program=PROGRAM, dataset=DATASET, thread=4)  # type: ignore[call-arg]
    metrics = trained.infer_from_dataset(PROGRAM, DATASET)  # type: ignore[call-arg]
    fleet.save_persistables(trained, str(tmp_path / "a"))  # type: ignore[call-arg, arg-type]
    fleet.save_persistables(executor=trained, dirname=tmp_path / "b", main_program=PROGRAM)  # type: ignore[call-arg]
    fleet.save_inference_model(trained, tmp_path / "c", ["user"], [PROGRAM])  # type: ignore[call-arg, arg-type]

    assert metrics.examples == 16
    assert re.fullmatch(r"examples=16 .* loss=0\.\d+ auc=.*\n", capsys.readouterr().out)
    a, b, c = (Checkpoint.open(tmp_path / each) for each in "abc")
    assert a.manifest.batches == b.manifest.batches == 4
    assert c.manifest.kind == "inference"
    told = [each.getMessage() for each in caplog.records if "without effect" in each.getMessage()]
    assert [each.split(" without")[0] for each in told] == [
        "train_from_dataset(): thread",
        "save_persistables(): main_program",
        "save_inference_model(): feeded_var_names, target_vars",
    ]


def test_defaults_of_paddle_are_taken_without_a_word(
    trained: fleet.Executor, caplog: pytest.LogCaptureFixture
) -> None:
    of_paddle: dict[str, Any] = {"program": None, "thread": 0, "debug": False, "print_period": 100}

    trained.train_from_dataset(DATASET, **of_paddle)

    assert "without effect" not in caplog.text


@pytest.mark.parametrize(
    ("where", "name", "message"),
    [
        (fleet.optimizer, "RMSProp", "no 'RMSProp': there are SGD, Adagrad"),
        (fleet.optimizer.lr, "NoamDecay", "no 'NoamDecay': there are StepDecay, Cosine"),
        (
            fleet.QueueDataset(),
            "set_parse_ins_id",
            r"no 'set_parse_ins_id': there are .*set_filelist",
        ),
    ],
)
def test_unknown_name_shows_those_that_exist(where: Any, name: str, message: str) -> None:
    with pytest.raises(AttributeError, match=message):
        getattr(where, name)

"""Calls and names as in Paddle are taken, or show what there is."""

from typing import Any

import pytest

from ctr_ps.protos.errors import UsageError
from ctr_ps.ps_worker import fleet
from ctr_ps.ps_worker.fleet import executor
from ctr_ps.ps_worker.fleet.fleet import Fleet

PROGRAM, DATASET, EXECUTOR = object(), [], fleet.Executor()
TRAIN = r"executor\.train_from_dataset\(dataset, fetch_handler=print"
INFER = r"executor\.infer_from_dataset\(dataset\)"
SAVE = r"fleet\.save_persistables\(dirname\)"
SAVE_TO_INFER = r"fleet\.save_inference_model\(dirname\)"


@pytest.mark.parametrize(
    ("call", "arguments", "settings", "shown"),
    [
        (EXECUTOR.train_from_dataset, (PROGRAM, DATASET), {}, TRAIN),
        (EXECUTOR.train_from_dataset, (PROGRAM,), {"dataset": DATASET}, TRAIN),
        (EXECUTOR.train_from_dataset, (), {"program": PROGRAM, "dataset": DATASET}, TRAIN),
        (EXECUTOR.train_from_dataset, (DATASET,), {"debug": True}, TRAIN),
        (EXECUTOR.train_from_dataset, (DATASET,), {"print_period": 5}, TRAIN),
        (EXECUTOR.infer_from_dataset, (PROGRAM, DATASET), {}, INFER),
        (fleet.save_persistables, (EXECUTOR, "folder"), {}, SAVE),
        (fleet.save_persistables, (), {"executor": EXECUTOR, "dirname": "folder"}, SAVE),
        (fleet.save_inference_model, (EXECUTOR, "folder", ["user"], [PROGRAM]), {}, SAVE_TO_INFER),
    ],
)
def test_call_that_is_otherwise_here_is_shown(
    call: Any, arguments: tuple[Any, ...], settings: dict[str, Any], shown: str
) -> None:
    with pytest.raises(UsageError, match=shown):
        call(*arguments, **settings)


def test_defaults_of_paddle_ask_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "FLEET", Fleet())  # whatever ran before in this process
    of_paddle: dict[str, Any] = {"program": None, "thread": 0, "debug": False, "print_period": 100}

    with pytest.raises(UsageError, match=r"fleet\.init\(\) before training"):
        EXECUTOR.train_from_dataset(DATASET, **of_paddle)


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

"""What worker 0 saves in the middle of a pass, as it is told to end."""

from types import SimpleNamespace
from typing import Any

import pytest

from ctr_ps.ps_worker.run.training_job.checkpoints import JobCheckpoints


def asked_of_saver(
    *, number: int, files: bool, stream: str, is_within: bool, examples: int
) -> list[str]:
    """Returns what pass `number` of a job, with 2 epochs if it has files, asks for after 80 saved rows."""
    asked: list[str] = []
    job = SimpleNamespace(
        train=SimpleNamespace(epochs=2),
        data=SimpleNamespace(stream=stream),
        checkpoint=SimpleNamespace(is_within_epochs=is_within),
    )
    checkpoints: Any = SimpleNamespace(
        _job=job,
        _plan=SimpleNamespace(train_files=["part-0"] * files),
        _run=SimpleNamespace(
            progress=SimpleNamespace(steps=7),
            store=SimpleNamespace(status=lambda: SimpleNamespace(num_examples=examples)),
        ),
        _saved_examples=80,
        _saver=SimpleNamespace(
            save_within=lambda step, _: asked.append(f"step {step}"),
            wait=lambda: asked.append("wait"),
        ),
    )
    each: Any = SimpleNamespace(number=number)
    JobCheckpoints.save_when_told(checkpoints, each)
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
    def asked(examples: int) -> list[str]:
        return asked_of_saver(
            number=number, files=files, stream=stream, is_within=is_within, examples=examples
        )

    assert asked(96) == ["step 7"] * is_saved
    assert asked(80) == ["wait"] * is_saved, "nothing was trained since the last one"

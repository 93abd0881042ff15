"""A worker whose stream has no rows: what it asks servers, and when it hears that others wait for it."""

from types import SimpleNamespace
from typing import Any

import pytest

from ctr_ps.protos.errors import AbortedError
from ctr_ps.ps_worker.run.training_job import training
from ctr_ps.ps_worker.run.training_job.training import Training


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def test_servers_are_asked_seldom_in_a_lull_and_often_while_others_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, asked, awaited = Clock(), list[float](), set[int]()
    monkeypatch.setattr(training, "time", clock)

    def status() -> Any:
        asked.append(clock.now)
        return SimpleNamespace(awaited=awaited)

    run = SimpleNamespace(
        worker=1,
        num_workers=2,
        store=SimpleNamespace(status=status),
        progress=SimpleNamespace(steps=5),
        communicator=SimpleNamespace(let_others_begin=lambda: None),
        require_place=lambda: None,
    )
    plan: Any = SimpleNamespace(job=SimpleNamespace(strategy=SimpleNamespace(is_sync=True)))
    checkpoints: Any = SimpleNamespace(is_due_in_lull=lambda status=None: False)
    none: Any = None
    worker = Training(plan, run, none, none, none, none, checkpoints, none, lambda: False)  # type: ignore[arg-type]

    def idle(seconds: float) -> int:
        """Returns the number of empty batches."""
        found = 0
        for _ in range(round(seconds / 0.05)):
            clock.now += 0.05
            found += worker._on_idle()
        return found

    assert idle(60.0) == 0
    assert len(asked) <= 130, "twice a second"
    awaited.add(1)
    assert idle(0.55) >= 1, "soon"
    assert idle(5.0) == 100, "at once, while others train"
    awaited.clear()
    run.progress.steps += 1
    del asked[:]
    assert idle(0.1) == 0
    assert len(asked) == 2, "after rows of its own"
    idle(60.0)
    del asked[:]
    while not asked:  # the next one is half a second later
        idle(0.05)
    run.progress.steps += 1
    del asked[:]
    assert idle(0.05) == 0
    assert len(asked) == 1, "at once, after a lull"


def test_a_worker_in_a_lull_hears_that_the_job_has_ended() -> None:
    """It would wait for messages for ever: in this mode it asks servers nothing."""

    def require_place() -> None:
        raise AbortedError("worker 0 has ended the job")

    run: Any = SimpleNamespace(
        num_workers=2,
        progress=SimpleNamespace(steps=5),
        communicator=SimpleNamespace(let_others_begin=lambda: None),
        require_place=require_place,
    )
    plan: Any = SimpleNamespace(job=SimpleNamespace(strategy=SimpleNamespace(is_sync=False)))
    checkpoints: Any = SimpleNamespace(is_due_in_lull=lambda status=None: False)
    none: Any = None
    worker = Training(plan, run, none, none, none, none, checkpoints, none, lambda: False)

    with pytest.raises(AbortedError, match="has ended the job"):
        worker._on_idle()

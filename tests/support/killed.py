"""A store that dies with its process: from some push of worker 0 on, every call fails."""

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ctr_ps.protos.futures import WaitingFuture
from ctr_ps.protos.gradients import Gradients
from ctr_ps.protos.store import PushId, Store, push_then_pull
from ctr_ps.ps_worker.job import Job, override_job

_POLL_S = 0.002
_SAVE_LIMIT_S = 30.0


class KilledError(Exception):
    """What a call raises that nobody is left to answer."""


class KilledStore:
    """Forwards calls to a store in this process, until worker 0 has pushed `after_pushes` times.

    A checkpoint whose writing has begun is still written."""

    def __init__(self, store: Store, after_pushes: int) -> None:
        self._store = store
        self._left = after_pushes
        self._lock = threading.Lock()
        self._is_dead = threading.Event()

    def __getattr__(self, name: str) -> Any:
        if name == "confirm_place":  # a save that has begun comes to its end
            return self._store.confirm_place
        if self._is_dead.is_set():
            raise KilledError
        if name == "push_grad":
            return self._push_grad
        if name == "push_pull":  # through this, so that each of its calls dies
            return partial(push_then_pull, self)
        found = getattr(self._store, name)
        return self._mortal(found) if callable(found) else found

    def _push_grad(self, gradients: Gradients, push_id: PushId, **named: Any) -> Any:
        with self._lock:
            self._left -= push_id.worker == 0
            is_last = self._left < 0
        if is_last:
            wait_for_saves(_SAVE_LIMIT_S)  # else a slow disk decides whether a run can be resumed
            self._is_dead.set()
            raise KilledError
        return self._mortal(self._store.push_grad)(gradients, push_id, **named)

    def _mortal(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def mortal(*arguments: Any, **named: Any) -> Any:
            answer = call(*arguments, **named)
            return _Waiting(answer, self._is_dead) if isinstance(answer, WaitingFuture) else answer

        return mortal


def wait_for_saves(limit_s: float) -> None:
    """Waits for the threads of a dead run: in this process they outlive it."""
    until = time.monotonic() + limit_s
    while saves := [each for each in threading.enumerate() if each.name.startswith("save-")]:
        assert time.monotonic() < until, saves
        for thread in saves:
            if thread.is_alive():  # else it is about to begin, and nobody can join it yet
                thread.join(limit_s)


class _Waiting:
    """A pending answer that waits for other workers, or for death."""

    def __init__(self, answer: WaitingFuture[Any], is_dead: threading.Event) -> None:
        self._answer = answer
        self._is_dead = is_dead

    def result(self) -> Any:
        while not self._answer.done():
            if self._is_dead.wait(_POLL_S):
                raise KilledError
        return self._answer.result()


def resumed_job(clicks: Path, folder: Path, *settings: str) -> Job:
    """Returns a small job on the rows in `clicks` that resumes from its checkpoint in `folder`."""
    return override_job(
        {},
        [
            f"data.train={clicks}/train/*",
            f"checkpoint.dir={folder}",
            "checkpoint.resume=true",
            "train.epochs=2",
            "model.hidden=[4]",
            "model.dim=2",
            *settings,
        ],
        source="test",
    )

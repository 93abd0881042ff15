"""Errors between a decision and its answers, as when memory is short: no step waits for ever."""

from collections.abc import Callable, Sequence
from typing import NoReturn

import pytest

from ctr_ps.protos.errors import AbortedError
from ctr_ps.protos.gradients import Gradients
from ctr_ps.protos.store import Version
from ctr_ps.ps_server.coordination.arrivals import Answer
from ctr_ps.ps_server.engine.engine import Engine, EngineSettings
from tests.support.stores import push_id


class AnswerError(Exception):
    """What an answer raises here."""


def push(engine: Engine, sequence: int, *, at: Version | None, worker: int = 0) -> Version:
    return engine.push(Gradients(), push_id(worker, sequence), at).result()


def replace_once(owner: object, name: str, act: Callable[[], Sequence[Answer]]) -> None:
    """Has `act` take the place of the next call of a method."""
    proper = getattr(owner, name)

    def once() -> Sequence[Answer]:
        setattr(owner, name, proper)
        return act()

    setattr(owner, name, once)


def fail_to_poll() -> NoReturn:
    raise AnswerError


def fail_to_answer() -> Sequence[Answer]:
    return [fail_to_poll]


@pytest.mark.parametrize("at", [0, None], ids=["sync", "async"])
def test_push_comes_again_after_the_calls_that_wait_could_not_be_polled(at: int | None) -> None:
    engine = Engine(EngineSettings(wait_limit_s=1.0))
    replace_once(engine.job._calls, "take_ready", fail_to_poll)

    with pytest.raises(AnswerError):
        push(engine, 0, at=at)

    assert push(engine, 0, at=at) == 1
    assert push(engine, 1, at=1) == 2, "the mode may change"


def test_step_that_was_taken_ends_the_job_if_the_calls_before_cannot_be_answered() -> None:
    engine = Engine(EngineSettings(wait_limit_s=1.0))
    replace_once(engine.job._calls, "take_ready", fail_to_answer)

    with pytest.raises(AnswerError):
        push(engine, 0, at=0)

    with pytest.raises(AbortedError, match="step 0 could not be applied"):
        push(engine, 0, at=0)


def test_next_step_that_was_taken_ends_the_job_if_the_calls_before_cannot_be_answered() -> None:
    engine = Engine(EngineSettings(num_workers=2, wait_limit_s=1.0))
    job, apply = engine.job, engine.parameters.apply

    def apply_while_the_next_comes(*step: object, **settings: object) -> None:
        engine.parameters.apply = apply
        for worker in (0, 1):
            job.pushes.enter_part(Gradients(), push_id(worker, 1), 1)
        replace_once(job._calls, "take_ready", fail_to_answer)

    engine.parameters.apply = apply_while_the_next_comes
    job.pushes.enter_part(Gradients(), push_id(0, 0), 0)

    with pytest.raises(AnswerError):
        push(engine, 0, at=0, worker=1)

    assert "step 1 could not be applied" in job.failure

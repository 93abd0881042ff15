"""When it is told that workers are waited for."""

from ctr_ps.protos.role import Members
from ctr_ps.ps_server.coordination.missing_workers import MissingWorkers

WORKERS = Members(4)


def told(missing: MissingWorkers, seconds: int, place: str) -> list[str]:
    return [line for _ in range(seconds) for line in missing.pass_time(1.0, {place: [1, 3]})]


def test_wait_is_told_after_five_seconds_and_then_every_thirty() -> None:
    lines = told(MissingWorkers(WORKERS), 70, "barrier start")

    assert lines == [
        f"waiting for workers [1, 3] at=barrier start waited_s={waited_s}"
        for waited_s in (5, 35, 65)
    ]


def test_short_waits_are_not_told() -> None:
    missing = MissingWorkers(WORKERS)

    assert [line for step in range(20) for line in told(missing, 4, f"step {step}")] == []


def test_many_waits_are_told_once_in_a_while() -> None:
    """As those of each step, for a worker that is always slow."""
    missing = MissingWorkers(WORKERS)

    lines = [line for step in range(10) for line in told(missing, 6, f"step {step}")]

    assert lines == [f"waiting for workers [1, 3] at=step {step} waited_s=5" for step in (0, 5)]

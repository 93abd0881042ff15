"""What a process may have open."""

import resource

import pytest

from protos.runtime.environment import MAX_CONNECTIONS, RESERVED_DESCRIPTORS, connection_limit


@pytest.mark.parametrize(
    ("soft", "hard", "connections"),
    [
        (256, 1024, 1024 - RESERVED_DESCRIPTORS),
        (256, 256, 128),
        (1024, 10**6, MAX_CONNECTIONS),
        (1024, resource.RLIM_INFINITY, MAX_CONNECTIONS),
    ],
)
def test_connections_leave_descriptors_of_the_hard_limit_free(
    soft: int, hard: int, connections: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = soft, hard
    raised = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: raised.append(both))

    assert connection_limit() == connections
    assert raised == [(hard, hard)]


def test_soft_limit_counts_where_it_cannot_be_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)

    assert connection_limit() == 1024 - RESERVED_DESCRIPTORS

"""Versions of real servers, as lines."""

from ctr_ps.ps_worker.extras.watching.servers import Servers
from ctr_ps.ps_worker.extras.watching.versions import LOOK_S, versions_of, watch
from tests.support.cluster import cluster
from tests.support.processes import free_port

ANSWER_S = 20.0


def test_versions_are_those_of_all_servers_and_none_of_one_that_is_away():
    with cluster(num_servers=2) as servers, free_port() as port:
        endpoints = [*servers.endpoints, f"127.0.0.1:{port}"]
        servers.client().resume(7, {})

        with Servers(endpoints) as watched:
            assert versions_of(watched, ANSWER_S) == [7, 7, None]


def test_watching_ends_when_nobody_reads():
    lines, pauses = [], []

    def write(line):
        if len(lines) == 2:
            raise BrokenPipeError
        lines.append(line)

    with Servers([]) as servers:
        watch(servers, write, pauses.append)

    assert lines == ["[]\n", "[]\n"]
    assert pauses == [LOOK_S, LOOK_S]

"""Processes of a cluster on this machine; test_launch.py has their ends, by whole launches."""

import sys
from pathlib import Path

from ctr_ps.deploy.cluster import Cluster, Events, LocalProcess, ProcessExited
from ctr_ps.deploy.plan import ProcessSpec
from ctr_ps.deploy.supervisor import Exited
from tests.support.launches import python


def test_exit_of_an_earlier_process_of_a_name_is_not_that_of_the_new_one(tmp_path: Path) -> None:
    """One that did not even end by SIGKILL within the grace may end when another has its place."""
    events = Events()
    earlier = LocalProcess([sys.executable, "-c", ""])
    returncode = earlier.wait()
    with Cluster(tmp_path, events) as cluster:
        events.put(ProcessExited("pserver.0", earlier, returncode))
        cluster.start(ProcessSpec(name="pserver.0", command=python("raise SystemExit(6)")))

        assert cluster.next_event() == Exited("pserver.0", 6)


def test_processes_of_a_cluster_have_a_token_of_their_own(tmp_path: Path) -> None:
    printing = python("import os; print(os.environ['CTR_PS_TOKEN'])")
    tokens = []
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        with Cluster(folder, Events()) as cluster:
            for name in ("pserver.0", "trainer.0"):
                cluster.start(ProcessSpec(name=name, command=printing))
                assert cluster.next_event() == Exited(name, 0)
        tokens.append({path.read_text() for path in folder.iterdir()})

    assert [len(of_cluster) for of_cluster in tokens] == [1, 1]
    assert tokens[0] != tokens[1]

"""Processes of a cluster on this machine; test_launch.py has their ends, by whole launches."""

import subprocess
import sys
from pathlib import Path

from deploy.cluster import Events, LocalCluster, ProcessExited
from deploy.plan import ProcessSpec
from deploy.supervisor import Exited
from tests.support.launches import python


def test_exit_of_an_earlier_process_of_a_name_is_not_that_of_the_new_one(tmp_path: Path) -> None:
    """One that did not even end by SIGKILL within the grace may end when another has its place."""
    events = Events()
    earlier = subprocess.Popen([sys.executable, "-c", ""])
    earlier.wait()
    with LocalCluster(tmp_path, events) as cluster:
        events.put(ProcessExited("pserver.0", earlier))
        cluster.start(ProcessSpec(name="pserver.0", command=python("raise SystemExit(6)")))

        assert cluster.next_event() == Exited("pserver.0", 6)

"""Progress of a cluster: no server has less."""

from protos.store import WorkerProgress, merge_progress


def progress(step: int, incarnation: int = 1) -> WorkerProgress:
    return WorkerProgress(incarnation=incarnation, sequence=0, step=step, position=f"after {step}")


def test_worker_goes_on_where_the_server_with_the_least_is() -> None:
    parts = [{0: progress(7), 1: progress(3)}, {0: progress(6), 1: progress(4)}]

    assert merge_progress(parts) == {0: progress(6), 1: progress(3)}


def test_worker_that_a_server_knows_nothing_of_has_no_progress() -> None:
    assert merge_progress([{0: progress(7), 1: progress(3)}, {0: progress(7)}]) == {0: progress(7)}


def test_steps_compare_over_incarnations() -> None:
    parts = [{0: progress(8, incarnation=2)}, {0: progress(7, incarnation=9)}]

    assert merge_progress(parts) == {0: progress(7, incarnation=9)}


def test_no_servers_know_nothing() -> None:
    assert merge_progress([]) == {}

"""The model of a step's cost, with constants that make its sums plain."""

import pytest

from benchmarks.bench_cost import Constants

# The worker takes 1 + 2 S, the servers together 3 + 4 S, of which 2 once a step; alone it lasts 6 + S.
COSTS = Constants(
    batch_size=100,
    worker=(1.0, 2.0),
    servers=(3.0, 4.0),
    elapsed=(6.0, 1.0),
    dense_s=2.0,
    in_process_s=5.0,
    num_bytes=1000.0,
)


@pytest.mark.parametrize(
    ("workers", "servers", "of_workers", "of_servers"),
    [(1, 1, 3.0, 7.0), (1, 2, 5.0, 11.0), (2, 2, 10.0, 20.0), (3, 1, 9.0, 17.0)],
)
def test_all_but_dense_parameters_is_once_a_worker(
    workers: int, servers: int, of_workers: float, of_servers: float
) -> None:
    assert COSTS.costs(workers, servers) == (of_workers, of_servers)


@pytest.mark.parametrize(
    ("workers", "servers", "cores", "step_s"),
    [
        (1, 1, 1, 1.5 * 10.0),
        (1, 1, 8, 7.0),  # as long as it was measured
        (1, 2, 8, 8.0),
        (2, 2, 2, 1.5 * 30.0 / 2),  # the cores are the limit
        (2, 2, 8, 8.0 + 9.0 / 2),  # what the second worker brings, at two servers
    ],
)
def test_step_on_one_machine_is_as_long_as_its_chain_or_its_cores(
    workers: int, servers: int, cores: int, step_s: float
) -> None:
    found = COSTS.on_one_machine(workers, servers, cores=cores, busy=1.5)

    assert found == pytest.approx(workers * 100 / step_s)


@pytest.mark.parametrize(
    ("workers", "servers", "transfers"),
    [(1, 1, 1.0), (1, 2, 1.0), (2, 2, 1.0), (4, 2, 2.0)],  # the servers' links carry more
)
def test_step_on_many_machines_waits_for_the_network(
    workers: int, servers: int, transfers: float
) -> None:
    step_s = COSTS.chain_s(workers, servers) + 0.5 + 2 * 1000.0 * transfers / 100.0

    speed = COSTS.on_many(workers, servers, rate=100.0, rtt_s=0.5)

    assert speed == pytest.approx(workers * 100 / step_s)

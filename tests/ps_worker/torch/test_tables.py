"""Tables in process and on clusters: modes, workers, settings, what is open and what is closed."""

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from ctr_ps.protos.errors import AbortedError, JobError, RoleError, UsageError  # noqa: E402
from ctr_ps.ps_worker.torch import Embedding, PushOptimizer, Tables, open_tables  # noqa: E402
from tests.support.torch_loop import (  # noqa: E402
    Net,
    joined_batch,
    net_batches,
    on_cluster,
    rows_of,
)

SGD = {"name": "sgd", "learning_rate": 0.5}
ADAGRAD = {"name": "adagrad", "learning_rate": 0.1}


def trained(num_servers: int, optimizer: object) -> list[Any]:
    """Returns the rows after 6 synchronous steps of two workers with the same dense part."""
    ends: dict[int, list[Any]] = {}
    nets = [Net(optimizer), Net(optimizer)]  # here, as workers share the generator

    def work(tables: Tables) -> None:
        net = nets[tables.worker]
        tables.attach(net)
        rows = PushOptimizer(tables)
        for batch in net_batches(6, seed=tables.worker):
            net.loss(batch).backward()
            rows.step()
        tables.barrier()
        ends[tables.worker] = rows_of(net)

    on_cluster(work, num_servers=num_servers)
    for first, second in zip(ends[0], ends[1], strict=True):
        assert torch.equal(first, second)
    return ends[0]


def test_two_workers_learn_in_sync_what_one_learns_of_batches_twice_as_large() -> None:
    with open_tables() as tables:
        net = Net(SGD)
        tables.attach(net)
        rows = PushOptimizer(tables)
        for first, second in zip(net_batches(6, seed=0), net_batches(6, seed=1), strict=True):
            net.loss(joined_batch(first, second)).backward()
            rows.step()
        expected = rows_of(net)

    for ours, theirs in zip(trained(1, SGD), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_rows_in_sync_do_not_depend_on_the_number_of_servers() -> None:
    for first, second in zip(trained(1, ADAGRAD), trained(3, ADAGRAD), strict=True):
        assert torch.equal(first, second)


def test_step_without_gradients_is_a_part_of_the_mean() -> None:
    """As a rank without gradients is in DDP."""

    def work(tables: Tables) -> None:
        embedding = Embedding(1, table="items", init_range=0.0, optimizer=SGD)
        tables.attach(embedding)
        if tables.worker == 0:
            embedding(torch.tensor([5])).sum().backward()
        PushOptimizer(tables).step()

        assert embedding(torch.tensor([5])).item() == -0.25

    on_cluster(work)


@pytest.mark.parametrize(("mode", "steps", "sum_of_steps"), [("async", 3, 7), ("sync", 1, 2)])
def test_workers_in_async_add_what_they_push_and_in_sync_a_worker_without_data_leaves_the_steps(
    mode: str, steps: int, sum_of_steps: int
) -> None:
    def work(tables: Tables) -> None:
        embedding = Embedding(1, table="items", init_range=0.0, optimizer=SGD)
        tables.attach(embedding)
        for _ in range(steps + tables.worker):
            embedding(torch.tensor([5])).sum().backward()
            PushOptimizer(tables).step()
        tables.barrier()

        assert embedding(torch.tensor([5])).item() == -0.5 * sum_of_steps

    on_cluster(work, mode=mode)


def test_error_of_a_worker_ends_the_job_for_the_others() -> None:
    def work(tables: Tables) -> None:
        if tables.worker == 1:
            raise OSError("the disk is gone")
        with pytest.raises(AbortedError) as error:
            tables.barrier()
        told.append(str(error.value))

    told: list[str] = []
    with pytest.raises(OSError, match="the disk is gone"):
        on_cluster(work)
    assert len(told) == 1  # what failed in the other thread is not raised here
    assert "worker 1 aborted the job: OSError: the disk" in told[0]


def test_workers_that_do_not_agree_are_refused() -> None:
    modes: list[Any] = ["sync", "async"]
    with pytest.raises((JobError, AbortedError), match=r"strategy\.mode"):
        on_cluster(lambda _: None, modes=modes)


def test_tables_that_are_closed_refuse_look_ups_and_steps() -> None:
    with open_tables() as tables:
        embedding = Embedding(2, table="items")
        tables.attach(embedding)

    calls: list[Callable[[], object]] = [
        lambda: embedding(torch.tensor([1])),
        PushOptimizer(tables).step,
        tables.barrier,
        lambda: tables.save("rows"),
        lambda: tables.load("rows"),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="the tables are closed"):
            call()


def test_copy_of_a_module_looks_up_in_the_same_tables() -> None:
    with open_tables() as tables:
        embedding = Embedding(2, table="items", init_range=0.5)
        tables.attach(embedding)

        twin = copy.deepcopy(embedding)

        assert torch.equal(twin(torch.tensor([1])), embedding(torch.tensor([1])))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"worker": 1, "num_workers": 2}, RoleError, "worker 1 of 2 has no servers"),
        ({"servers": ["a:1"], "worker": 1}, RoleError, "worker is 1, expected 0 to 0"),
        ({"servers": []}, RoleError, "servers has no server"),
        ({"mode": "geo"}, JobError, "mode is 'geo', expected 'sync' or 'async'"),
        ({"cluster": {"on_worker_loss": "wait"}}, JobError, "on_worker_loss is 'wait'"),
        ({"cluster": {"lease": 3}}, JobError, "cluster.lease"),
        ({"optimizer": 3}, JobError, "optimizer.sparse"),
        ({"max_pending_mb": 0}, UsageError, "max_pending_mb is 0, expected at least 1"),
    ],
)
def test_impossible_settings_are_refused(options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message), open_tables(**options):
        pass


def test_server_opens_no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "TRAINING_ROLE": "PSERVER",
        "PADDLE_PSERVERS_IP_PORT_LIST": "127.0.0.1:1",
        "PADDLE_TRAINERS_NUM": "1",
        "POD_IP": "127.0.0.1",
        "PADDLE_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(RoleError, match="only workers open tables"), open_tables():
        pass


def test_module_without_embeddings_is_not_attached() -> None:
    with open_tables() as tables, pytest.raises(UsageError, match="Linear has no embedding"):
        tables.attach(torch.nn.Linear(1, 1))

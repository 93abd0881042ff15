"""Who a process is, and in which order it may do what; without a cluster, or without reaching it."""

import re
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from ctr_ps.ctr_model.schema import Schema
from ctr_ps.protos.errors import JobError, RoleError, UsageError
from ctr_ps.ps_server.settings import ServerSettings
from ctr_ps.ps_worker.data.files.file_split import FileSplit
from ctr_ps.ps_worker.data.queue_dataset import QueueDataset
from ctr_ps.ps_worker.fleet.fleet import Fleet
from ctr_ps.ps_worker.fleet.task import Task
from ctr_ps.ps_worker.fleet.words.roles import Role, UserDefinedRoleMaker
from tests.support.cluster import cluster
from tests.support.training import job, small_model

ENDPOINTS = ["127.0.0.1:1", "127.0.0.1:2"]
TASK = Task(model=small_model(), job=job("sync"))


def role_maker(role: Role, index: int = 0) -> UserDefinedRoleMaker:
    return UserDefinedRoleMaker(
        current_id=index, role=role, worker_num=3, server_endpoints=ENDPOINTS
    )


@pytest.fixture(autouse=True)
def _no_role(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINING_ROLE", raising=False)


@pytest.fixture
def local() -> Fleet:
    fleet = Fleet()
    fleet.init()
    return fleet


@pytest.fixture
def worker() -> Fleet:
    fleet = Fleet()
    fleet.init(role_maker(Role.WORKER, 1))
    return fleet


@pytest.fixture
def server() -> Fleet:
    fleet = Fleet()
    fleet.init(role_maker(Role.SERVER, 1))
    return fleet


def test_process_without_a_role_is_the_only_worker(local: Fleet) -> None:
    assert (local.is_worker(), local.is_first_worker(), local.is_server()) == (True, True, False)
    assert (local.worker_index(), local.worker_num()) == (0, 1)
    assert (local.server_num(), local.server_endpoints()) == (0, [])


def test_worker_knows_its_place(worker: Fleet) -> None:
    roles = [worker.is_worker(), worker.is_first_worker(), worker.is_server()]
    assert roles == [True, False, False]
    assert (worker.worker_index(), worker.worker_num()) == (1, 3)
    assert (worker.server_num(), worker.server_endpoints()) == (2, ENDPOINTS)
    assert worker.server_endpoints(to_string=True) == ",".join(ENDPOINTS)


def test_server_knows_its_place(server: Fleet) -> None:
    roles = [server.is_worker(), server.is_first_worker(), server.is_server()]
    assert roles == [False, False, True]
    assert (server.server_index(), server.worker_num()) == (1, 3)


def test_role_is_told_to_who_asked_for_it() -> None:
    told = []

    Fleet(on_role=lambda fleet: told.append(fleet.server_num())).init(role_maker(Role.WORKER))

    assert told == [2]


def test_files_are_split_over_workers(worker: Fleet, tmp_path) -> None:
    files = [tmp_path / str(number) for number in range(3)]
    for file in files:
        file.write_bytes(b"x")

    assert worker.split_files(files) == [str(files[1])]


def test_a_run_without_files_is_refused_but_one_worker_of_several_may_have_none(
    worker: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="files is empty, so there is nothing to train on"):
        worker.split_files([])
    with pytest.raises(UsageError, match="files is empty"):
        worker.file_splits([], Schema.numbered(1, 1))
    alone = Fleet()
    run = SimpleNamespace(num_workers=1)
    monkeypatch.setattr(alone, "run_of", lambda _: run)
    dataset = QueueDataset(Schema.numbered(1, 1), 4)
    dataset.set_filelist([])

    with pytest.raises(UsageError, match="got no files, so there is nothing to train on"):
        alone.trains_on(dataset)

    run.num_workers, alone._has_agreed = 2, True
    assert alone.trains_on(dataset) is run


def test_file_is_cut_for_more_workers_than_files(worker: Fleet, tmp_path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(b"x" * 10)
    schema = Schema.numbered(1, 1)

    assert worker.file_splits([path], schema) == [FileSplit(str(path), 3, 6)]
    with pytest.raises(UsageError, match="unknown format 'critio'"):
        worker.file_splits([path], schema, format="critio")


@pytest.mark.parametrize(
    ("differs", "told"),
    [
        ("files", r"files 1 = 1 file, .* has files 1 = 2 files, "),
        ("batch_size", r"dataset\.batch_size = 8 \(worker 0 has dataset\.batch_size = 4\)"),
        ("thread_num", r"dataset\.thread_num = 2 "),
        (
            "command",
            r"dataset\.format = cat \| None keys \(worker 0 has dataset\.format = nothing\)",
        ),
        ("nothing", None),
    ],
)
def test_workers_agree_on_what_they_train_on_first(
    differs: str, told: str | None, tmp_path: Path
) -> None:
    files = [tmp_path / "part-0", tmp_path / "part-1"]
    for file in files:
        file.write_text("0\t1\tx\n")

    def dataset_of(fleet: Fleet, *, differs: str = "nothing") -> QueueDataset:
        dataset = QueueDataset(
            Schema.numbered(1, 1),
            8 if differs == "batch_size" else 4,
            2 if differs == "thread_num" else 1,
        )
        if differs == "command":
            dataset.set_pipe_command("cat")
        dataset.set_filelist(fleet.split_files(files[: 1 if differs == "files" else 2]))
        return dataset

    with cluster(num_servers=1, num_workers=2) as servers, ExitStack() as stack:
        fleets = [Fleet(), Fleet()]
        for index, fleet in enumerate(fleets):
            fleet.init(
                UserDefinedRoleMaker(
                    current_id=index,
                    role=Role.WORKER,
                    worker_num=2,
                    server_endpoints=servers.endpoints,
                )
            )
            fleet.minimize(TASK)
            fleet.init_worker()
            stack.callback(fleet.abandon)
        fleets[0].trains_on(dataset_of(fleets[0]))
        other = dataset_of(fleets[1], differs=differs)

        if told is None:
            fleets[1].trains_on(other)
        else:
            with pytest.raises(JobError, match=told):
                fleets[1].trains_on(other)
        fleets[0].trains_on(dataset_of(fleets[0], differs="batch_size"))  # the second


@pytest.mark.parametrize(
    "call",
    ["is_server", "is_first_worker", "worker_num", "init_server", "init_worker", "stop_worker"],
)
def test_nothing_comes_before_init(call: str) -> None:
    with pytest.raises(UsageError, match=rf"^call fleet\.init\(\) before fleet\.{call}\(\)$"):
        getattr(Fleet(), call)()


def test_minimize_comes_after_init() -> None:
    with pytest.raises(UsageError, match=r"^call fleet\.init\(\) before minimize\(\)"):
        Fleet().minimize(TASK)


def test_worker_needs_something_to_train(local: Fleet) -> None:
    missing = re.escape(
        "fleet.distributed_optimizer(...).minimize(model) before fleet.init_worker()"
    )
    with pytest.raises(UsageError, match=missing):
        local.init_worker()


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ("barrier_worker", ()),
        ("save_persistables", ("model",)),
        ("save_inference_model", ("model",)),
        ("load_model", ("model",)),
        ("shrink", (0.1,)),
        ("stop_worker", ()),
    ],
)
def test_missing_init_worker_is_named(local: Fleet, call: str, arguments: tuple) -> None:
    local.minimize(TASK)

    with pytest.raises(
        UsageError, match=rf"^call fleet\.init_worker\(\) before fleet\.{call}\(\)$"
    ):
        getattr(local, call)(*arguments)
    with pytest.raises(UsageError, match=r"^call fleet\.init_worker\(\) before training$"):
        local.run_of("training")


def test_run_is_over_after_stop_worker(local: Fleet) -> None:
    local.minimize(TASK)
    local.init_worker()
    assert local.place is not None
    local.stop_worker()
    assert local.place is None

    with pytest.raises(UsageError, match=r"stop_worker.* was called: call fleet.barrier_worker"):
        local.barrier_worker()
    with pytest.raises(UsageError, match="call it only once"):
        local.init_worker()
    with pytest.raises(UsageError, match=r"call minimize.* before"):
        local.minimize(TASK)


def test_another_run_may_begin_when_one_is_over(local: Fleet) -> None:
    for _ in range(2):
        local.init()
        local.minimize(TASK)
        local.init_worker()
        with pytest.raises(UsageError, match=r"^call fleet\.stop_worker\(\) before another"):
            local.init()
        with pytest.raises(UsageError, match="call it only once"):
            local.init_worker()
        local.stop_worker()


def test_servers_calls_are_refused_on_workers(worker: Fleet, local: Fleet) -> None:
    for call in ("init_server", "run_server", "server_index"):
        with pytest.raises(RoleError, match=f"{call}.* for servers, but this process is worker 1"):
            getattr(worker, call)()
        with pytest.raises(RoleError, match="is a worker without servers"):
            getattr(local, call)()


def test_workers_calls_are_refused_on_servers(server: Fleet) -> None:
    for call in ("init_worker", "worker_index", "barrier_worker", "stop_worker"):
        with pytest.raises(RoleError, match=f"{call}.* for workers, but this process is server 1"):
            getattr(server, call)()


def test_run_server_needs_init_server(server: Fleet) -> None:
    with pytest.raises(UsageError, match=r"fleet\.init_server\(\) before fleet\.run_server"):
        server.run_server()


def test_server_serves_as_it_is_told(server: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr("ctr_ps.ps_worker.fleet.fleet.configure_logs", lambda: None)
    monkeypatch.setattr("ctr_ps.ps_server.rpc.run.run_server", lambda *call: told.append(call))
    role = role_maker(Role.SERVER, 1)
    server.init(role, wait_timeout_s=7.0)
    server.init_server("model")
    assert not server.has_served

    server.run_server()
    roots = [Path("a"), "s3://b"]
    server.run_server(
        wait_limit_s=8.0,
        bind="::",
        stay=True,
        idle_limit_s=9.0,
        memory_limit=2**30,
        checkpoint_roots=roots,
    )

    of_init = ServerSettings(load="model", wait_limit_s=7.0)
    own = ServerSettings(
        load="model",
        bind="::",
        stay=True,
        idle_limit_s=9.0,
        wait_limit_s=8.0,
        memory_limit=2**30,
        checkpoint_roots=("a", "s3://b"),
    )
    assert told == [(role.role(), of_init), (role.role(), own)]
    assert server.has_served


def test_what_one_does_for_all_is_refused_on_the_others(worker: Fleet) -> None:
    calls = ("save_persistables", "save_inference_model", "load_model")
    for call, argument in (*((call, "m") for call in calls), ("shrink", 0.1)):
        with pytest.raises(RoleError, match=f"{call}.* for worker 0, but this process is worker 1"):
            getattr(worker, call)(argument)


def test_limits_are_a_jobs_cluster(local: Fleet) -> None:
    local.init(wait_timeout_s=5.0)

    assert local.limits == {
        "connect_timeout_s": 120.0,
        "rpc_timeout_s": 60.0,
        "wait_timeout_s": 5.0,
    }


def test_other_model_than_the_minimized_is_refused(local: Fleet) -> None:
    with pytest.raises(UsageError, match=r"not that of minimize\(\): call fleet"):
        local.require_task(TASK.model)
    local.minimize(TASK)
    local.require_task(TASK.model)

    with pytest.raises(UsageError, match=r"not that of minimize\(\): call fleet"):
        local.require_task(small_model())


def test_abandoned_run_is_over(local: Fleet) -> None:
    local.abandon()
    local.minimize(TASK)
    local.init_worker()

    local.abandon()

    assert local.place is None


def test_endpoints_of_workers_are_refused_with_the_ways_to_them() -> None:
    with pytest.raises(UsageError, match=r"fleet\.util\.all_reduce\(\)"):
        Fleet().worker_endpoints()

"""What holds for all tests: which are slow, how coroutines run, and that nothing is left behind."""

import asyncio
import gc
import inspect
import multiprocessing
import os
import threading
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.needs import IN_CI
from tests.support.streams import Broker, kafka_broker, redis_server

# Kernels compile in the first example; a deadline would blame that example.
settings.register_profile("project", deadline=None, max_examples=100 if IN_CI else 40)
settings.load_profile("project")

JOIN_S = 10.0
ASYNC_S = 60.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", default=IN_CI, help="run slow tests too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="slow; run with --slow"))
        return
    # Processes share out whole files: those that take long come first, so that none is left at the end.
    slow = Counter(item.path for item in items if "slow" in item.keywords)
    items.sort(key=lambda item: slow[item.path], reverse=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects no garbage while tests are found, and later none of their million objects, which all stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a test that is a coroutine on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**arguments), ASYNC_S))
    return True


@pytest.fixture(autouse=True, scope="session")
def nothing_is_left_behind() -> Iterator[None]:
    """No thread that keeps a process alive, and no child process, outlives the tests."""
    yield
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join(JOIN_S)
            assert not thread.is_alive(), f"{thread.name} still runs"
    assert not multiprocessing.active_children()
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    if children.exists():
        assert not children.read_text().split(), "a child process still runs"


@pytest.fixture(autouse=True, scope="session")
def disks_are_waited_for_in_ci() -> Iterator[None]:
    """By this process. Others see at once what was written, and no test stops the machine."""
    with pytest.MonkeyPatch.context() as patch:
        if not IN_CI:
            for sync in ("fsync", "fdatasync"):
                patch.setattr(os, sync, lambda _: None)
        yield


def num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir()) if Path("/proc/self/fd").exists() else 0


@pytest.fixture(autouse=True, scope="module")
def garbage_is_collected() -> Iterator[None]:
    """What a test leaves open is reported in its own file, not in one that runs later.

    Only where descriptors have become more: the collector takes a tenth of a second.
    """
    before = num_descriptors()
    yield
    if num_descriptors() > before:
        gc.collect()


@pytest.fixture(scope="session")
def s3() -> Iterator[dict[str, str]]:
    """An S3 server with one bucket; the variables that point processes at it."""
    from tests.support.s3 import s3_server  # late: a second of imports that few tests need

    with s3_server() as environment:
        yield environment


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    """Kafka's mock brokers, without topics."""
    with kafka_broker() as found:
        yield found


@pytest.fixture(scope="module")
def redis_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a Redis server without keys."""
    with redis_server(tmp_path_factory.mktemp("redis")) as found:
        yield found


@pytest.fixture
def past_the_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asynchronous training in this process merges, and reads ahead, from its first batch on."""
    monkeypatch.setattr("ctr_ps.ps_worker.communicators.asynchronous.BATCHES_IN_STEP", 0)


@pytest.fixture(scope="session")
def criteo_sample() -> Path:
    """The folder of real rows beside the project: CTR_SAMPLE_DIR."""
    folder = os.environ.get("CTR_SAMPLE_DIR")
    if folder is None and not IN_CI:
        pytest.skip("CTR_SAMPLE_DIR is not set: no real rows to train on")
    assert folder is not None, "CI=true needs CTR_SAMPLE_DIR"
    assert (Path(folder) / "part-5.tsv.gz").exists(), f"{folder} has no part-5.tsv.gz"
    return Path(folder)

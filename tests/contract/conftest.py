"""The stores that the suite runs over: in process, a client of one server (gRPC) and of three (streams)."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from ctr_ps.protos.limits import CHUNK_BYTES
from ctr_ps.protos.store import Store
from tests.support.cluster import cluster
from tests.support.stores import OpenJob, declare, in_process, joined


@pytest.fixture(params=[0, 1, 3], ids=["in-process", "one-server-grpc", "three-servers-stream"])
def num_servers(request) -> int:
    return request.param


@pytest.fixture
def open_job(num_servers) -> Iterator[OpenJob]:
    """Returns the stores of a job's workers, with tables and dense blocks declared."""
    with ExitStack() as stack:

        def open_job(
            num_workers=1, wait_limit_s=10.0, chunk_bytes=CHUNK_BYTES, **settings
        ) -> list[Store]:
            settings["wait_limit_s"] = wait_limit_s
            if num_servers == 0:
                return [joined(in_process(num_workers=num_workers, **settings))] * num_workers
            servers = stack.enter_context(
                cluster(num_servers=num_servers, num_workers=num_workers, **settings)
            )
            clients = [
                servers.client(chunk_bytes=chunk_bytes, stream=num_servers > 1)
                for _ in range(num_workers)
            ]
            for client in clients:
                declare(client)
            return clients

        yield open_job


@pytest.fixture
def store(open_job) -> Store:
    return open_job()[0]

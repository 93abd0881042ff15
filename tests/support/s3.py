"""An S3 server in this process, and a remote file system whose renames are not atomic."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from moto.server import ThreadedMotoServer

BUCKET = "models"
"""Is there; no other is."""


@contextmanager
def s3_server() -> Iterator[dict[str, str]]:
    """Runs an S3 server and points this process at it; yields the variables for others."""
    log = logging.getLogger("werkzeug")
    level = log.level
    log.setLevel(logging.ERROR)  # and not a line for each request
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        environment = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("AWS_")]:
                patch.delenv(name)
            for name, value in environment.items():
                patch.setenv(name, value)
            fsspec.filesystem("s3").mkdir(BUCKET)
            yield environment
    finally:
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        server.stop()
        log.setLevel(level)


class RenamingFileSystem(MemoryFileSystem):
    """A file system whose rename first removes the target, as HDFS does."""

    protocol = "renaming"
    store: dict[str, Any] = {}  # noqa: RUF012 (as its base has it)
    pseudo_dirs = [""]  # noqa: RUF012

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        if self.exists(path2):
            self.rm_file(path2)
        self.rename(path1, path2)

    def rename(self, path1: str, path2: str) -> None:
        self.store[self._strip_protocol(path2)] = self.store.pop(self._strip_protocol(path1))


@cache
def register_renaming() -> None:
    """Makes `renaming://` known to fsspec."""
    fsspec.register_implementation("renaming", RenamingFileSystem)

"""Servers and a client of theirs that was written from the .proto files alone."""

import json
import math
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from tests.reference import foreign_client
from tests.support.processes import (
    LIMIT_S,
    clean_environment,
    environment_of,
    free_port,
    server_process,
)

PROTOS = Path(__file__).parents[2] / "protos" / "v1"


def expected_weights() -> dict[str, float]:
    """Returns the weights of the same training in Python, by key."""
    rows = foreign_client.examples()
    weights = {key: 0.0 for keys, _ in rows for key in keys}
    for _ in range(foreign_client.PASSES):
        for start in range(0, len(rows), foreign_client.BATCH):
            batch = rows[start : start + foreign_client.BATCH]
            errors = [
                1 / (1 + math.exp(-sum(weights[key] for key in keys))) - label
                for keys, label in batch
            ]
            for (keys, _), error in zip(batch, errors, strict=True):
                for key in keys:
                    weights[key] -= foreign_client.RATE * error / len(batch)
    return {str(key): weight for key, weight in weights.items()}


def generated(folder: Path) -> Path:
    """Generates the code of the .proto files in a folder that has nothing else; returns the client there."""
    package = folder / "ctr_ps" / "protos" / "v1"
    package.mkdir(parents=True)
    protos = [shutil.copy(path, package) for path in PROTOS.glob("*.proto")]
    for each in (package, package.parent, package.parent.parent):
        (each / "__init__.py").touch()
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", "--python_out=."]
    names = [str(Path(path).relative_to(folder)) for path in protos]
    subprocess.run([*command, *names], cwd=folder, check=True, timeout=LIMIT_S)
    return Path(shutil.copy(foreign_client.__file__, folder))


def test_client_of_the_protos_alone_trains_a_table(tmp_path: Path) -> None:
    client = generated(tmp_path / "client")
    with free_port() as first, free_port() as second:
        ports = [first, second]
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                server_process(environment_of(ports, index), tmp_path / f"server-{index}.log")
            )
            for index in range(2)
        ]
        endpoints = ",".join(f"127.0.0.1:{port}" for port in ports)
        done = subprocess.run(
            [sys.executable, client, endpoints],
            check=False,
            cwd=client.parent,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, done.stderr
        assert [server.wait() for server in servers] == [0, 0]

    found = json.loads(done.stdout)
    assert found["files"]
    assert all(Path(each).is_relative_to(client.parent) for each in found["files"])
    expected = expected_weights()
    assert found["weights"].keys() == expected.keys()
    for key, weight in expected.items():
        assert math.isclose(found["weights"][key], weight, rel_tol=1e-4, abs_tol=1e-5)
    assert found["losses"][-1] < 0.9 * found["losses"][0]

"""The example of a PyTorch loop: alone, and as processes with DistributedDataParallel and a server."""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'ctr-ps[torch]'")

from ctr_ps.ps_server.checkpoint.reader import Checkpoint  # noqa: E402
from ctr_ps.ps_server.checkpoint.saved_model import SavedModel  # noqa: E402
from tests.support.commands import ROOT, run  # noqa: E402
from tests.support.processes import free_port  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = ROOT / "examples/torch_ddp.py"
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def losses_of(output: str) -> list[float]:
    lines = [line.split() for line in output.splitlines() if line.startswith("epoch")]
    return [float(words[-1]) for words in lines]


def dense_of(folder: Path) -> dict[str, Any]:
    file = BytesIO(Checkpoint.open(folder).attachment("state.pt"))
    state = torch.load(file, weights_only=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def test_processes_learn_together_what_one_learns_alone(tmp_path: Path) -> None:
    alone, together = tmp_path / "alone", tmp_path / "together"
    single = run("python", SCRIPT, "--output", alone)
    assert single.returncode == 0, single.stderr
    with free_port() as port:
        rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sizes = ["--server-num", 1, "--worker-num", 2, "--log-dir", tmp_path / "log"]

    double = run("ps-launch", *sizes, SCRIPT, "--output", together, environment=rendezvous)

    assert double.returncode == 0, double.stderr
    for output in (single.stdout, double.stdout):
        first, last = losses_of(output)
        assert last < first - 0.1
    dense = dense_of(together)
    assert dense
    for name, value in dense_of(alone).items():
        torch.testing.assert_close(value, dense[name], **CLOSE)
    keys = np.arange(40, dtype=np.uint64)
    for table in ("users", "items"):
        one, two = (SavedModel.open(each).read(table, keys) for each in (alone, together))
        assert one.any()
        np.testing.assert_allclose(one, two, **CLOSE)

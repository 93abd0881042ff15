"""examples/first_model.py: from a DataFrame to a served model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import COMMANDS, ROOT, clean_environment

LIMIT_S = 100.0


@pytest.mark.slow
def test_it_runs_from_its_first_cell_to_its_last(tmp_path: Path) -> None:
    path = f"{COMMANDS}{os.pathsep}{os.environ['PATH']}"
    environment = {**clean_environment(), "PATH": path, "TMPDIR": str(tmp_path)}

    done = subprocess.run(
        [sys.executable, ROOT / "examples/first_model.py"],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        cwd=tmp_path,
        env=environment,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    log_losses = dict(
        re.findall(r"^(\w+) +log loss ([\d.]+) of the best", done.stdout, re.MULTILINE)
    )
    best, auc, log_loss, base = re.findall(
        r"^(\w+): AUC ([\d.]+), log loss ([\d.]+); the click rate alone ([\d.]+)",
        done.stdout,
        re.MULTILINE,
    )[0]
    # Who likes what is an interaction, which a linear model cannot know.
    assert best == min(log_losses, key=lambda each: float(log_losses[each])) != "lr"
    assert float(log_loss) < float(base)
    assert float(auc) > 0.65
    lost = dict(re.findall(r"^(user|item|device|price) +(-?[\d.]+)$", done.stdout, re.MULTILINE))
    assert [*lost][-1] == "price"
    assert min(float(lost["user"]), float(lost["item"])) > 0.05
    assert "served alike: True" in done.stdout

"""Two small runs that wrote their folders, for reports."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.training import job_of, train_alone

NOISE = "<i>noise</i>"
"""Name of a slot that says nothing about clicks, and would be markup in a page."""

SCHEMA = f"""
hash_version = 1
slots = ["site", "{NOISE}"]
dense = [{{ name = "price", transform = "none", missing_indicator = true }}]
"""


def write_rows(path: Path, rows: int, seed: int) -> None:
    """Writes rows in which two of four sites have a click rate of 0.85, and two of 0.15."""
    random = np.random.default_rng(seed)
    lines = [f"label,site,{NOISE},price"]
    for _ in range(rows):
        site = int(random.integers(4))
        clicked = int(random.random() < (0.85 if site < 2 else 0.15))
        price = f"{random.random():.3f}" if random.random() < 0.9 else ""
        lines.append(f"{clicked},site{site},{int(random.integers(8))},{price}")
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The `run.dir` of one that was validated, and saved its model, and of one that did neither."""
    root = tmp_path_factory.mktemp("report")
    (root / "schema.toml").write_text(SCHEMA)
    for name, rows in (("train", 960), ("valid", 300), ("test", 600)):
        write_rows(root / f"{name}.csv", rows, seed=rows)
    common = [
        "model.name=lr",
        f"data.train={root}/train.csv",
        f"data.schema={root}/schema.toml",
        "train.batch_size=32",
        "train.epochs=2",
        "train.log_every_s=0.000001",
    ]
    whole = [
        f"run.dir={root}/whole <b>",
        f"data.valid={root}/valid.csv",
        f"data.test={root}/test.csv",
        f"checkpoint.dir={root}/model",
        "valid.every_steps=10",
        f'valid.slices=["site", "{NOISE}"]',
        'valid.group_by="site"',
        "valid.calibration_buckets=5",
    ]
    for settings in (whole, [f"run.dir={root}/bare", "optimizer.sparse.learning_rate=0.02"]):
        job = job_of(*common, *settings)
        train_alone(job)
    return root / "whole <b>", root / "bare"

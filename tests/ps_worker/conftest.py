"""A model of whole numbers, booleans and lists in Parquet."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.training import job_of, train_alone

SCHEMA = """
hash_version = 1
label = "click"
slots = ["user", "tags"]
dense = [{ name = "is_mobile" }]
"""


@dataclass(frozen=True)
class OfParquet:
    """A trained model, its data, and their rows as samples, of which whole numbers and booleans are Python's.

    Attributes:
        model: Its checkpoints.
        data: The file.
        schema: The file of its schema.
        samples: The rows.
    """

    model: Path
    data: Path
    schema: Path
    samples: list[tuple[None, list[bool], list[object]]]


@pytest.fixture(scope="session")
def of_parquet(tmp_path_factory: pytest.TempPathFactory) -> OfParquet:
    folder = tmp_path_factory.mktemp("of_parquet")
    rng = np.random.default_rng(1)
    users, is_mobile = rng.integers(-3, 4, 600).tolist(), (rng.random(600) < 0.5).tolist()
    kinds = [[], None, ["a"], ["a", "b"], ["b", "c", "a"], ["", "a"]]
    tags = [kinds[i] for i in rng.integers(0, len(kinds), 600)]
    # Whoever knows the user, the tags and the boolean knows the click.
    clicks = [
        int(user + len(each or []) - 4 * (each is None) + 2 * mobile > 2)
        for user, each, mobile in zip(users, tags, is_mobile, strict=True)
    ]
    columns = {
        "click": clicks,
        "is_mobile": is_mobile,
        "user": pa.array(users, pa.int64()),
        "tags": pa.array(tags, pa.list_(pa.string())),
    }
    data, schema = folder / "rows.parquet", folder / "schema.toml"
    pq.write_table(pa.table(columns), data)
    schema.write_text(SCHEMA)
    settings = [
        f"data.train={data}",
        f"data.schema={schema}",
        f"checkpoint.dir={folder}/model",
        "model.name=lr",
        "train.batch_size=50",
    ]
    train_alone(job_of(*settings))
    samples = [
        (None, [mobile], [user, "" if each is None else each])
        for mobile, user, each in zip(is_mobile, users, tags, strict=True)
    ]
    return OfParquet(folder / "model", data, schema, samples)

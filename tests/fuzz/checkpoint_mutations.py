"""Mutated checkpoints, each of which has to be refused with an error of ours, or to be read as it was saved.

Manifests get other values and correct checksums, as anybody can write them; files of rows get other bytes. A
look-up beside its arrays may end the process.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from ctr_ps.protos.keys import Keys
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.saved_model import SavedModel
from ctr_ps.ps_server.store import ParameterStore
from tests.fuzz.mutations import mutate_document
from tests.support.checkpoints import fake_counting_model, signed
from tests.support.stores import trained_chain


class Base:
    """A checkpoint with its chain, and what it reads."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.saved = read(folder / name)
        self.files = sorted(path for path in (folder / name).rglob("*") if path.is_file())


def read(target: Path) -> dict[str, Any]:
    """Returns rows as all readers see them, by key; look-ups must agree with the rows of shards."""
    checkpoint = Checkpoint.open(target)
    found: dict[str, Any] = {}
    for name, spec in checkpoint.tables.items():
        shards = [rows for _, rows in checkpoint.read_shards(name, range(spec.num_shards))]
        keys = np.concatenate([rows.keys for rows in shards])
        found[name] = {
            int(key): (rows.weights[i].tobytes(), rows.state[i].tobytes())
            for rows in shards
            for i, key in enumerate(rows.keys)
        }
        for maps in (False, True):
            looked_up = look_up(SavedModel(checkpoint, maps=maps, verifies=True), name, keys)
            assert looked_up == {key: weights for key, (weights, _) in found[name].items()}
    checkpoint.verify()
    store = ParameterStore()
    store.load(str(target))
    for name in checkpoint.tables:
        table = store.engine.parameters.table(name)
        rows = [table.export_shard(shard) for shard in table.shards]
        stored = {
            int(key): (each.weights[i].tobytes(), each.state[i].tobytes())
            for each in rows
            for i, key in enumerate(each.keys)
        }
        assert stored == found[name]
    return found


def look_up(model: SavedModel, table: str, keys: Keys) -> dict[int, bytes]:
    """Returns the weights of the keys that are found, of these and others."""
    others = np.random.default_rng(0).integers(0, 2**64, 50, np.uint64)
    asked = np.unique(np.concatenate([keys, others, np.array([0, 2**64 - 1], np.uint64)]))
    rows, has_row = model.find(table, asked)
    return {int(key): rows[i].tobytes() for i, key in enumerate(asked) if has_row[i]}


def mutate_manifest(path: Path, rng: random.Random) -> None:
    document = json.loads(path.read_bytes())
    mutate_document(document, rng)
    path.write_bytes(signed(document))


def mutate_bytes(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 2, 8])):
        if content:
            place = rng.randrange(len(content))
            content[place] = rng.choice(
                [0, 1, 127, 128, 255, content[place] ^ 1 << rng.randrange(8)]
            )
    if rng.random() < 0.1:
        content = content[: rng.randrange(len(content) + 1)]
    path.write_bytes(content)


def damaged_rows(target: Path) -> None:
    """Reads rows whose checksums nobody compares: any answer is right, as long as it comes."""
    model = SavedModel(Checkpoint.open(target), maps=True)
    for name in model.checkpoint.tables:
        look_up(model, name, np.empty(0, np.uint64))


def mutate_and_read(base: Base, rng: random.Random, folder: Path) -> str:
    """Returns what became of one mutation."""
    shutil.copytree(base.folder, folder, dirs_exist_ok=True)
    target = folder / base.name
    manifest = target / "MANIFEST.json"
    is_signed = rng.random() < 0.6
    file = manifest if is_signed else folder / rng.choice(base.files).relative_to(base.folder)
    if is_signed:
        mutate_manifest(manifest, rng)
    else:
        mutate_bytes(file, rng)
    if not is_signed and rng.random() < 0.5:
        damaged_rows(target)
        return "answered"
    found = read(target)
    assert found == base.saved or (is_signed and found.keys() < base.saved.keys()), (
        f"reads otherwise: {target}"
    )
    return "same"


class Bases:
    """Checkpoints, each with a copy that is mutated."""

    def __init__(self, folder: Path) -> None:
        fake_counting_model().save(folder / "counting" / "saved")
        trained_chain(folder / "chain", 2)
        self._bases = [Base(folder / "counting", "saved"), Base(folder / "chain", "2")]
        self._mutated = folder / "mutated"

    def check(self, number: bytes) -> bytes:
        """Returns what became of the mutation of this number."""
        rng = random.Random(number)
        try:
            return mutate_and_read(rng.choice(self._bases), rng, self._mutated).encode()
        finally:
            shutil.rmtree(self._mutated, ignore_errors=True)

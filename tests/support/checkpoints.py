"""A small model as plain arrays, divided between servers and saved without tables."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.errors import CheckpointError
from ctr_ps.protos.gradients import Values
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.spec import (
    DenseSegment,
    DenseSpec,
    InitializerSpec,
    OptimizerSpec,
    StatisticsSpec,
    TableSpec,
)
from ctr_ps.ps_server.checkpoint.files.format import write_table_file
from ctr_ps.ps_server.checkpoint.files.manifest import Entry, Share, share_to_json
from ctr_ps.ps_server.checkpoint.reader import Checkpoint
from ctr_ps.ps_server.checkpoint.storage.folders import Folder, LocalFolder
from ctr_ps.ps_server.checkpoint.writer import save_checkpoint, shared_folder, write_share
from ctr_ps.ps_server.optimizers.registry import OPTIMIZERS
from ctr_ps.ps_server.table.contents import DensePiece, Rows

ATTACHMENTS = {"job.toml": b"[train]\nepochs = 1\n", "empty": b""}


@dataclass(frozen=True)
class FakeTable:
    spec: TableSpec
    state_width: int
    rows: Mapping[int, Rows]
    statistics_width: int = 0

    @property
    def shards(self) -> Iterator[int]:
        return iter(self.rows)

    def export_shard(self, shard: int) -> Rows:
        return self.rows[shard]

    def share(self, server_index: int, num_servers: int) -> "FakeTable":
        shards = ShardMap.of(num_servers).shards_of(server_index, self.spec.num_shards)
        return replace(self, rows={shard: self.rows[shard] for shard in shards})


@dataclass(frozen=True)
class FakeCounters:
    spec: TableSpec
    counters: Mapping[int, NDArray[np.uint8]]

    @property
    def shards(self) -> Iterator[int]:
        return iter(self.counters)

    def export_shard(self, shard: int) -> NDArray[np.uint8]:
        return self.counters[shard]

    def share(self, server_index: int, num_servers: int) -> "FakeCounters":
        shards = ShardMap.of(num_servers).shards_of(server_index, self.spec.num_shards)
        return replace(self, counters={shard: self.counters[shard] for shard in shards})


@dataclass(frozen=True)
class FakeBlock:
    spec: DenseSpec
    piece: DensePiece

    def share(self, server_index: int, num_servers: int) -> "FakeBlock":
        piece = ShardMap.of(num_servers).piece_of(server_index, self.spec.length)
        return FakeBlock(
            self.spec,
            DensePiece(
                piece.start,
                self.piece.weights[piece],
                self.piece.element_state[:, piece],
                self.piece.scalars,
            ),
        )


@dataclass(frozen=True)
class FakeModel:
    tables: Mapping[str, FakeTable]
    blocks: Mapping[str, FakeBlock]
    candidates: Mapping[str, FakeTable] = field(default_factory=dict)
    counters: Mapping[str, FakeCounters] = field(default_factory=dict)

    @property
    def dense(self) -> dict[str, np.ndarray]:
        return {name: block.piece.weights for name, block in self.blocks.items()}

    def write(
        self, folder: Folder | Path, server_index: int = 0, num_servers: int = 1
    ) -> list[Entry]:
        return write_share(
            LocalFolder(folder) if isinstance(folder, Path) else folder,
            server_index,
            [table.share(server_index, num_servers) for table in self.tables.values()],
            {
                name: block.share(server_index, num_servers).piece
                for name, block in self.blocks.items()
            },
            candidates=[
                table.share(server_index, num_servers) for table in self.candidates.values()
            ],
            counters=[table.share(server_index, num_servers) for table in self.counters.values()],
        )

    def save(
        self, target: str | Path, num_servers: int = 1, clock: Callable[[], float] = time.time
    ) -> str:
        def write_shares(url: str, token: str) -> list[Share]:
            folder = shared_folder(url, token)
            return [
                Share(entries=tuple(self.write(folder, server_index, num_servers)))
                for server_index in range(num_servers)
            ]

        return save_checkpoint(
            target,
            write_shares=write_shares,
            tables={name: table.spec for name, table in self.tables.items()},
            blocks={name: block.spec for name, block in self.blocks.items()},
            attachments=ATTACHMENTS,
            clock=clock,
        )


def random_rows(
    rng: np.random.Generator,
    num_rows: int,
    dim: int,
    state_width: int,
    statistics_width: int = 0,
    *,
    shard: int = 0,
    num_shards: int = 1,
) -> Rows:
    keys = rng.integers(0, 2**64, (40 + 2 * num_rows) * num_shards, np.uint64)
    of_shard = ShardMap.of(num_shards).route(keys, num_shards)[shard]
    return Rows(
        keys=np.unique(keys[of_shard[:num_rows]]),
        weights=rng.standard_normal((num_rows, dim), np.float32),
        state=rng.random((num_rows, state_width), np.float32),
        statistics=random_bits(rng, num_rows, statistics_width),
    )


def random_bits(rng: np.random.Generator, num_rows: int, width: int) -> Values:
    return rng.integers(0, 2**32, (num_rows, width), np.uint32).view(np.float32)


def optimizer_with_state(dim: int, width: int) -> str:
    names = ("sgd", "adagrad_row", "adagrad", "ftrl", "adam")
    fitting = [name for name in names if OPTIMIZERS[name].state_width(dim) == width]
    return fitting[0] if fitting else "sgd"


def fake_table(
    name: str,
    seed: int = 0,
    *,
    dim: int = 3,
    state_width: int = 3,
    statistics_width: int = 0,
    num_shards: int = 4,
) -> FakeTable:
    """Shards of 0 to 5 rows, with an optimizer of this state, if one exists."""
    rng = np.random.default_rng(seed)
    spec = TableSpec(
        name=name,
        dim=dim,
        initializer=InitializerSpec(kind="normal", scale=0.1),
        optimizer=OptimizerSpec(
            name=optimizer_with_state(dim, state_width), params={"learning_rate": 0.05}
        ),
        seed=2**63 + seed,
        num_shards=num_shards,
        statistics=StatisticsSpec() if statistics_width else None,
    )
    sizes = rng.integers(0, 6, num_shards)
    rows = {
        shard: random_rows(
            rng,
            sizes[shard],
            dim,
            state_width,
            statistics_width,
            shard=shard,
            num_shards=num_shards,
        )
        for shard in range(num_shards)
    }
    return FakeTable(spec, state_width, rows, statistics_width)


def fake_counters(name: str, seed: int = 0, *, num_shards: int = 4) -> FakeCounters:
    rng = np.random.default_rng(seed)
    spec = fake_table(name, seed, num_shards=num_shards).spec
    return FakeCounters(
        spec,
        {shard: rng.integers(0, 256, 10 + shard, np.uint8) for shard in range(num_shards)},
    )


def fake_block(name: str, seed: int = 0, *, length: int = 7, num_states: int = 2) -> FakeBlock:
    rng = np.random.default_rng(seed)
    spec = DenseSpec(
        name=name,
        segments=(DenseSegment(length=length, initializer=InitializerSpec(scale=0.5)),),
        optimizer=OptimizerSpec(
            name=("sgd", "adagrad", "adam")[num_states], params={"learning_rate": 0.05}
        ),
        seed=seed,
    )
    piece = DensePiece(
        start=0,
        weights=rng.standard_normal(length, np.float32),
        element_state=rng.random((num_states, length), np.float32),
        scalars=rng.random(2 if num_states == 2 else 0, np.float32),
    )
    return FakeBlock(spec, piece)


def fake_model(seed: int = 0) -> FakeModel:
    return FakeModel(
        {"wide": fake_table("wide", seed, dim=1, state_width=0), "deep": fake_table("deep", seed)},
        {"mlp": fake_block("mlp", seed), "bias": fake_block("bias", seed, length=1, num_states=0)},
    )


def fake_counting_model(seed: int = 0) -> FakeModel:
    """A table with statistics, its candidates, and a table with counters."""
    counted = {"statistics_width": 4, "num_shards": 2}
    return FakeModel(
        {
            "exact": fake_table("exact", seed, dim=2, state_width=1, **counted),
            "bloom": fake_table("bloom", seed + 1, dim=1, state_width=0, **counted),
        },
        {"mlp": fake_block("mlp", seed, length=3)},
        {"exact": fake_table("exact", seed + 2, dim=0, state_width=0, **counted)},
        {"bloom": fake_counters("bloom", seed, num_shards=2)},
    )


def bytes_of(rows: Rows) -> list[bytes]:
    arrays = (rows.keys, rows.weights, rows.state, rows.statistics)
    return [array.tobytes() for array in arrays]


def content(checkpoint: Checkpoint) -> list[bytes]:
    parts = []
    for name, table in checkpoint.tables.items():
        for _, rows in sorted(
            checkpoint.read_shards(name, range(table.num_shards)), key=lambda shard: shard[0]
        ):
            parts += bytes_of(rows)
        for _, rows in checkpoint.read_candidates(name, range(table.num_shards)):
            parts += bytes_of(rows)
        for _, counters in checkpoint.read_counters(name, range(table.num_shards)):
            parts.append(counters.tobytes())
    for name, block in checkpoint.blocks.items():
        piece = checkpoint.read_dense(name, slice(0, block.length))
        parts += [
            piece.weights.tobytes(),
            piece.element_state.tobytes(),
            piece.scalars.tobytes(),
        ]
    return parts + [checkpoint.attachment(name) for name in checkpoint.attachments]


def whole_at(target: Path) -> str:
    checkpoint = Checkpoint.open(target)
    checkpoint.verify()
    return checkpoint.model_digest


def signed(document: dict[str, Any]) -> bytes:
    """Returns a manifest with a correct checksum, as from another program."""
    document = {name: value for name, value in document.items() if name != "sha256"}
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return json.dumps(
        {**document, "sha256": hashlib.sha256(canonical.encode()).hexdigest()}
    ).encode()


def alter_manifest(target: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest of a checkpoint; all its checksums stay correct."""
    document = json.loads((target / "MANIFEST.json").read_bytes())
    change(document)
    (target / "MANIFEST.json").write_bytes(signed(document))
    with suppress(CheckpointError):
        document["model_digest"] = Checkpoint.open(target).digest_of_own_files()
        (target / "MANIFEST.json").write_bytes(signed(document))


def exchange_table(target: Path, table: FakeTable) -> None:
    """Exchanges the rows of a table in a checkpoint of one server; all its checksums stay correct."""
    name = table.spec.name

    def change(document: dict[str, Any]) -> None:
        data = LocalFolder(target / document["data_folder"])
        written = json.loads(share_to_json(Share(entries=(write_table_file(data, 0, table),))))
        document["entries"] = [
            *written["entries"],
            *(
                each
                for each in document["entries"]
                if (each.get("table"), each["kind"]) != (name, "rows")
            ),
        ]

    alter_manifest(target, change)


def sign_attachment(target: Path, name: str, content: bytes) -> None:
    """Replaces an attachment of a checkpoint; all checksums stay correct."""

    def change(document: dict[str, Any]) -> None:
        sha256 = hashlib.sha256(content).hexdigest()
        document["attachments"][name] = {"size_bytes": len(content), "sha256": sha256}
        (target / document["data_folder"] / "attachments" / name).write_bytes(content)

    alter_manifest(target, change)

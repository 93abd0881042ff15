"""Routing: keys and pieces of dense blocks to the servers that have them, and answers back to one whole.

    keys, blocks --> positions and pieces of each server --> parts, whose answers fit a message each
    answers      --> rows in the order of the keys, whole blocks
    gradients    --> the part of each server --> chunks, which fit a message each

Nothing here makes a call: `ps_worker.cluster.client` does. `ps_worker.cluster.state_transfer` routes rows and
blocks with their optimizer state.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.chunking import KEY_BYTES, VALUE_BYTES, PushChunk, split_columns, split_push
from ctr_ps.protos.errors import GradientError, ProtocolError, UnknownTableError
from ctr_ps.protos.gradients import (
    DenseGrad,
    Gradients,
    Values,
    require_counts,
    require_examples,
    require_finite,
)
from ctr_ps.protos.keys import Keys, require_unique
from ctr_ps.protos.placement import ShardMap
from ctr_ps.protos.runtime.jit import kernel
from ctr_ps.protos.spec import DenseSpec, TableSpec
from ctr_ps.protos.store import Changed

Positions = NDArray[np.int32]


@kernel
def scatter_rows(rows: Values, positions: Positions, out: Values) -> None:
    """Writes row `i` of `rows` float32[n, D] to row `positions[i]` of `out` float32[N, D]."""
    for i in range(positions.size):
        row = positions[i]  # read once: the compiler cannot know that `out` does not overlap
        for j in range(rows.shape[1]):
            out[row, j] = rows[i, j]


@dataclass(frozen=True, slots=True)
class Routing:
    """The declared tables and dense blocks of a cluster, by name, and where their rows and elements are.

    A message has about `chunk_bytes`; one row, or one piece that is pulled, may exceed it.
    """

    shard_map: ShardMap
    chunk_bytes: int
    tables: dict[str, TableSpec] = field(default_factory=dict)
    blocks: dict[str, DenseSpec] = field(default_factory=dict)

    def table(self, name: str) -> TableSpec:
        """Returns the spec of a table; raises UnknownTableError if it was not declared."""
        if name not in self.tables:
            raise UnknownTableError(f"no table {name!r} was declared, only {sorted(self.tables)}")
        return self.tables[name]

    def block(self, name: str) -> DenseSpec:
        """Returns the spec of a dense block; raises UnknownTableError if it was not declared."""
        if name not in self.blocks:
            raise UnknownTableError(
                f"no dense block {name!r} was declared, only {sorted(self.blocks)}"
            )
        return self.blocks[name]

    def positions(self, keys: Mapping[str, Keys]) -> dict[str, list[Positions]]:
        """Returns, by table, the positions of each server's keys, ascending."""
        return {
            table: self.shard_map.route(column, self.table(table).num_shards)
            for table, column in keys.items()
        }

    def piece(self, block: str, server: int) -> slice:
        """Returns the elements of a block that a server has."""
        return self.shard_map.piece_of(server, self.block(block).length)

    def piece_length(self, block: str, server: int) -> int:
        """Returns the number of elements of a block that a server has."""
        piece = self.piece(block, server)
        return int(piece.stop - piece.start)

    def split_pull(self, keys: Mapping[str, Keys]) -> dict[int, list[dict[str, Positions]]]:
        """Returns, by server, a pull of rows as parts: the positions of their keys, by table.

        A server has at least one part, and each table is in at least one of its parts.
        """
        tables, positions = list(keys), self.positions(keys)
        row_bytes = [KEY_BYTES + VALUE_BYTES * self.table(table).dim for table in tables]
        parts = {}
        for server in self.shard_map.servers:
            own = [positions[table][server] for table in tables]
            sizes = [each.size for each in own]
            groups = split_columns(list(zip(sizes, row_bytes, strict=True)), self.chunk_bytes)
            parts[server] = [
                {tables[column]: own[column][rows] for column, rows in group} for group in groups
            ]
        return parts

    def empty_rows(self, keys: Mapping[str, Keys]) -> dict[str, Values]:
        """Returns rows for the answers to a pull, float32[N, dim] by table, with any values."""
        return {
            table: np.empty((column.size, self.table(table).dim), np.float32)
            for table, column in keys.items()
        }

    def write_rows(
        self,
        rows: Mapping[str, Values],
        part: Mapping[str, Positions],
        out: Mapping[str, Values],
    ) -> None:
        """Writes the answer to a part of a pull where it belongs in `out`, the rows of all keys.

        Raises:
            ProtocolError: If it has other shapes than were asked for.
        """
        for table, positions in part.items():
            if positions.size:
                _require_rows(table, rows[table], (positions.size, out[table].shape[1]))
            scatter_rows(rows[table], positions, out[table])

    def split_pieces(self, blocks: Collection[str]) -> dict[int, list[list[str]]]:
        """Returns, by server, a pull of dense blocks as parts: names of blocks; no piece is split."""
        names, parts = list(blocks), {}
        for server in self.shard_map.servers:
            lengths = [self.piece_length(block, server) for block in names]
            # One without elements is asked for, too: its server says the version.
            columns = [(1, VALUE_BYTES * max(1, length)) for length in lengths]
            groups = split_columns(columns, self.chunk_bytes)
            parts[server] = [[names[column] for column, _ in group] for group in groups]
        return parts

    def write_pieces(
        self, pieces: Mapping[str, Values], server: int, out: Mapping[str, Values]
    ) -> None:
        """Writes a server's pieces where they belong in `out`, the whole blocks."""
        for block, piece in pieces.items():
            out[block][self.piece(block, server)] = piece

    def require_lengths(self, into: Mapping[str, Values]) -> None:
        """Raises ProtocolError unless vectors have the lengths of the blocks that are pulled into them."""
        for block, vector in into.items():
            _require_length(self.block(block), vector, ProtocolError, "pull into")

    def answer_bytes(
        self, part: Mapping[str, Positions], blocks: Collection[str], server: int
    ) -> int:
        """Returns the bytes of the rows of a part and of the server's pieces, in one answer."""
        num_values = sum(self.table(table).dim * where.size for table, where in part.items())
        num_values += sum(self.piece_length(block, server) for block in blocks)
        return VALUE_BYTES * int(num_values)

    def changed_rows_in_message(self, tables: Sequence[str]) -> int:
        """Returns the number of changed rows of any of `tables` that fit a message; at least 1."""
        dims = [self.table(table).dim for table in tables]
        return max(1, self.chunk_bytes // (KEY_BYTES + VALUE_BYTES * max(dims, default=0)))

    def join_changed(self, tables: Sequence[str], parts: Sequence[Changed]) -> Changed:
        """Returns the changed rows of all servers, as old as those of the oldest.

        Raises:
            ProtocolError: If rows have another dim than their table.
        """
        return Changed(
            rows={
                table: _joined(table, self.table(table).dim, [part.rows[table] for part in parts])
                for table in tables
            },
            version=min(part.version for part in parts),
            has_more=any(part.has_more for part in parts),
        )

    def split_push(self, gradients: Gradients, *, bfloat16: bool) -> dict[int, list[PushChunk]]:
        """Returns, by server, the chunks of a push, at least one; `bfloat16` is how they are sent.

        The push is checked as a whole: one that a server would refuse must not reach the others.

        Raises:
            UnknownTableError: If a table or block was not declared.
            GradientError: If gradients do not fit their spec, or are not finite.
        """
        self._check(gradients)
        positions = self.positions({name: grad.keys for name, grad in gradients.sparse.items()})
        chunks = {}
        for server in self.shard_map.servers:
            sparse = {
                table: grad.take(positions[table][server])
                for table, grad in gradients.sparse.items()
            }
            dense = {
                block: DenseGrad(grad.values[self.piece(block, server)], grad.examples)
                for block, grad in gradients.dense.items()
            }
            part = Gradients(sparse=sparse, dense=dense)
            chunks[server] = split_push(part, self.chunk_bytes, bfloat16=bfloat16)
        return chunks

    def _check(self, gradients: Gradients) -> None:
        for table, grad in gradients.sparse.items():
            expected = (grad.keys.size, self.table(table).dim)
            if grad.values.shape != expected:
                raise GradientError(
                    f"push to table {table!r} has values of shape {grad.values.shape}, expected "
                    f"{expected}: one row of dim {expected[1]} for each key"
                )
            require_examples(f"table {table!r}", grad.examples if grad.keys.size else 1)
            keeps_statistics = self.table(table).statistics is not None
            require_counts(table, grad, keeps_statistics=keeps_statistics)
            if self.shard_map.num_servers > 1:  # one server refuses the whole push by itself
                require_unique(f"push to table {table!r}", grad.keys, GradientError)
        for block, dense in gradients.dense.items():
            _require_length(self.block(block), dense.values, GradientError, "push to")
            require_examples(f"dense block {block!r}", dense.examples)
        require_finite(gradients)


def _joined(table: str, dim: int, parts: Iterable[tuple[Keys, Values]]) -> tuple[Keys, Values]:
    """Returns the keys and rows of all parts; one without keys has no width."""
    found = [(keys, values) for keys, values in parts if keys.size]
    for keys, values in found:
        _require_rows(table, values, (keys.size, dim))
    return (
        np.concatenate([np.empty(0, np.uint64), *(keys for keys, _ in found)]),
        np.concatenate([np.empty((0, dim), np.float32), *(values for _, values in found)]),
    )


def _require_rows(table: str, rows: Values, expected: tuple[int, int]) -> None:
    if rows.shape != expected:
        raise ProtocolError(
            f"a server answered a pull from table {table!r} with shape {rows.shape}, expected {expected}: "
            "its table has another dim"
        )


def _require_length(
    spec: DenseSpec, vector: Values, error: type[GradientError | ProtocolError], what: str
) -> None:
    if vector.shape != (spec.length,):
        raise error(
            f"{what} dense block {spec.name!r} has shape {vector.shape}, expected ({spec.length},)"
        )

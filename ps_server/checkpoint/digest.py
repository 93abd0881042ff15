"""Digests: of a shard, of a piece of a dense block, of a whole model.

The model's digest is a hash over digests of shards, and a shard is whole on any number of servers: so
each server hashes its own shards, and the model's digest does not depend on how many there are.
All numbers are hashed as little-endian bytes.
"""

import hashlib
from collections.abc import Mapping

import numpy as np

from protos.gradients import Values
from protos.partition import Keys
from ps_server.checkpoint.rows import DensePiece, Rows

EMPTY_SHARD_DIGEST = hashlib.sha256().digest()


def shard_digest(rows: Rows) -> bytes:
    """Returns the SHA-256 over keys, weights and state; without rows `EMPTY_SHARD_DIGEST`."""
    sha = hashlib.sha256(_bytes_of(rows.keys))
    sha.update(_bytes_of(rows.weights))
    sha.update(_bytes_of(rows.state))
    return sha.digest()


def statistics_digest(rows: Rows) -> bytes:
    """Returns the SHA-256 over the statistics, which are no part of the model."""
    return hashlib.sha256(_bytes_of(rows.statistics)).digest()


def piece_digest(piece: DensePiece) -> bytes:
    """Returns the SHA-256 over weights and element state; the manifest holds the rest."""
    sha = hashlib.sha256(_bytes_of(piece.weights))
    sha.update(_bytes_of(piece.element_state))
    return sha.digest()


def model_digest(dense: Mapping[str, Values], shards: Mapping[tuple[str, int], bytes]) -> str:
    """Returns the SHA-256 of a model, in hexadecimal.

        number of blocks; for each block by name: name, length, weights;
        for each table by name, each shard by number that has rows: name, shard, digest of the shard

    Counts, lengths and shard numbers are uint64, a name follows its length in bytes.

    Args:
        dense: For each dense block all of its weights, float32[n].
        shards: The digests of shards by table and shard number; empty shards may be missing.
    """
    sha = hashlib.sha256(_uint64(len(dense)))
    for name, weights in sorted(dense.items()):
        sha.update(_framed(name) + _uint64(weights.size))
        sha.update(_bytes_of(weights))
    for (name, shard), digest in sorted(shards.items()):
        if digest != EMPTY_SHARD_DIGEST:
            sha.update(_framed(name) + _uint64(shard) + digest)
    return sha.hexdigest()


def _bytes_of(array: Keys | Values) -> memoryview:
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data


def _uint64(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _framed(name: str) -> bytes:
    encoded = name.encode()
    return _uint64(len(encoded)) + encoded

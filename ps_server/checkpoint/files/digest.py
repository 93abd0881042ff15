"""Digests: of a shard, of a piece of a dense block, of a whole model.

The model's digest is a hash over digests of shards, and a shard is whole on any number of servers: so
each server hashes its own shards, and the model's digest does not depend on how many there are.
All numbers are hashed as little-endian bytes.

Numbers are hashed by XXH3, which finds what was damaged, and is no defence against who alters a file on
purpose. SHA-256 took 50 ns a row of 88 bytes, as long as all else in a save, where the processor has
instructions for it, and several times that where it has none.
"""

import hashlib
from collections.abc import Mapping

import numpy as np
import xxhash
from numpy.typing import NDArray

from protos.gradients import Values
from protos.keys import Keys
from ps_server.table.contents import DensePiece, Rows

EMPTY_SHARD_DIGEST = xxhash.xxh3_128().digest()


def shard_digest(rows: Rows) -> bytes:
    """Returns the XXH3-128 over keys, weights and state; without rows `EMPTY_SHARD_DIGEST`."""
    return _xxh3(rows.keys, rows.weights, rows.state)


def statistics_checksum(rows: Rows) -> bytes:
    """Returns the XXH3-128 over the statistics, which are no part of the model."""
    return _xxh3(rows.statistics)


def counters_checksum(counters: NDArray[np.uint8]) -> bytes:
    """Returns the XXH3-128 over a shard's counters of keys without a row."""
    return _xxh3(counters)


def piece_checksum(piece: DensePiece) -> bytes:
    """Returns the XXH3-128 over weights and element state; the manifest holds the rest."""
    return _xxh3(piece.weights, piece.element_state)


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


def _xxh3(*arrays: Keys | Values | NDArray[np.uint8]) -> bytes:
    xxh3 = xxhash.xxh3_128()
    for array in arrays:
        xxh3.update(_bytes_of(array))
    return xxh3.digest()


def _bytes_of(array: Keys | Values | NDArray[np.uint8]) -> memoryview:
    return np.ascontiguousarray(array, array.dtype.newbyteorder("<")).data


def _uint64(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _framed(name: str) -> bytes:
    encoded = name.encode()
    return _uint64(len(encoded)) + encoded

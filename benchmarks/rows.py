"""Synthetic batches for benchmarks, in Criteo's shape and with clicks from a known model.

26 slots with one value each, Zipf-distributed over vocabularies of 12 to 2,000,000: a batch of 512 has about
5,400 distinct keys (3,600 in Criteo's data), one of 4096 about 25,000; 13 dense columns. Clicks follow a
logistic model of both, so that a benchmark can check that training learns.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ctr_ps.ctr_model.batch import Batch

NUM_SLOTS = 26
NUM_DENSE = 13
VOCABULARIES = np.geomspace(12, 2_000_000, NUM_SLOTS)
ZIPF_EXPONENT = 1.1
BIAS = -1.1
SLOT_WEIGHT = 1.1
DENSE_WEIGHT = 0.6


def _scramble(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Returns splitmix64's finalizer of each element."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _ranks(rng: np.random.Generator, size: int) -> NDArray[np.uint64]:
    """Returns Zipf-distributed ranks [size, S], by the inverse of the continuous distribution."""
    power = 1.0 - ZIPF_EXPONENT
    uniform = rng.random((size, NUM_SLOTS))
    ranks = (uniform * ((VOCABULARIES + 1.0) ** power - 1.0) + 1.0) ** (1.0 / power)
    return np.minimum(ranks, VOCABULARIES).astype(np.uint64)


def batches(num_batches: int, batch_size: int, *, seed: int) -> Iterator[Batch]:
    """Yields batches, deterministic for a seed; all seeds share the click model."""
    rng = np.random.default_rng(seed)
    dense_weights = np.random.default_rng(99).normal(0.0, DENSE_WEIGHT, NUM_DENSE)
    offsets = np.arange(batch_size * NUM_SLOTS + 1, dtype=np.int32)
    for _ in range(num_batches):
        slots = np.arange(NUM_SLOTS, dtype=np.uint64) << np.uint64(40)
        keys = _scramble(_ranks(rng, batch_size) + slots)
        weights = (_scramble(keys ^ np.uint64(0xABCDEF)) >> np.uint64(11)) * 2.0**-53 - 0.5
        dense = rng.random((batch_size, NUM_DENSE)) ** 2
        logits = BIAS + SLOT_WEIGHT * weights.sum(axis=1) + (dense - 1 / 3) @ dense_weights
        clicks = rng.random(batch_size) < 1.0 / (1.0 + np.exp(-logits))
        yield Batch(
            labels=clicks.astype(np.float32),
            dense=dense.astype(np.float32),
            keys=keys.reshape(-1),
            offsets=offsets,
            num_slots=NUM_SLOTS,
        )

"""Admission: which keys get a row, by their shows and clicks, counted exactly or in a Bloom filter.

    count         occurrences >= threshold
    score         nonclk_coeff * (shows - clicks) + click_coeff * clicks >= threshold
    probability   occurrences >= G(key), where P(G = n) = p (1 - p)^(n - 1)

A count is a score in which both coefficients are 1. By probability, each occurrence admits a key with
probability p; the number of occurrences G is drawn once, from a hash of seed, table and key, so that the same
keys are admitted on every server, in every order and after every restart.

In a counting Bloom filter a key has `num_hashes` counters of its shard's `num_counters`; its estimate is the
smallest of them, which is never too low. Adding raises only those that are below the new estimate
(conservative update: Estan, Varghese, "New directions in traffic measurement and accounting", SIGCOMM 2002).
Counters saturate. For n keys and a false positive rate p, of keys that never occurred and have an estimate
above zero:

    num_counters = -n ln p / (ln 2)^2        num_hashes = num_counters / n * ln 2

Bloom, CACM 1970; the hashes: Kirsch, Mitzenmacher, "Less hashing, same performance", ESA 2006.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ctr_ps.protos.errors import SpecError
from ctr_ps.protos.keys import mix64
from ctr_ps.protos.runtime.jit import kernel
from ctr_ps.protos.spec import AdmissionSpec, TableSpec
from ctr_ps.ps_server.table.memory.arena import Arena
from ctr_ps.ps_server.table.memory.intrinsics import Int
from ctr_ps.ps_server.table.rows.statistics import Coefficients, coefficients_of, score_of

POLICIES = ("count", "probability", "score")
COUNTERS = ("exact", "bloom")

MAX_OCCURRENCES = 2**24  # statistics are float32, which can count up to here

_LARGEST = float(np.finfo(np.float32).max)

MAX_COUNTERS = 2**32 - 1  # most counters of a shard: a position is scaled from 32 bits of hash

PASSES_BYTES = 8
"""Of a shard's passes, before its counters; parts of both begin at multiples of this."""

MAX_COUNT = 2**16 - 1

_COUNT = Coefficients(np.float32(1.0), np.float32(1.0))


def counter_dtype(max_count: int) -> type[np.uint8] | type[np.uint16]:
    """Returns the dtype of counters that reach `max_count`."""
    return np.uint8 if max_count <= np.iinfo(np.uint8).max else np.uint16


class FilterArrays(NamedTuple):
    """A filter as kernels see it: `num_hashes` counters for a key, which saturate at `limit`."""

    counters: NDArray[Any]
    num_hashes: int
    limit: int


def filter_shape(expected_keys: int, false_positive_rate: float) -> tuple[int, int]:
    """Returns the numbers of counters and of hashes (counters of a key)."""
    num_counters = -expected_keys * math.log(false_positive_rate) / math.log(2) ** 2
    num_hashes = num_counters / expected_keys * math.log(2)
    return max(1, math.ceil(num_counters)), max(1, round(num_hashes))


@kernel
def _position(filter_: FilterArrays, hashed: np.uint64, i: int) -> np.int64:
    # All keys of a shard agree in the high bits of the hash, so it is hashed again.
    bits = mix64(hashed ^ np.uint64(0x9E3779B97F4A7C15))
    step = (bits >> np.uint64(32)) | np.uint64(1)
    place = (bits + np.uint64(i) * step) & np.uint64(0xFFFFFFFF)
    return np.int64((place * np.uint64(filter_.counters.shape[1])) >> np.uint64(32))


@kernel
def estimate(filter_: FilterArrays, shard: Int, hashed: np.uint64) -> np.int64:
    """Returns the estimate of how often a key of the shard occurred."""
    fewest = np.int64(filter_.limit)
    for i in range(filter_.num_hashes):
        fewest = min(fewest, np.int64(filter_.counters[shard, _position(filter_, hashed, i)]))
    return fewest


@kernel
def raise_to(filter_: FilterArrays, shard: Int, hashed: np.uint64, count: Int) -> None:
    """Raises the estimate of a key to at least `count`, which must fit its counters."""
    for i in range(filter_.num_hashes):
        position = _position(filter_, hashed, i)
        filter_.counters[shard, position] = max(filter_.counters[shard, position], count)


@kernel
def _decay(counters: NDArray[Any], decay: float, salt: np.uint64) -> None:
    for i in range(counters.size):
        if counters[i]:
            left = counters[i] * decay
            whole = math.floor(left)
            unit = np.float64(mix64(salt + np.uint64(i)) >> np.uint64(11)) * 2.0**-53
            counters[i] = whole + (unit < left - whole)


class FilterSettings(NamedTuple):
    """Dimensions of a Bloom filter, with the keys expected in all shards."""

    expected_keys: int
    false_positive_rate: float
    max_count: int

    def shape_of_shard(self, num_shards: int) -> tuple[int, int]:
        """Returns the numbers of counters and of hashes of one of `num_shards` shards."""
        return filter_shape(-(-self.expected_keys // num_shards), self.false_positive_rate)


class CountingBloomFilter:
    """Counters of a table's shards. A table locks its shards.

    `passes` int64[num_shards] is how often each shard has decayed; `shards` are those of this server. Memory
    of others is never touched, so never allocated.
    """

    def __init__(self, settings: FilterSettings, *, num_shards: int, shards: Sequence[int]) -> None:
        num_counters, num_hashes = settings.shape_of_shard(num_shards)
        dtype = counter_dtype(settings.max_count)
        region_bytes = num_counters * np.dtype(dtype).itemsize
        self._arena = Arena(
            dtype, num_regions=num_shards, width=num_counters, region_bytes=region_bytes
        )
        self._arena.reserve(1)
        self._arena.expect(0, num_shards)
        self.arrays = FilterArrays(self._arena.array, num_hashes, int(np.iinfo(dtype).max))
        self.passes = np.zeros(num_shards, np.int64)
        self._used: set[int] = set()
        self.place(shards)

    def place(self, shards: Sequence[int]) -> None:
        """The table has `shards` from now on."""
        self.shards = shards
        self._used.update(shards)

    def drop(self, shard: int) -> None:
        """Zeroes a shard, and releases its memory where possible."""
        if shard in self._used:
            self._used.remove(shard)
            self._arena.release(shard, shard + 1)
            self.passes[shard] = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of this process's counters."""
        counters = self.arrays.counters
        return len(self.shards) * int(counters[0].nbytes)

    @property
    def shard_bytes(self) -> int:
        """Bytes of a shard that `to_bytes` returns."""
        return PASSES_BYTES + int(self.arrays.counters[0].nbytes)

    def decay(self, shard: int, decay: float) -> None:
        """Multiplies the shard's counters by `decay` at the end of a pass, with an exact mean.

        A counter is rounded up or down at random, by a hash of its position and the number of the pass.
        """
        self.passes[shard] += 1
        salt = np.uint64(mix64(np.uint64(self.passes[shard])))
        _decay(self.arrays.counters[shard], decay, salt)

    def to_bytes(self, shard: int) -> NDArray[np.uint8]:
        """Returns a copy of a shard's passes, 8 bytes, and counters, all little-endian."""
        passes = self.passes[shard : shard + 1].astype("<i8")
        counters = self.arrays.counters[shard]
        little = counters.astype(counters.dtype.newbyteorder("<"))
        return np.concatenate([passes.view(np.uint8), little.view(np.uint8)])

    def from_bytes(self, shard: int, saved: NDArray[np.uint8], start: int = 0) -> None:
        """Overwrites a shard with bytes that `to_bytes` returned from a filter of the same dimensions.

        `saved` are those from byte `start` on, a multiple of PASSES_BYTES.
        """
        self._used.add(shard)
        counters = self.arrays.counters[shard]
        if start == 0:
            self.passes[shard] = saved[:PASSES_BYTES].view("<i8")[0]
            start, saved = PASSES_BYTES, saved[PASSES_BYTES:]
        first = (start - PASSES_BYTES) // counters.itemsize
        counters[first : first + saved.size // counters.itemsize] = saved.view(
            counters.dtype.newbyteorder("<")
        )


class AdmissionRule(NamedTuple):
    """An admission spec as kernels see it."""

    threshold: np.float32  # score that a key needs; unused by probability
    log_miss: float  # ln(1 - p) of the probability p; 0 for other policies
    seed: np.uint64  # of the drawn numbers of occurrences
    coefficients: Coefficients  # of the score
    limit: np.float32  # highest number of occurrences that any key needs


def filter_settings(spec: AdmissionSpec) -> FilterSettings:
    """Returns the dimensions of the Bloom filter of an admission."""
    most = math.ceil(spec.threshold) if spec.policy == "count" else MAX_COUNT
    return FilterSettings(spec.expected_keys, spec.false_positive_rate, most)


def counter_bytes_of_shard(spec: AdmissionSpec, num_shards: int) -> int:
    """Returns the bytes of one shard's counters in the Bloom filter of an admission."""
    settings = filter_settings(spec)
    num_counters, _ = settings.shape_of_shard(num_shards)
    return num_counters * np.dtype(counter_dtype(settings.max_count)).itemsize


def admission_rule(spec: TableSpec) -> AdmissionRule:
    """Returns the rule by which a table with admission and statistics admits keys."""
    admission, statistics = spec.admission, spec.statistics
    if admission is None or statistics is None:
        raise ValueError(f"table {spec.name!r} has no admission or no statistics")
    is_score = admission.policy == "score"
    digest = hashlib.sha256(f"{spec.seed}/{spec.name}/admission".encode()).digest()
    log_miss = 0.0
    if admission.policy == "probability":
        certain = admission.threshold == 1.0
        log_miss = -math.inf if certain else math.log1p(-admission.threshold)
    return AdmissionRule(
        threshold=np.float32(admission.threshold),
        log_miss=log_miss,
        seed=np.uint64(int.from_bytes(digest[:8], "little")),
        coefficients=coefficients_of(statistics) if is_score else _COUNT,
        limit=np.float32(MAX_COUNT if admission.counter == "bloom" else MAX_OCCURRENCES),
    )


@kernel
def needed(rule: AdmissionRule, key: np.uint64) -> np.float32:
    """Returns the score that a key needs."""
    if rule.log_miss == 0.0:
        return rule.threshold
    unit = np.float64(mix64(key ^ rule.seed) >> np.uint64(11)) * 2.0**-53
    # 1 - unit is in (0, 1], so its logarithm is finite; divided by -inf (p = 1) it is 0.
    misses = math.floor(math.log(1.0 - unit) / rule.log_miss)
    return min(np.float32(1.0 + misses), rule.limit)


@kernel
def is_admitted(rule: AdmissionRule, key: np.uint64, show: np.float32, click: np.float32) -> bool:
    """Whether a key with these shows and clicks gets a row."""
    return bool(score_of(rule.coefficients, show, click) >= needed(rule, key))


def check_admission(table: str, spec: AdmissionSpec, num_shards: int) -> None:
    """Raises SpecError if the admission spec of a table is invalid by itself."""
    what = f"table {table!r} has admission"
    if spec.policy not in POLICIES:
        raise SpecError(
            f"{what} with policy {spec.policy!r}, expected one of {', '.join(POLICIES)}"
        )
    if spec.counter not in COUNTERS:
        raise SpecError(
            f"{what} with counter {spec.counter!r}, expected one of {', '.join(COUNTERS)}"
        )
    if not abs(spec.default_value) <= _LARGEST:  # also refuses NaN
        raise SpecError(
            f"{what} with default_value {spec.default_value!r}, expected a finite float32"
        )
    most = MAX_COUNT if spec.counter == "bloom" else MAX_OCCURRENCES
    lowest, highest, meaning = {
        "count": (1.0, float(most), "occurrences"),
        "probability": (1e-6, 1.0, "a probability"),
        "score": (0.0, _LARGEST, "a score"),
    }[spec.policy]
    if not lowest <= spec.threshold <= highest:  # also refuses NaN
        raise SpecError(
            f"{what} by {spec.policy} with threshold {spec.threshold!r}, expected {meaning} from "
            f"{lowest:g} to {highest:g}"
        )
    if spec.table:
        _check_score_table(what, table, spec)
    if spec.counter == "bloom":
        _check_filter(what, spec, num_shards)
    elif spec.expected_keys:
        raise SpecError(
            f"{what} with expected_keys {spec.expected_keys}, which counter 'exact' does not use: leave it "
            "out, or set counter = 'bloom'"
        )


def _check_score_table(what: str, table: str, spec: AdmissionSpec) -> None:
    if spec.policy != "score":
        raise SpecError(
            f"{what} by {spec.policy} of table {spec.table!r}: only policy 'score' may use another table"
        )
    if spec.table == table:
        raise SpecError(f"{what} by its own score: leave out the setting 'table'")
    if spec.counter != "exact":
        raise SpecError(
            f"{what} by the score of table {spec.table!r} with counter {spec.counter!r}: leave out the "
            "counter, as the counts of that table are used"
        )


def _check_filter(what: str, spec: AdmissionSpec, num_shards: int) -> None:
    if spec.policy == "score":
        raise SpecError(
            f"{what} by score with counter 'bloom', which counts no clicks: set counter = 'exact'"
        )
    if not 0 < spec.false_positive_rate < 1:
        raise SpecError(
            f"{what} with false_positive_rate {spec.false_positive_rate!r}, expected above 0 and below 1"
        )
    if spec.expected_keys < 1:
        raise SpecError(
            f"{what} with counter 'bloom' and expected_keys {spec.expected_keys}: set expected_keys to the "
            "number of keys that the filter must hold, at least 1"
        )
    if filter_settings(spec).shape_of_shard(num_shards)[0] > MAX_COUNTERS:
        raise SpecError(
            f"{what} with expected_keys {spec.expected_keys}, too many for {num_shards} shards: lower "
            "expected_keys, or use more shards"
        )


def check_score_source(spec: TableSpec, source: TableSpec | None) -> None:
    """Raises SpecError if `source`, None if undeclared, lacks the scores by which a table admits keys."""
    if spec.admission is None or not spec.admission.table:
        return
    what = f"table {spec.name!r} has admission by the score of table {spec.admission.table!r}"
    if source is None:
        raise SpecError(f"{what}, which is not declared: declare that table first")
    if source.statistics is None:
        raise SpecError(f"{what}, which keeps no statistics: declare that table with statistics")
    if source.num_shards != spec.num_shards:
        raise SpecError(
            f"{what}, which has {source.num_shards} shards, not {spec.num_shards}: declare both tables with "
            "the same number, so that both rows of a key are on one server"
        )
    if source.admission is not None and source.admission.table:
        raise SpecError(
            f"{what}, which itself uses the score of {source.admission.table!r}: name "
            f"{source.admission.table!r} instead"
        )

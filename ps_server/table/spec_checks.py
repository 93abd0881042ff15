"""Checks of specs, of declarations and of checkpoints, which anybody may have written."""

import math
import re

import numpy as np

from ctr_ps.protos.errors import SpecError
from ctr_ps.protos.limits import MAX_NAME_CHARACTERS
from ctr_ps.protos.spec import DenseSegment, DenseSpec, ExpirySpec, StatisticsSpec, TableSpec
from ctr_ps.ps_server.optimizers.registry import Tuning, optimizer_of
from ctr_ps.ps_server.table.feature_life.admission import check_admission
from ctr_ps.ps_server.table.feature_life.removal import max_rows_of_shard
from ctr_ps.ps_server.table.rows.initializers import build_initializer

MAX_DIM = 4096
MAX_SHARDS = 4096
EVICTIONS = ("lru", "score")

_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9_.-]{{0,{MAX_NAME_CHARACTERS - 1}}}")


def check_name(name: str) -> None:
    """Raises SpecError if a table or dense block may not have this name, which is part of file names."""
    if not _NAME.fullmatch(name):
        raise SpecError(
            f"invalid name {name!r} of a table or dense block: expected up to {MAX_NAME_CHARACTERS} letters, "
            f"digits, '_', '-' and '.'"
        )


def check_table_spec(spec: TableSpec) -> None:
    """Raises SpecError if the spec is invalid."""
    if not 1 <= spec.dim <= MAX_DIM:
        raise SpecError(f"table {spec.name!r} has dim {spec.dim}, expected 1 to {MAX_DIM}")
    if spec.num_shards.bit_count() != 1 or not 1 <= spec.num_shards <= MAX_SHARDS:
        raise SpecError(
            f"table {spec.name!r} has {spec.num_shards} shards, expected a power of two of at most "
            f"{MAX_SHARDS}"
        )
    check_name(spec.name)
    Tuning(spec.optimizer)
    build_initializer(spec.initializer, spec.seed, spec.name)
    _check_feature_life(spec)
    max_rows_of_shard(spec)


def check_dense_spec(spec: DenseSpec) -> None:
    """Raises SpecError if the spec is invalid."""
    check_name(spec.name)
    optimizer = optimizer_of(spec.optimizer)
    if not optimizer.is_elementwise:
        raise SpecError(
            f"dense block {spec.name!r} has optimizer {optimizer.name!r}, which is for tables only"
        )
    Tuning(spec.optimizer)
    for segment in spec.segments:
        _check_segment(spec, segment)


def _check_segment(spec: DenseSpec, segment: DenseSegment) -> None:
    named = f"dense block {spec.name!r} has"
    if segment.length < 0:  # a model without numbers has a layer for them with none
        raise SpecError(
            f"{named} a tensor {segment.name!r} with {segment.length} elements, expected 0 or more"
        )
    if segment.name and math.prod(segment.shape) != segment.length:
        raise SpecError(
            f"{named} a tensor {segment.name!r} of shape {list(segment.shape)} with {segment.length} elements"
        )
    if len(segment.values) not in (0, segment.length):
        raise SpecError(
            f"{named} {len(segment.values)} initial values for the {segment.length} elements of tensor "
            f"{segment.name!r}"
        )
    if not np.isfinite(np.array(segment.values, np.float32)).all():
        raise SpecError(
            f"{named} initial values of tensor {segment.name!r} that are not finite float32 numbers: "
            f"{list(segment.values)}"
        )
    build_initializer(segment.initializer, spec.seed, spec.name)


def _check_feature_life(spec: TableSpec) -> None:
    table = f"table {spec.name!r}"
    if spec.statistics is None:
        for name in ("admission", "expiry"):
            if getattr(spec, name) is not None:
                raise SpecError(
                    f"{table} has {name} but keeps no statistics, which {name} needs: declare statistics, too"
                )
        return
    if spec.records_changes:
        raise SpecError(
            f"{table} records changes for replicas, which have no statistics and keep removed rows: declare "
            "it without statistics, admission and expiry, or use another mode than GEO"
        )
    _require_finite(table, spec.statistics, "nonclk_coeff", "click_coeff")
    if not 0 < spec.statistics.decay <= 1:
        decay = spec.statistics.decay
        raise SpecError(f"{table} has decay {decay!r}, expected above 0 and up to 1")
    if spec.admission is not None:
        check_admission(spec.name, spec.admission, spec.num_shards)
    if spec.expiry is not None:
        limits = ("delete_threshold", "max_unseen", "ttl_s", "max_rows", "max_bytes")
        _require_finite(table, spec.expiry, *limits)
        if (evict := spec.expiry.evict) not in EVICTIONS:
            raise SpecError(f"{table} evicts by {evict!r}, expected one of {', '.join(EVICTIONS)}")


def _require_finite(table: str, spec: StatisticsSpec | ExpirySpec, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        if not 0 <= value < math.inf:  # also refuses NaN
            raise SpecError(f"{table} has {name} {value!r}, expected a finite number of at least 0")

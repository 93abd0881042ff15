"""Specs to messages and back: nothing is lost on the way."""

from hypothesis import given
from hypothesis import strategies as st

from protos.spec import (
    AdmissionSpec,
    DenseSegment,
    DenseSpec,
    ExpirySpec,
    InitializerSpec,
    OptimizerSpec,
    StatisticsSpec,
    TableSpec,
)
from protos.v1 import spec_pb2
from protos.wire import spec_messages

NAMES = st.text(min_size=1, max_size=20)
NUMBERS = st.floats(allow_nan=False)
UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
INITIALIZERS = st.builds(InitializerSpec, kind=NAMES, scale=NUMBERS)
OPTIMIZERS = st.builds(OptimizerSpec, name=NAMES, params=st.dictionaries(NAMES, NUMBERS))
STATISTICS = st.builds(StatisticsSpec, nonclk_coeff=NUMBERS, click_coeff=NUMBERS, decay=NUMBERS)
ADMISSIONS = st.builds(
    AdmissionSpec,
    policy=NAMES,
    threshold=NUMBERS,
    table=NAMES,
    counter=NAMES,
    expected_keys=UINT64,
    false_positive_rate=NUMBERS,
    default_value=NUMBERS,
)
EXPIRIES = st.builds(
    ExpirySpec,
    delete_threshold=NUMBERS,
    max_unseen=UINT64,
    ttl_s=NUMBERS,
    max_rows=UINT64,
    max_bytes=UINT64,
    evict=NAMES,
)
TABLE_SPECS = st.builds(
    TableSpec,
    name=NAMES,
    dim=UINT32,
    initializer=INITIALIZERS,
    optimizer=OPTIMIZERS,
    seed=UINT64,
    num_shards=UINT32,
    records_changes=st.booleans(),
    statistics=st.none() | STATISTICS,
    admission=st.none() | ADMISSIONS,
    expiry=st.none() | EXPIRIES,
)
DENSE_SPECS = st.builds(
    DenseSpec,
    name=NAMES,
    segments=st.lists(
        st.builds(DenseSegment, length=UINT64, initializer=INITIALIZERS), max_size=4
    ).map(tuple),
    optimizer=OPTIMIZERS,
    seed=UINT64,
)


@given(spec=TABLE_SPECS)
def test_table_spec_survives_the_wire(spec: TableSpec) -> None:
    data = spec_messages.table_spec_to_message(spec).SerializeToString()

    assert spec_messages.table_spec_from_message(spec_pb2.TableSpec.FromString(data)) == spec


@given(spec=DENSE_SPECS)
def test_dense_spec_survives_the_wire(spec: DenseSpec) -> None:
    data = spec_messages.dense_spec_to_message(spec).SerializeToString()

    assert spec_messages.dense_spec_from_message(spec_pb2.DenseSpec.FromString(data)) == spec

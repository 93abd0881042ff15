"""Specs to messages and back: nothing is lost on the way."""

from hypothesis import given
from hypothesis import strategies as st

from protos import spec_messages
from protos.spec import DenseSegment, DenseSpec, InitializerSpec, OptimizerSpec, TableSpec
from protos.v1 import spec_pb2

NAMES = st.text(min_size=1, max_size=20)
NUMBERS = st.floats(allow_nan=False)
UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
INITIALIZERS = st.builds(InitializerSpec, kind=NAMES, scale=NUMBERS)
OPTIMIZERS = st.builds(OptimizerSpec, name=NAMES, params=st.dictionaries(NAMES, NUMBERS))
TABLE_SPECS = st.builds(
    TableSpec,
    name=NAMES,
    dim=UINT32,
    initializer=INITIALIZERS,
    optimizer=OPTIMIZERS,
    seed=UINT64,
    num_shards=UINT32,
    records_changes=st.booleans(),
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

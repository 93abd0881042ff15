"""Specs <-> messages, both ways, once.

Only these modules take messages apart: servers and clients see dataclasses and arrays.
"""

from protos.spec import DenseSegment, DenseSpec, InitializerSpec, OptimizerSpec, TableSpec
from protos.v1 import spec_pb2


def optimizer_to_message(spec: OptimizerSpec) -> spec_pb2.OptimizerSpec:
    """Returns the message of an optimizer spec."""
    return spec_pb2.OptimizerSpec(
        name=spec.name,
        params=[
            spec_pb2.HyperParameter(name=name, value=value) for name, value in spec.params.items()
        ],
    )


def optimizer_from_message(message: spec_pb2.OptimizerSpec) -> OptimizerSpec:
    """Returns the optimizer spec of a message."""
    return OptimizerSpec(
        name=message.name, params={param.name: param.value for param in message.params}
    )


def initializer_to_message(spec: InitializerSpec) -> spec_pb2.InitializerSpec:
    """Returns the message of an initializer spec."""
    return spec_pb2.InitializerSpec(kind=spec.kind, scale=spec.scale)


def initializer_from_message(message: spec_pb2.InitializerSpec) -> InitializerSpec:
    """Returns the initializer spec of a message."""
    return InitializerSpec(kind=message.kind, scale=message.scale)


def table_spec_to_message(spec: TableSpec) -> spec_pb2.TableSpec:
    """Returns the message of a table spec."""
    return spec_pb2.TableSpec(
        name=spec.name,
        dim=spec.dim,
        initializer=initializer_to_message(spec.initializer),
        optimizer=optimizer_to_message(spec.optimizer),
        seed=spec.seed,
        num_shards=spec.num_shards,
        records_changes=spec.records_changes,
    )


def table_spec_from_message(message: spec_pb2.TableSpec) -> TableSpec:
    """Returns the table spec of a message."""
    return TableSpec(
        name=message.name,
        dim=message.dim,
        initializer=initializer_from_message(message.initializer),
        optimizer=optimizer_from_message(message.optimizer),
        seed=message.seed,
        num_shards=message.num_shards,
        records_changes=message.records_changes,
    )


def dense_spec_to_message(spec: DenseSpec) -> spec_pb2.DenseSpec:
    """Returns the message of a dense spec."""
    return spec_pb2.DenseSpec(
        name=spec.name,
        segments=[
            spec_pb2.DenseSegment(
                length=segment.length, initializer=initializer_to_message(segment.initializer)
            )
            for segment in spec.segments
        ],
        optimizer=optimizer_to_message(spec.optimizer),
        seed=spec.seed,
    )


def dense_spec_from_message(message: spec_pb2.DenseSpec) -> DenseSpec:
    """Returns the dense spec of a message."""
    return DenseSpec(
        name=message.name,
        segments=tuple(
            DenseSegment(
                length=segment.length, initializer=initializer_from_message(segment.initializer)
            )
            for segment in message.segments
        ),
        optimizer=optimizer_from_message(message.optimizer),
        seed=message.seed,
    )

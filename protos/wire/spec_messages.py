"""Specs <-> messages, both ways, once.

Only these modules take messages apart: servers and clients see dataclasses and arrays.
"""

from dataclasses import asdict

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


def statistics_to_message(spec: StatisticsSpec) -> spec_pb2.StatisticsSpec:
    """Returns the message of a statistics spec."""
    return spec_pb2.StatisticsSpec(**asdict(spec))


def statistics_from_message(message: spec_pb2.StatisticsSpec) -> StatisticsSpec:
    """Returns the statistics spec of a message."""
    return StatisticsSpec(
        nonclk_coeff=message.nonclk_coeff, click_coeff=message.click_coeff, decay=message.decay
    )


def admission_to_message(spec: AdmissionSpec) -> spec_pb2.AdmissionSpec:
    """Returns the message of an admission spec."""
    return spec_pb2.AdmissionSpec(**asdict(spec))


def admission_from_message(message: spec_pb2.AdmissionSpec) -> AdmissionSpec:
    """Returns the admission spec of a message."""
    return AdmissionSpec(
        policy=message.policy,
        threshold=message.threshold,
        table=message.table,
        counter=message.counter,
        expected_keys=message.expected_keys,
        false_positive_rate=message.false_positive_rate,
        default_value=message.default_value,
    )


def expiry_to_message(spec: ExpirySpec) -> spec_pb2.ExpirySpec:
    """Returns the message of an expiry spec."""
    return spec_pb2.ExpirySpec(**asdict(spec))


def expiry_from_message(message: spec_pb2.ExpirySpec) -> ExpirySpec:
    """Returns the expiry spec of a message."""
    return ExpirySpec(
        delete_threshold=message.delete_threshold,
        max_unseen=message.max_unseen,
        ttl_s=message.ttl_s,
        max_rows=message.max_rows,
        max_bytes=message.max_bytes,
        evict=message.evict,
    )


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
        statistics=statistics_to_message(spec.statistics) if spec.statistics else None,
        admission=admission_to_message(spec.admission) if spec.admission else None,
        expiry=expiry_to_message(spec.expiry) if spec.expiry else None,
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
        statistics=statistics_from_message(message.statistics)
        if message.HasField("statistics")
        else None,
        admission=admission_from_message(message.admission)
        if message.HasField("admission")
        else None,
        expiry=expiry_from_message(message.expiry) if message.HasField("expiry") else None,
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

"""The wire: arrays and dataclasses as protobuf messages, errors as gRPC statuses, options of channels."""

"""Requests that no client sends, built field by field from valid values and extremes."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

from ctr_ps.protos.placement import FIRST_EPOCH
from tests.support.stores import INCARNATION

DIM = 2
WORDS = [
    "",
    "t",
    "d",
    "s",
    "sgd",
    "adam",
    "uniform",
    "count",
    "bloom",
    "lru",
    "float16",
    "x" * 5000,
]
SPECIAL = [float("nan"), float("inf"), -1.0, 0.0, 0.5, 1e300]
KINDS = FieldDescriptor

VALID = {
    "shard_map_epoch": FIRST_EPOCH,
    "table": "t",
    "block": "d",
    "keys": np.ones(1, np.uint64).tobytes(),
    "values": np.full(DIM, 0.1, np.float32).tobytes(),
    "counts": None,
    "weights": np.full(DIM, 0.1, np.float32).tobytes(),
    "state": None,
    "element_state": None,
    "scalars": None,
    "num_states": None,
    "optimizer": "sgd",
    "stop": DIM,
    "start": None,
    "chunk": None,
    "num_chunks": 1,
    "worker": 0,
    "incarnation": INCARNATION,
    "examples": 1,
    "weight": None,
    "at": None,
}
"""What these fields have nine times out of ten; None: nothing."""


def bytes_of(rng: random.Random) -> bytes:
    """Returns keys, floats (finite or not), or bytes of an impossible length."""
    size = rng.choice([0, 1, 1, 2, 3])
    numbers = np.array([rng.choice([0.1, 0.1, 0.2, *SPECIAL[:2]]) for _ in range(size * DIM)])
    return rng.choice(
        [
            np.array([rng.choice([1, 2, 3, 2**64 - 1]) for _ in range(size)], np.uint64).tobytes(),
            np.full(size, 2, np.uint64).tobytes(),
            numbers.astype(np.float32).tobytes(),
            numbers.astype(np.float64).tobytes(),
            rng.randbytes(rng.choice([0, 3, 12])),
        ]
    )


SCALARS: dict[int, Callable[[random.Random], Any]] = {
    KINDS.TYPE_BOOL: lambda rng: rng.random() < 0.5,
    KINDS.TYPE_BYTES: bytes_of,
    KINDS.TYPE_DOUBLE: lambda rng: rng.choice([0.1, 1.0, *SPECIAL]),
    KINDS.TYPE_ENUM: lambda rng: rng.choice([0, 1, 2, 3, 99]),
    KINDS.TYPE_STRING: lambda rng: rng.choice(WORDS),
    KINDS.TYPE_UINT32: lambda rng: rng.choice([0, 0, 0, 1, 1, 2, DIM, 64, 2**31, 2**32 - 1]),
    KINDS.TYPE_UINT64: lambda rng: rng.choice([0, 0, 1, 1, 2, 16, 2**32, 2**63, 2**64 - 1]),
}


def fill(message: Any, rng: random.Random) -> Any:
    """Fills most fields of a message."""
    for field in message.DESCRIPTOR.fields:
        if (
            field.name in VALID
            and not field.is_repeated
            and not field.message_type
            and rng.random() < 0.9
        ):
            if (valid := VALID[field.name]) is not None:
                setattr(message, field.name, valid)
        elif rng.random() < 0.1:
            continue
        elif field.message_type and field.message_type.GetOptions().map_entry:
            fill_map(getattr(message, field.name), field, rng)
        elif field.is_repeated:
            for _ in range(rng.choice([0, 1, 1, 2])):
                each = getattr(message, field.name)
                if field.message_type:
                    fill(each.add(), rng)
                else:
                    each.append(SCALARS[field.type](rng))
        elif field.message_type:
            getattr(message, field.name).SetInParent()
            fill(getattr(message, field.name), rng)
        else:
            setattr(message, field.name, SCALARS[field.type](rng))
    return message


def fill_map(entries: Any, field: FieldDescriptor, rng: random.Random) -> None:
    assert field.message_type is not None
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    for _ in range(rng.choice([0, 1, 2])):
        name = SCALARS[key.type](rng)
        if value.message_type:
            fill(entries[name], rng)
        else:
            entries[name] = SCALARS[value.type](rng)

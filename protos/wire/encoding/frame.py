"""Frames: the bytes of a protobuf message, with its columns of numbers copied once.

    fields of a message --columns------> tag, length, view of the array --.
                        `-all others---> protobuf -------------------------`--joined--> bytes

Protobuf itself would copy a column four times: into an object of bytes, into the message, into its buffer,
and out of that. Fields may stand in any order on the wire, so protobuf's part and the columns after it are
one message (https://protobuf.dev/programming-guides/encoding/#order).
"""

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

_LENGTH_DELIMITED = 2
"""Wire type of bytes and messages."""

Part = bytes | memoryview


class Frame:
    """Writes messages of one type."""

    def __init__(self, message: Descriptor) -> None:
        self._class = GetMessageClass(message)
        self._tags: dict[str, bytes] = {}
        self._within: dict[str, Frame] = {}
        for field in message.fields:
            if field.message_type and not field.message_type.GetOptions().map_entry:
                inner = Frame(field.message_type)
                if not inner._tags:
                    continue
                self._within[field.name] = inner
            elif field.type != FieldDescriptor.TYPE_BYTES:
                continue
            self._tags[field.name] = _varint(field.number << 3 | _LENGTH_DELIMITED)

    def bytes_of(self, fields: Mapping[str, Any]) -> bytes:
        """Returns a message of the arguments of its class; columns are views, messages with columns dicts."""
        parts: list[Part] = []
        self._write(fields, parts)
        return b"".join(parts)

    def _write(self, fields: Mapping[str, Any], parts: list[Part]) -> int:
        """Appends the parts of a message; returns their number of bytes."""
        others, num_bytes = {}, 0
        for name, value in fields.items():
            if isinstance(value, memoryview):
                num_bytes += _write_head(self._tags[name], len(value), parts) + len(value)
                parts.append(value)
            elif name in self._within and value is not None:
                for each in [value] if isinstance(value, Mapping) else value:
                    num_bytes += self._write_within(name, each, parts)
            else:
                others[name] = value
        if others:
            parts.append(self._class(**others).SerializeToString())
            num_bytes += len(parts[-1])
        return num_bytes

    def _write_within(self, name: str, fields: Mapping[str, Any], parts: list[Part]) -> int:
        at = len(parts)
        length = self._within[name]._write(fields, parts)
        head: list[Part] = []
        num_bytes = _write_head(self._tags[name], length, head) + length
        parts[at:at] = head
        return num_bytes


def _write_head(tag: bytes, length: int, parts: list[Part]) -> int:
    head = tag + _varint(length)
    parts.append(head)
    return len(head)


def _varint(number: int) -> bytes:
    """Encodes a number in groups of seven bits, the lowest first."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)

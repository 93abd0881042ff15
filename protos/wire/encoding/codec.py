"""Dataclasses <-> messages, field by field: same names, encoded by type.

    int, float, str, bool, bytes      as they are
    Numbers                           bytes: see arrays.py
    X | None                          an optional field; None: absent
    enum.Enum                         an enum of the same names; unknown ones are refused
    Literal["a", "b"]                 a string; others are refused
    a dataclass                       a required message
    Sequence, tuple, frozenset        a repeated field
    Mapping                           a map

Columns of keys and values, which differ on the two sides, have codecs of their own in columns.py.
"""

import enum
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from operator import attrgetter
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from ctr_ps.protos.errors import ProtocolError
from ctr_ps.protos.limits import MAX_SEGMENTS
from ctr_ps.protos.store import Numbers
from ctr_ps.protos.wire.encoding.arrays import decode_numbers, encode_numbers

T = TypeVar("T")

_PLAIN = (int, float, str, bool, bytes)
_REPEATED: Mapping[Any, Callable[[Any], Any]] = {Sequence: list, tuple: tuple, frozenset: frozenset}

_MOST: Mapping[str, int] = {"ctr_ps.v1.DenseSpec.segments": MAX_SEGMENTS}
"""Elements of repeated fields, of which millions fit a message: decoding them would take a minute."""

_LENGTH_DELIMITED = 2
"""Wire type of bytes and messages."""

Part = bytes | memoryview


@dataclass(frozen=True, slots=True, eq=False)
class FieldCodec(Generic[T]):
    """Encodes a value as the constructor's argument for a field, and decodes the field's value.

    A message is encoded as a dict of its fields: a message object would be copied into the outer one. A
    column is a memoryview.
    """

    encode: Callable[[T], Any]
    decode: Callable[[Any], T]


class Frame:
    """Writes messages of one type, with their columns of numbers copied once.

        fields of a message --columns------> tag, length, view of the array --.
                            `-all others---> protobuf -------------------------`--joined--> bytes

    Protobuf itself would copy a column four times: into an object of bytes, into the message, into its
    buffer, and out of that. Fields may stand in any order on the wire, so protobuf's part and the columns
    after it are one message (https://protobuf.dev/programming-guides/encoding/#order).
    """

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
        return b"".join(self._parts_of(fields))

    def _parts_of(self, fields: Mapping[str, Any]) -> list[Part]:
        parts: list[Part] = []
        others = {}
        for name, value in fields.items():
            if isinstance(value, memoryview):
                parts += self._tags[name] + _varint(len(value)), value
            elif name in self._within and value is not None:
                for each in [value] if isinstance(value, dict) else value:
                    within = self._within[name]._parts_of(each)
                    parts += self._tags[name] + _varint(sum(map(len, within))), *within
            else:
                others[name] = value
        if others:
            parts.append(self._class(**others).SerializeToString())
        return parts


def _varint(number: int) -> bytes:
    """Encodes a number in groups of seven bits, the lowest first."""
    if number <= 0x7F:
        return number.to_bytes()
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


class Codec(Generic[T]):
    """Values <-> messages of one type; `fields` is for such a message within another one."""

    def __init__(self, message: Descriptor, fields: FieldCodec[T]) -> None:
        self.message: type[Any] = GetMessageClass(message)
        self.fields = fields
        self._frame = Frame(message)

    def encode(self, value: T) -> bytes:
        """Returns the bytes of a value's message; columns are copied once."""
        return self._frame.bytes_of(self.fields.encode(value))

    def decode(self, data: bytes) -> T:
        """Returns the value of a message; raises ProtocolError if the bytes are no valid message."""
        try:
            found = self.message.FromString(data)
        except DecodeError as error:
            raise ProtocolError(
                f"{len(data)} bytes cannot be decoded as {self.message.DESCRIPTOR.name}"
            ) from error
        return self.fields.decode(found)


CodecOf = Callable[[Descriptor], Codec[T]]
"""Makes the codec for a type of message; raises TypeError if its fields are not those of the values."""


def no_fields(message: Descriptor) -> Codec[None]:
    """Codec of a message without fields, for None."""
    return Codec(message, FieldCodec(lambda _: {}, lambda _: None))


def record(class_: type[T], **columns: FieldCodec[Any]) -> CodecOf[T]:
    """Codec of a message with the fields of a dataclass; `columns` are the codecs of its arrays."""
    return lambda message: Codec(message, _record(class_, message, columns))


def whole(class_: type[T], codec: FieldCodec[T]) -> CodecOf[T]:
    """As `record`, with one codec for the whole message: a field of it says how its columns are encoded."""

    def make(message: Descriptor) -> Codec[T]:
        _require_names({field.name for field in fields(class_)}, message, class_)  # type: ignore[arg-type]
        return Codec(message, codec)

    return make


def value(name: str, annotation: Any, codec: FieldCodec[Any] | None = None) -> CodecOf[Any]:
    """Codec of a message whose only field is the value; without `codec` it follows from the type."""

    def make(message: Descriptor) -> Codec[Any]:
        _require_names({name}, message, annotation)
        inner = codec or _codec_of(annotation, message.fields_by_name[name])
        must_be_there = message.fields_by_name[name].has_presence

        def decode(found: Any) -> Any:
            if must_be_there and not found.HasField(name):
                raise ProtocolError(f"{message.name} has no {name}")
            return inner.decode(getattr(found, name))

        return Codec(message, FieldCodec(lambda value: {name: inner.encode(value)}, decode))

    return make


def _require_names(names: set[str], message: Descriptor, what: Any) -> None:
    if names != set(message.fields_by_name):
        raise TypeError(
            f"{what} has the fields {sorted(names)}, but its message {message.full_name} has "
            f"{sorted(message.fields_by_name)}"
        )


def _record(
    record: type[T], message: Descriptor, overrides: Mapping[str, FieldCodec[Any]]
) -> FieldCodec[T]:
    names = [field.name for field in fields(record)]  # type: ignore[arg-type]
    _require_names(set(names), message, record)
    hints = get_type_hints(record)
    described = message.fields_by_name
    codecs = {
        name: overrides.get(name) or _codec_of(_without_none(hints[name]), described[name])
        for name in names
    }
    converted = {name: codec for name, codec in codecs.items() if codec is not _AS_IS}
    optional = frozenset(name for name in names if _without_none(hints[name]) != hints[name])
    present = [name for name in names if described[name].has_presence]
    fields_of = attrgetter(*names, names[0]) if names else lambda _: ()  # of two or more: a tuple
    for name in optional.difference(present):
        raise TypeError(f"{described[name].full_name} is not optional, but is in {record}")

    def encode(value: T) -> dict[str, Any]:
        found = dict(zip(names, fields_of(value), strict=False))
        for name, codec in converted.items():
            if found[name] is not None:
                found[name] = codec.encode(found[name])
        return found

    def decode(found: Any) -> T:
        values = dict(zip(names, fields_of(found), strict=False))
        for name in present:
            if not found.HasField(name):
                if name not in optional:
                    raise ProtocolError(f"{found.DESCRIPTOR.name} has no {name}")
                values[name] = None
        for name, codec in converted.items():
            if values[name] is not None:
                values[name] = codec.decode(values[name])
        return record(**values)

    return FieldCodec(encode, decode)


def _without_none(annotation: Any) -> Any:
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation
    (other,) = (each for each in get_args(annotation) if each is not types.NoneType)
    return other


def _codec_of(annotation: Any, field: FieldDescriptor) -> FieldCodec[Any]:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation in _PLAIN:
        return _AS_IS
    if annotation == Numbers:
        return FieldCodec(encode_numbers, decode_numbers)
    if isinstance(annotation, type) and is_dataclass(annotation):
        return _record(annotation, _message_of(field), {})
    if origin is Literal or (isinstance(annotation, type) and issubclass(annotation, enum.Enum)):
        return _choice(annotation, field)
    if origin in _REPEATED:
        return _repeated(_codec_of(arguments[0], field), _REPEATED[origin], field)
    if origin is Mapping:
        return _mapping(arguments[1], _message_of(field).fields_by_name["value"])
    raise TypeError(f"{field.full_name}: no codec for {annotation}")


def _message_of(field: FieldDescriptor) -> Descriptor:
    if field.message_type is None:
        raise TypeError(f"{field.full_name} is not a message")
    return field.message_type


def _choice(annotation: Any, field: FieldDescriptor) -> FieldCodec[Any]:
    if field.enum_type is None:
        codes = {name: name for name in get_args(annotation)}
    else:
        numbers = {value.name: value.number for value in field.enum_type.values}
        prefix = field.enum_type.values[0].name.removesuffix("UNSPECIFIED")
        codes = {member: numbers[prefix + member.name] for member in annotation}
    values = {code: value for value, code in codes.items()}
    place = ".".join(field.full_name.split(".")[-2:])
    expected = ", ".join(getattr(value, "name", value) for value in codes)

    def decode(code: Any) -> Any:
        if code not in values:
            raise ProtocolError(f"{place} is {code!r}, expected one of {expected}")
        return values[code]

    return FieldCodec(codes.__getitem__, decode)


def _repeated(
    each: FieldCodec[Any], collect: Callable[[Any], Any], field: FieldDescriptor
) -> FieldCodec[Any]:
    most = _MOST.get(field.full_name)
    is_as_is = each is _AS_IS

    def decode(found: Any) -> Any:
        if most is not None and len(found) > most:
            raise ProtocolError(
                f"{field.full_name} has {len(found)} elements, expected up to {most}"
            )
        return collect(found if is_as_is else map(each.decode, found))

    def encode(values: Any) -> list[Any]:
        return list(values) if is_as_is else [each.encode(value) for value in values]

    return FieldCodec(encode, decode)


def _mapping(annotation: Any, field: FieldDescriptor) -> FieldCodec[Any]:
    inner = _codec_of(annotation, field)
    # A map takes no dicts for its messages.
    make = GetMessageClass(field.message_type) if field.message_type else None

    def encode(values: Mapping[Any, Any]) -> dict[Any, Any]:
        encoded = {key: inner.encode(value) for key, value in values.items()}
        return {key: make(**value) for key, value in encoded.items()} if make else encoded

    return FieldCodec(
        encode, lambda found: {key: inner.decode(value) for key, value in found.items()}
    )


_AS_IS: FieldCodec[Any] = FieldCodec(lambda value: value, lambda found: found)

"""Messages that are almost right: bytes for services that must survive them.

    for data in mutants([request], 10_000, seed=1):
        ...

A third is noise and damaged bytes, which mostly are no message at all; the rest are messages
whose fields have other values, are missing, or are there too often, which get further.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

MAX_NOISE_BYTES = 300
MAX_COPIES = 5
NUMBERS_CHANGED = 3
"""At most, of one message."""
_INTEGER_BITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (0, 2**31 - 1),
}
_FLOATS = (0.0, -0.0, -1.0, 0.5, 1e30, -1e30, math.nan, math.inf, -math.inf)
_TEXTS = ("", "x", "\0", "\n", "x" * 5000, "[::1]:1", "host:port", "ü\U0001f600", "-1", "%s{}")


def mutants(messages: Sequence[Message], count: int, *, seed: int) -> Iterator[bytes]:
    """`count` serialized mutants of the messages, the same for the same seed."""
    generator = random.Random(seed)
    valid = [message.SerializeToString() for message in messages]
    for index in range(count):
        if index % 3 == 0:
            yield _damaged(generator, valid)
        else:
            yield mutated_message(generator, generator.choice(messages)).SerializeToString()


def mutated_message(generator: random.Random, message: Message) -> Message:
    """A copy with up to `NUMBERS_CHANGED` of its fields changed, at any depth."""
    copy = type(message)()
    copy.CopyFrom(message)
    for _ in range(generator.randint(1, NUMBERS_CHANGED)):
        _change_one(generator, copy)
    return copy


def _damaged(generator: random.Random, valid: Sequence[bytes]) -> bytes:
    data = bytearray(generator.choice(valid))
    match generator.randrange(6):
        case 0:
            return generator.randbytes(generator.randrange(MAX_NOISE_BYTES))
        case 1:
            return bytes(data[: generator.randrange(len(data) + 1)])
        case 2:
            return bytes(data) + generator.randbytes(generator.randrange(1, 20))
        case 3:
            return bytes(data + generator.choice(valid)) * generator.randint(1, MAX_COPIES)
        case 4:
            at = generator.randrange(len(data) + 1)
            return bytes(data[:at]) + b"\xff" * generator.randint(1, 11) + bytes(data[at:])
        case _:
            for _ in range(generator.randint(1, 8)):
                if data:
                    data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
            return bytes(data)


def _change_one(generator: random.Random, message: Message) -> None:
    """Goes down a random way and changes the field at its end."""
    while message.DESCRIPTOR.fields:
        field = generator.choice(message.DESCRIPTOR.fields)
        if field.type != FieldDescriptor.TYPE_MESSAGE or generator.random() < 0.3:
            break
        inner = _inner(generator, message, field)
        if inner is None:
            break
        message = inner
    else:
        return
    if generator.random() < 0.2:
        message.ClearField(field.name)
    elif field.is_repeated:
        _change_repeated(generator, message, field)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        getattr(message, field.name).SetInParent()
    else:
        setattr(message, field.name, _value(generator, field))


def _inner(generator: random.Random, message: Message, field: FieldDescriptor) -> Message | None:
    value = getattr(message, field.name)
    if not field.is_repeated:
        return value
    if _is_map(field):
        return None
    return generator.choice(value) if value else value.add()


def _change_repeated(generator: random.Random, message: Message, field: FieldDescriptor) -> None:
    values = getattr(message, field.name)
    if _is_map(field):
        key, value = field.message_type.fields
        if value.type == FieldDescriptor.TYPE_MESSAGE:
            values[_value(generator, key)].SetInParent()
        else:
            values[_value(generator, key)] = _value(generator, value)
    elif values and generator.random() < 0.3:
        del values[generator.randrange(len(values))]
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        values.add().CopyFrom(generator.choice(values) if values else values.add())
    elif values and generator.random() < 0.5:
        values[generator.randrange(len(values))] = _value(generator, field)
    else:
        values.extend([_value(generator, field)] * generator.choice((1, 2, 300)))


def _is_map(field: FieldDescriptor) -> bool:
    return field.type == FieldDescriptor.TYPE_MESSAGE and field.message_type.GetOptions().map_entry


def _value(generator: random.Random, field: FieldDescriptor) -> Any:
    if field.cpp_type in _INTEGER_BITS:
        least, most = _INTEGER_BITS[field.cpp_type]
        near = generator.randrange(40)
        return generator.choice((least, most, near, near, generator.randint(least, most)))
    if field.cpp_type in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
        return generator.choice(_FLOATS)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return generator.random() < 0.5
    if field.type == FieldDescriptor.TYPE_BYTES:
        return generator.randbytes(generator.randrange(20))
    return generator.choice(_TEXTS)

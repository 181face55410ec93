"""What in the present protos would break a client or a peer of the last release.

Both sides are descriptor sets. Compared by full name over the whole package, so
that moving a message to another file of it is allowed. Reported are: anything
removed or renamed, a field or enum value under another number, another type,
label, presence, packing, JSON name or oneof, another request or response type,
other streaming, and a reservation that is given up. Adding is free.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)


@dataclass(slots=True)
class _Contract:
    """A descriptor set by full name."""

    messages: dict[str, DescriptorProto] = field(default_factory=dict)
    enums: dict[str, EnumDescriptorProto] = field(default_factory=dict)
    services: dict[str, dict[str, MethodDescriptorProto]] = field(default_factory=dict)


def breaking_changes(released: FileDescriptorSet, present: FileDescriptorSet) -> tuple[str, ...]:
    """Every change that breaks, in order of name; empty where there is none."""
    before, after = _contract(released), _contract(present)
    findings: list[str] = []
    for name, message in sorted(before.messages.items()):
        findings.extend(_message_changes(name, message, after.messages.get(name)))
    for name, enum in sorted(before.enums.items()):
        findings.extend(_enum_changes(name, enum, after.enums.get(name)))
    for name, methods in sorted(before.services.items()):
        findings.extend(_service_changes(name, methods, after.services.get(name)))
    return tuple(findings)


def _contract(descriptors: FileDescriptorSet) -> _Contract:
    contract = _Contract()
    for file in descriptors.file:
        prefix = f"{file.package}." if file.package else ""
        for message in file.message_type:
            _add_message(contract, prefix, message)
        for enum in file.enum_type:
            contract.enums[prefix + enum.name] = enum
        for service in file.service:
            methods = {method.name: method for method in service.method}
            contract.services[prefix + service.name] = methods
    return contract


def _add_message(contract: _Contract, prefix: str, message: DescriptorProto) -> None:
    name = prefix + message.name
    contract.messages[name] = message
    for nested in message.nested_type:
        _add_message(contract, f"{name}.", nested)
    for enum in message.enum_type:
        contract.enums[f"{name}.{enum.name}"] = enum


def _message_changes(
    name: str, before: DescriptorProto, after: DescriptorProto | None
) -> Iterator[str]:
    if after is None:
        yield f"message {name} was removed"
        return
    by_number = {member.number: member for member in after.field}
    number_by_name = {member.name: member.number for member in after.field}
    for old in before.field:
        new = by_number.get(old.number)
        if old.name in number_by_name and number_by_name[old.name] != old.number:
            yield (
                f"field {name}.{old.name} has number {number_by_name[old.name]}, "
                f"not {old.number} as released"
            )
        elif new is None:
            yield f"field {name}.{old.name} (number {old.number}) was removed"
        else:
            yield from _field_changes(name, before, old, after, new)
    yield from _lost_reservations(
        f"message {name}",
        [(r.start, r.end - 1) for r in before.reserved_range],
        [(r.start, r.end - 1) for r in after.reserved_range],
        set(before.reserved_name) - set(after.reserved_name),
    )


def _field_changes(
    message_name: str,
    before: DescriptorProto,
    old: FieldDescriptorProto,
    after: DescriptorProto,
    new: FieldDescriptorProto,
) -> Iterator[str]:
    facts_before = _field_facts(before, old)
    facts_after = _field_facts(after, new)
    for fact, was in facts_before.items():
        now = facts_after[fact]
        if was != now:
            yield (
                f"field {message_name}.{old.name} (number {old.number}): "
                f"{fact} is {now}, not {was} as released"
            )


def _field_facts(message: DescriptorProto, member: FieldDescriptorProto) -> dict[str, str]:
    """What peers and clients rely on, as text."""
    oneof = "none"
    if member.HasField("oneof_index") and not member.proto3_optional:
        oneof = message.oneof_decl[member.oneof_index].name
    type_name = member.type_name.lstrip(".")
    if not type_name:
        type_name = FieldDescriptorProto.Type.Name(member.type).removeprefix("TYPE_").lower()
    label = FieldDescriptorProto.Label.Name(member.label).removeprefix("LABEL_").lower()
    packed = member.options.packed if member.options.HasField("packed") else True
    return {
        "name": member.name,
        "type": type_name,
        "label": "singular" if label == "optional" else label,
        "presence": "explicit" if member.proto3_optional else "implicit",
        "packing": "packed" if packed else "unpacked",
        "JSON name": member.json_name,
        "oneof": oneof,
    }


def _enum_changes(
    name: str, before: EnumDescriptorProto, after: EnumDescriptorProto | None
) -> Iterator[str]:
    if after is None:
        yield f"enum {name} was removed"
        return
    names_by_number: dict[int, set[str]] = {}
    for value in after.value:
        names_by_number.setdefault(value.number, set()).add(value.name)
    number_by_name = {value.name: value.number for value in after.value}
    for value in before.value:
        if value.name in names_by_number.get(value.number, ()):
            continue
        if value.name in number_by_name:
            yield (
                f"enum value {name}.{value.name} has number {number_by_name[value.name]}, "
                f"not {value.number} as released"
            )
        elif value.number in names_by_number:
            others = ", ".join(sorted(names_by_number[value.number]))
            yield f"enum value {name}.{value.name} (number {value.number}) is now {others}"
        else:
            yield f"enum value {name}.{value.name} (number {value.number}) was removed"
    yield from _lost_reservations(
        f"enum {name}",
        [(r.start, r.end) for r in before.reserved_range],
        [(r.start, r.end) for r in after.reserved_range],
        set(before.reserved_name) - set(after.reserved_name),
    )


def _service_changes(
    name: str,
    before: dict[str, MethodDescriptorProto],
    after: dict[str, MethodDescriptorProto] | None,
) -> Iterator[str]:
    if after is None:
        yield f"service {name} was removed"
        return
    for method_name, old in before.items():
        new = after.get(method_name)
        if new is None:
            yield f"rpc {name}.{method_name} was removed"
            continue
        for fact, was, now in (
            ("request", old.input_type.lstrip("."), new.input_type.lstrip(".")),
            ("response", old.output_type.lstrip("."), new.output_type.lstrip(".")),
            ("client streaming", str(old.client_streaming), str(new.client_streaming)),
            ("server streaming", str(old.server_streaming), str(new.server_streaming)),
        ):
            if was != now:
                yield f"rpc {name}.{method_name}: {fact} is {now}, not {was} as released"


def _lost_reservations(
    owner: str,
    before: list[tuple[int, int]],
    after: list[tuple[int, int]],
    lost_names: set[str],
) -> Iterator[str]:
    """Ranges are inclusive. A range that was split or grown still covers what it covered."""
    for start, end in before:
        position = start
        for low, high in sorted(after):
            if low <= position <= high:
                position = high + 1
        if position <= end:
            yield f"{owner} no longer reserves number {position}"
    for lost in sorted(lost_names):
        yield f'{owner} no longer reserves name "{lost}"'

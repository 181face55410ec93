"""Style of the wire contracts, checked on descriptors with their comments.

* the package is the directory, and ends in a version ("stagemesh/v1" is `stagemesh.v1`)
* names: files, fields and oneofs lower_snake_case; messages, enums, services and
  methods PascalCase; enum values UPPER_SNAKE_CASE behind the enum's name
* services end in `Service`; method `Do` takes `DoRequest` and returns
  `DoResponse`, and no two methods share a message
* an enum's zero value ends in `_UNSPECIFIED`
* repeated numbers are packed
* everything has a comment
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

LOWER_SNAKE = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
UPPER_SNAKE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
PASCAL = re.compile(r"[A-Z][A-Za-z0-9]*")
VERSIONED_PACKAGE = re.compile(r"[a-z0-9_.]+\.v[0-9]+(alpha[0-9]+|beta[0-9]+)?")

# Field numbers of descriptor.proto: how SourceCodeInfo names a place in a file.
_FILE_PACKAGE = (2,)
_FILE_MESSAGES, _FILE_ENUMS, _FILE_SERVICES = 4, 5, 6
_MESSAGE_FIELDS, _MESSAGE_NESTED, _MESSAGE_ENUMS, _MESSAGE_ONEOFS = 2, 3, 4, 8
_ENUM_VALUES = 2
_SERVICE_METHODS = 2

Place = tuple[int, ...]


def lint(descriptors: FileDescriptorSet) -> tuple[str, ...]:
    """Every broken rule as "file:line: what is wrong", in order of file."""
    findings = [finding for file in descriptors.file for finding in _FileLint(file).run()]
    return (*findings, *_shared_messages(descriptors))


class _FileLint:
    """The rules that one file shows on its own."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        self._lines: dict[Place, int] = {}
        self._commented: set[Place] = set()
        for location in file.source_code_info.location:
            place = tuple(location.path)
            self._lines.setdefault(place, location.span[0] + 1)
            if location.leading_comments.strip() or location.trailing_comments.strip():
                self._commented.add(place)

    def run(self) -> Iterator[str]:
        yield from self._file_rules()
        for index, message in enumerate(self._file.message_type):
            yield from self._message((_FILE_MESSAGES, index), message)
        for index, enum in enumerate(self._file.enum_type):
            yield from self._enum((_FILE_ENUMS, index), enum)
        for index, service in enumerate(self._file.service):
            yield from self._service((_FILE_SERVICES, index), service)

    def _file_rules(self) -> Iterator[str]:
        path = PurePosixPath(self._file.name)
        package_of_directory = ".".join(path.parent.parts)
        if self._file.package != package_of_directory:
            yield self._finding(
                _FILE_PACKAGE,
                f"package {self._file.package} is not its directory, {package_of_directory}",
            )
        if not VERSIONED_PACKAGE.fullmatch(self._file.package):
            yield self._finding(
                _FILE_PACKAGE, f"package {self._file.package} does not end in a version"
            )
        if not LOWER_SNAKE.fullmatch(path.stem):
            yield self._finding((), f"file name {path.name} is not lower_snake_case")
        if self._file.syntax != "proto3":
            yield self._finding((), "syntax is not proto3")

    def _message(self, place: Place, message: DescriptorProto) -> Iterator[str]:
        if message.options.map_entry:
            return
        yield from self._named(place, "message", message.name, PASCAL, "PascalCase")
        for index, field in enumerate(message.field):
            yield from self._field((*place, _MESSAGE_FIELDS, index), message, field)
        synthetic = {field.oneof_index for field in message.field if field.proto3_optional}
        for index, oneof in enumerate(message.oneof_decl):
            if index not in synthetic:
                yield from self._named(
                    (*place, _MESSAGE_ONEOFS, index),
                    "oneof",
                    f"{message.name}.{oneof.name}",
                    LOWER_SNAKE,
                    "lower_snake_case",
                )
        for index, nested in enumerate(message.nested_type):
            yield from self._message((*place, _MESSAGE_NESTED, index), nested)
        for index, enum in enumerate(message.enum_type):
            yield from self._enum((*place, _MESSAGE_ENUMS, index), enum)

    def _field(
        self, place: Place, message: DescriptorProto, field: FieldDescriptorProto
    ) -> Iterator[str]:
        name = f"{message.name}.{field.name}"
        yield from self._named(place, "field", name, LOWER_SNAKE, "lower_snake_case")
        if field.options.HasField("packed") and not field.options.packed:
            yield self._finding(place, f"field {name} is not packed")

    def _enum(self, place: Place, enum: EnumDescriptorProto) -> Iterator[str]:
        yield from self._named(place, "enum", enum.name, PASCAL, "PascalCase")
        prefix = _upper_snake(enum.name) + "_"
        for index, value in enumerate(enum.value):
            value_place = (*place, _ENUM_VALUES, index)
            yield from self._named(
                value_place, "enum value", value.name, UPPER_SNAKE, "UPPER_SNAKE_CASE"
            )
            if not value.name.startswith(prefix):
                yield self._finding(value_place, f"enum value {value.name} lacks prefix {prefix}")
            if value.number == 0 and not value.name.endswith("_UNSPECIFIED"):
                yield self._finding(
                    value_place, f"zero value {value.name} does not end in _UNSPECIFIED"
                )

    def _service(self, place: Place, service: ServiceDescriptorProto) -> Iterator[str]:
        yield from self._named(place, "service", service.name, PASCAL, "PascalCase")
        if not service.name.endswith("Service"):
            yield self._finding(place, f"service {service.name} does not end in Service")
        for index, method in enumerate(service.method):
            method_place = (*place, _SERVICE_METHODS, index)
            name = f"{service.name}.{method.name}"
            yield from self._named(method_place, "rpc", name, PASCAL, "PascalCase")
            for actual, suffix in (
                (method.input_type, "Request"),
                (method.output_type, "Response"),
            ):
                expected = f".{self._file.package}.{method.name}{suffix}"
                if actual != expected:
                    yield self._finding(
                        method_place,
                        f"rpc {name} uses {actual.lstrip('.')}, not {expected.lstrip('.')}",
                    )

    def _named(
        self, place: Place, kind: str, name: str, pattern: re.Pattern[str], case: str
    ) -> Iterator[str]:
        """Case of the name's last part, and a comment."""
        if not pattern.fullmatch(name.rpartition(".")[2]):
            yield self._finding(place, f"{kind} {name} is not {case}")
        if place not in self._commented:
            yield self._finding(place, f"{kind} {name} has no comment")

    def _finding(self, place: Place, text: str) -> str:
        return f"{self._file.name}:{self._lines.get(place, 1)}: {text}"


def _shared_messages(descriptors: FileDescriptorSet) -> Iterator[str]:
    """A message that two methods use cannot change for one of them alone."""
    users: dict[str, str] = {}
    for file in descriptors.file:
        for service in file.service:
            for method in service.method:
                name = f"{service.name}.{method.name}"
                for message in (method.input_type, method.output_type):
                    other = users.setdefault(message, name)
                    if other != name or method.input_type == method.output_type:
                        yield (
                            f"{file.name}:1: rpc {name} shares {message.lstrip('.')} with {other}"
                        )


def _upper_snake(pascal: str) -> str:
    """FinishReason to FINISH_REASON, KVState to KV_STATE."""
    words: Sequence[str] = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*|[0-9]+", pascal)
    return "_".join(word.upper() for word in words)

"""Runs protoc (the one inside grpcio-tools, so its version is pinned with it)."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_tools import protoc


class ProtoError(Exception):
    """protoc refused the files (its own messages are on stderr), or there are none."""


def proto_files(proto_root: Path) -> tuple[str, ...]:
    """Every .proto file below the root, as protoc names it, in a fixed order."""
    files = sorted(path.relative_to(proto_root).as_posix() for path in proto_root.rglob("*.proto"))
    if not files:
        raise ProtoError(f"there is no .proto file below {proto_root}")
    return tuple(files)


def generate_stubs(proto_root: Path, out: Path) -> None:
    """Writes message, type and gRPC stubs for all files below `out`."""
    out.mkdir(parents=True, exist_ok=True)
    _run_protoc(
        proto_root,
        [f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"],
    )


def compile_descriptors(proto_root: Path) -> FileDescriptorSet:
    """All files as descriptors, with comments and line numbers; imports from elsewhere left out."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "all.binpb"
        _run_protoc(proto_root, [f"--descriptor_set_out={out}", "--include_source_info"])
        return FileDescriptorSet.FromString(out.read_bytes())


def without_source(descriptors: FileDescriptorSet) -> FileDescriptorSet:
    """A copy without comments and line numbers: what a release is compared by."""
    copy = FileDescriptorSet()
    copy.CopyFrom(descriptors)
    for file in copy.file:
        file.ClearField("source_code_info")
    return copy


def _run_protoc(proto_root: Path, options: Sequence[str]) -> None:
    well_known = resources.files("grpc_tools") / "_proto"
    arguments = ["protoc", f"-I{proto_root}", f"-I{well_known}", *options, *proto_files(proto_root)]
    if protoc.main(arguments) != 0:
        raise ProtoError(f"protoc refused the files below {proto_root}; its messages are above")

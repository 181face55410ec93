"""`python -m tools.protos COMMAND`: everything about the wire contracts.

    generate   write the stubs into stagemesh/v1
    drift      fail where the stubs are not what `generate` would write
    lint       fail where a .proto file breaks a rule of `tools.proto_lint`
    breaking   fail where a client or peer of the last release would break
    release    make the present contracts the released ones (part of a release)

Needs grpcio-tools alone, whose protoc makes the result the same everywhere.
Exit code 1 means findings, one a line on stdout; 2 means that protoc refused.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.message import DecodeError

from tools.proto_breaking import breaking_changes
from tools.proto_compiler import (
    ProtoError,
    compile_descriptors,
    generate_stubs,
    without_source,
)
from tools.proto_lint import lint

STUB_PATTERNS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py")
STUB_DIRECTORIES = "stagemesh/v[0-9]*"
RELEASED = Path("released") / "v1.binpb"


def generate(root: Path) -> tuple[str, ...]:
    """Writes all stubs and removes those whose .proto file is gone."""
    with tempfile.TemporaryDirectory() as directory:
        fresh = Path(directory)
        generate_stubs(root / "proto", fresh)
        wanted = _stubs(fresh)
        for stale in sorted(_stubs(root) - wanted):
            (root / stale).unlink()
        for stub in sorted(wanted):
            (root / stub).parent.mkdir(parents=True, exist_ok=True)
            (root / stub).write_bytes((fresh / stub).read_bytes())
    return ()


def drift(root: Path) -> tuple[str, ...]:
    """Stubs that are missing, changed by hand, out of date or left over."""
    remedy = "run `make proto`"
    findings = []
    with tempfile.TemporaryDirectory() as directory:
        fresh = Path(directory)
        generate_stubs(root / "proto", fresh)
        wanted, present = _stubs(fresh), _stubs(root)
        for stub in sorted(wanted | present):
            if stub not in present:
                findings.append(f"{stub} is missing; {remedy}")
            elif stub not in wanted:
                findings.append(f"{stub} has no .proto file any more; {remedy}")
            elif (fresh / stub).read_bytes() != (root / stub).read_bytes():
                findings.append(f"{stub} differs from what its .proto file gives; {remedy}")
    return tuple(findings)


def lint_protos(root: Path) -> tuple[str, ...]:
    """Broken style rules."""
    return lint(compile_descriptors(root / "proto"))


def breaking(root: Path) -> tuple[str, ...]:
    """Changes that break the released contracts."""
    path = root / "proto" / RELEASED
    try:
        released = FileDescriptorSet.FromString(path.read_bytes())
    except FileNotFoundError:
        return (f"{path} is missing: it holds the contracts of the last release",)
    except DecodeError:
        return (f"{path} is no descriptor set; take it from the last release",)
    if not released.file:
        return (f"{path} is empty; take it from the last release",)
    return breaking_changes(released, compile_descriptors(root / "proto"))


def release(root: Path) -> tuple[str, ...]:
    """Stores the present contracts as the released ones."""
    path = root / "proto" / RELEASED
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptors = without_source(compile_descriptors(root / "proto"))
    path.write_bytes(descriptors.SerializeToString(deterministic=True))
    return ()


COMMANDS: dict[str, Callable[[Path], tuple[str, ...]]] = {
    "generate": generate,
    "drift": drift,
    "lint": lint_protos,
    "breaking": breaking,
    "release": release,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.protos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument(
        "--root",
        type=Path,
        default=Path(__file__).resolve().parent.parent,
        help="directory that holds proto/ and stagemesh/ (default: this checkout)",
    )
    arguments = parser.parse_args(argv)
    try:
        findings = COMMANDS[arguments.command](arguments.root)
    except ProtoError as error:
        print(error, file=sys.stderr)
        return 2
    for finding in findings:
        print(finding)
    return 1 if findings else 0


def _stubs(root: Path) -> set[Path]:
    """Generated files of all versions, relative to `root`."""
    return {
        path.relative_to(root)
        for pattern in STUB_PATTERNS
        for path in root.glob(f"{STUB_DIRECTORIES}/{pattern}")
    }


if __name__ == "__main__":
    sys.exit(main())

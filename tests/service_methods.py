"""Every gRPC method that a server of ours may have, from the protos."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

PROTOS = Path(__file__).parents[1] / "proto" / "stagemesh" / "v1"


def own_methods() -> Iterator[MethodDescriptor]:
    """Of our services."""
    for path in sorted(PROTOS.glob("*.proto")):
        module = importlib.import_module(f"stagemesh.v1.{path.stem}_pb2")
        for service in module.DESCRIPTOR.services_by_name.values():
            yield from service.methods


def every_method() -> dict[str, MethodDescriptor]:
    """By full name, those of the libraries too that all our servers have."""
    others = [
        service
        for module in (health_pb2, reflection_pb2)
        for service in module.DESCRIPTOR.services_by_name.values()
    ]
    methods = [*own_methods(), *(method for service in others for method in service.methods)]
    return {f"/{m.containing_service.full_name}/{m.name}": m for m in methods}

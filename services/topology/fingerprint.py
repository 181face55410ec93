"""What two sides must agree on before they exchange one activation.

A fingerprint is an ordered list of named facts and a digest over them. Sides
compare field by field, so that a mismatch is an error that names the field and
both values, at join, and not a hang or wrong text later. A field that only one
side has is not compared: a gateway without torch has no torch version, and a
worker knows nothing of the model before its plan. A rank therefore acknowledges
a plan with the plan's digest after `require_equal` against its own fingerprint.

The weights' field covers the index, every header and every file size, never the
weights themselves (that takes minutes and is `doctor --deep`'s work).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from importlib import metadata
from typing import NamedTuple

from services.errors import FingerprintMismatch, JoinRefused
from services.topology.checkpoint import CheckpointFacts
from services.topology.facts import MeshShape
from services.topology.jsonfile import read_json_object
from services.topology.partition import PARTITION_ENV, format_partition, parse_partition
from stagemesh.v1 import topology_pb2
from stagemesh.version import __version__

# Distributions whose version, beside our own, decides what a rank computes or how it talks.
PACKAGES = ("torch", "torch_npu")
# They differ between copies of one model and change nothing that is computed.
_IGNORED_CONFIG_KEYS = ("_name_or_path", "transformers_version")
# The flag of `serve` that decides a field.
_FLAGS = {
    "dp_size": "--data-parallel-size",
    "tp_size": "--tensor-parallel-size",
    "pp_size": "--pipeline-parallel-size",
    "pp_layer_partition": "--pp-layer-partition",
    "dtype": "--dtype",
    "block_size": "--block-size",
    "nnodes": "--nnodes",
    "interconnect": "--interconnect",
}
_MAX_FIELDS = 100
_SHOWN_CHARACTERS = 200
_DIGESTS = {
    "config": "config.json has values of SHA-256",
    "weights": "safetensors files (names, sizes, headers) have SHA-256",
}
"""Fields whose values are digests, and of what."""
_DIGEST_CHARACTERS = 12


class Difference(NamedTuple):
    """A field in which two fingerprints differ."""

    name: str
    ours: str
    theirs: str

    def words(self, their_name: str) -> str:
        """Field and both values; `ours` is the head's."""
        if (what := _DIGESTS.get(self.name)) is not None:
            return (
                f"{self.name} differs: the head's {what} {self.ours[:_DIGEST_CHARACTERS]} and "
                f"those of {their_name} {self.theirs[:_DIGEST_CHARACTERS]}"
            )
        return (
            f"{self.name} differs: the head has {_shown(self.ours)} and {their_name} has "
            f"{_shown(self.theirs)}"
        )

    @property
    def remedy(self) -> str:
        """What makes the two equal."""
        if self.name in _DIGESTS:
            return "give every node the same copy of the model: the head's model directory"
        if self.name == "stagemesh" or self.name in PACKAGES:
            return f"install the same version of {self.name} on every node"
        flag = _FLAGS.get(self.name)
        if flag is None:
            return "restart the worker, so that it takes the head's plan"
        return f"state the same {flag} on every node"


def build_fingerprint(
    checkpoint: CheckpointFacts,
    shape: MeshShape,
    *,
    dtype: str,
    block_size: int,
    nnodes: int | None = None,
    interconnect: str = "auto",
) -> topology_pb2.Fingerprint:
    """The fingerprint of a plan, from this node's copy of the model and its packages.

    `nnodes` is None for a rank, which does not know it. An `interconnect` of "auto" states
    nothing, so it is left out and agrees with whatever another side states.
    Reads config.json of the checkpoint's directory; raises `ModelError` where it cannot.
    """
    return _from_fields(
        (
            ("config", _config_hash(checkpoint)),
            ("weights", _weights_hash(checkpoint)),
            ("dp_size", str(shape.dp_size)),
            ("tp_size", str(shape.tp_size)),
            ("pp_size", str(shape.pp_size)),
            _partition_field(shape.pp_layer_partition),
            ("dtype", dtype),
            ("block_size", str(block_size)),
            *(() if nnodes is None else (("nnodes", str(nnodes)),)),
            *(() if interconnect == "auto" else (("interconnect", interconnect),)),
            *environment_fields(),
        )
    )


def environment_fingerprint(partition: str | None = None) -> topology_pb2.Fingerprint:
    """What a worker knows before it has a plan: its package versions, and the layer partition
    where its own environment names one. Raises `PartitionError` for a partition that is none."""
    return stated_fingerprint(
        () if partition is None else parse_partition(partition, param=PARTITION_ENV)
    )


def stated_fingerprint(
    partition: Sequence[int] = (), **stated: int | str
) -> topology_pb2.Fingerprint:
    """What is known without a plan: package versions, a partition that somebody names, and
    other fields by the names that `build_fingerprint` gives them."""
    fields = [(name, str(value)) for name, value in stated.items()]
    if partition:
        fields.append(_partition_field(partition))
    return _from_fields((*fields, *environment_fields()))


def _partition_field(partition: Sequence[int]) -> tuple[str, str]:
    return ("pp_layer_partition", format_partition(partition))


def environment_fields() -> tuple[tuple[str, str], ...]:
    """Our own version, then that of every installed package of `PACKAGES`, imported by none."""
    fields = [("stagemesh", __version__)]
    for package in PACKAGES:
        try:
            fields.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            continue
    return tuple(fields)


def digest(fields: Iterable[tuple[str, str]]) -> str:
    """SHA-256, lower-case hex, over the fields in their order.

    Lengths are hashed too, so that no two lists of fields run together into the
    same bytes.
    """
    state = hashlib.sha256()
    for pair in fields:
        for text in pair:
            data = text.encode()
            state.update(len(data).to_bytes(8, "big"))
            state.update(data)
    return state.hexdigest()


def differences(
    ours: topology_pb2.Fingerprint, theirs: topology_pb2.Fingerprint
) -> tuple[Difference, ...]:
    """Our fields that the other side has with another value, in order."""
    their_values = {field.name: field.value for field in theirs.fields}
    return tuple(
        Difference(field.name, field.value, their_values[field.name])
        for field in ours.fields
        if their_values.get(field.name, field.value) != field.value
    )


def check_fingerprint(message: topology_pb2.Fingerprint) -> None:
    """Raises `JoinRefused` unless names are unique and the digest is that of the fields."""
    if len(message.fields) > _MAX_FIELDS:
        raise JoinRefused(
            f"fingerprint has {len(message.fields)} fields; at most {_MAX_FIELDS} are allowed",
            param="fingerprint.fields",
        )
    names = [field.name for field in message.fields]
    for name in names:
        if names.count(name) > 1:
            raise JoinRefused(
                f"fingerprint has field {_shown(name)} twice", param="fingerprint.fields"
            )
    expected = digest((field.name, field.value) for field in message.fields)
    if message.digest != expected:
        raise JoinRefused(
            f"fingerprint's digest is {_shown(message.digest)}, but its fields give {expected}; "
            "the message is damaged or comes from another version",
            param="fingerprint.digest",
        )


def require_equal(
    head: topology_pb2.Fingerprint,
    worker: topology_pb2.Fingerprint,
    *,
    worker_name: str = "the worker",
) -> None:
    """Raises `FingerprintMismatch` with field and both values where the two differ.

    Raises `JoinRefused` where one of them is no valid fingerprint.
    """
    check_fingerprint(head)
    check_fingerprint(worker)
    for difference in differences(head, worker):
        raise FingerprintMismatch(
            f"{difference.words(worker_name)}; {difference.remedy}", param=difference.name
        )


def _from_fields(fields: Iterable[tuple[str, str]]) -> topology_pb2.Fingerprint:
    pairs = tuple(fields)
    return topology_pb2.Fingerprint(
        digest=digest(pairs),
        fields=[topology_pb2.FingerprintField(name=name, value=value) for name, value in pairs],
    )


def _config_hash(checkpoint: CheckpointFacts) -> str:
    """Over the canonical JSON, so that spacing and order of keys do not matter."""
    config = read_json_object(checkpoint.path / "config.json")
    for key in _IGNORED_CONFIG_KEYS:
        config.pop(key, None)
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _weights_hash(checkpoint: CheckpointFacts) -> str:
    fields = [("index", checkpoint.index_sha256 or "")]
    for file in checkpoint.files:
        fields.append((file.name, f"{file.size_bytes} {file.header_sha256}"))
    return digest(fields)


def _shown(value: str) -> str:
    return value if len(value) <= _SHOWN_CHARACTERS else value[:_SHOWN_CHARACTERS] + "..."

"""What a safetensors checkpoint holds, from its headers alone: no weights are read.

    inspect_checkpoint(path)        files are whole, index and headers agree
    check_weights(checkpoint, facts)  every tensor of the family is there in its shape

Everything read is bounded and checked before use, so that a truncated or
hostile file gives a `ModelError` that names file, tensor and both values.
The format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from services.errors import ModelError
from services.topology.facts import DTYPE_BYTES, ModelFacts
from services.topology.jsonfile import parse_json_object, read_json_object
from services.topology.weights import LM_HEAD, model_weights

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# The safetensors library's own limit.
MAX_HEADER_BYTES = 100_000_000
_LENGTH_BYTES = 8
_MAX_FILES = 10_000
_MAX_DIMENSIONS = 16
_REMEDY = "the download is incomplete or damaged, download the model again"

# Bits of every element type that the format names; types below one byte come in whole bytes.
_DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
}  # fmt: skip
_TORCH_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One tensor of a file."""

    name: str
    file: str
    """File name inside the model directory."""
    dtype: str
    """Torch's spelling for the types that are served, else the format's own ("F8_E4M3")."""
    shape: tuple[int, ...]
    data_start: int
    data_end: int
    """Half-open byte range in the file, counted from the file's beginning."""

    @property
    def num_bytes(self) -> int:
        return self.data_end - self.data_start


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One safetensors file."""

    name: str
    size_bytes: int
    header_sha256: str
    """Of the header's bytes: names, types, shapes and offsets."""
    tensors: tuple[TensorFacts, ...]


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """All files of a checkpoint."""

    path: Path
    files: tuple[WeightFile, ...]
    """Ordered by name."""
    tensors: Mapping[str, TensorFacts]
    index_sha256: str | None
    """Of the index file; None where one file holds everything."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors together."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


def inspect_checkpoint(path: Path) -> CheckpointFacts:
    """Reads the headers of `path/model.safetensors`, or of the files its index names.

    Raises `ModelError` for a missing or truncated file, a header that cannot be
    right, a tensor that index and files do not agree on, or a checkpoint in
    another format.
    """
    if (path / SINGLE_FILE).is_file():
        index: dict[str, str] | None = None
        index_sha256 = None
        names = [SINGLE_FILE]
    elif (path / INDEX_FILE).is_file():
        index = _read_index(path / INDEX_FILE)
        index_sha256 = hashlib.sha256((path / INDEX_FILE).read_bytes()).hexdigest()
        names = sorted(set(index.values()))
    else:
        raise _no_weights(path)
    for name in names:
        if not (path / name).is_file():
            raise ModelError(f"{path / name} is missing, and {INDEX_FILE} names it; {_REMEDY}")
    files = tuple(read_weight_file(path / name) for name in names)
    tensors: dict[str, TensorFacts] = {}
    for file in files:
        for tensor in file.tensors:
            known = tensors.get(tensor.name)
            if known is not None and (index is None or index.get(tensor.name) != tensor.file):
                continue
            tensors[tensor.name] = tensor
    if index is not None:
        _check_index(path, index, tensors)
    return CheckpointFacts(path, files, tensors, index_sha256)


def without_weights(path: Path) -> CheckpointFacts:
    """What a device that computes nothing needs to know of a model's weights."""
    return CheckpointFacts(path, (), {}, None)


def check_weights(checkpoint: CheckpointFacts, facts: ModelFacts) -> None:
    """Raises `ModelError` unless every tensor that the model needs is there, in its
    shape and in an element type that is served. Tensors beyond those are not
    looked at, as other programs do (rotary tables, for example)."""
    for spec in model_weights(facts):
        tensor = checkpoint.tensors.get(spec.name)
        if tensor is None:
            hint = ""
            if spec.name == LM_HEAD:
                hint = "; config.json says tie_word_embeddings is false, so a head is needed"
            raise ModelError(
                f"{checkpoint.path} has no tensor {spec.name}, which {facts.architecture} with "
                f"{facts.num_hidden_layers} layers needs{hint}; {_REMEDY}"
            )
        where = f"{checkpoint.path / tensor.file}: tensor {spec.name}"
        if tensor.shape != spec.shape:
            raise ModelError(
                f"{where} has shape {list(tensor.shape)}, but config.json makes it "
                f"{list(spec.shape)}; config.json and weights belong to different models"
            )
        if tensor.dtype not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise ModelError(
                f"{where} has element type {tensor.dtype}; supported: {known}. "
                "Use an unquantized checkpoint of the model"
            )


def read_weight_file(path: Path) -> WeightFile:
    """Reads and checks one safetensors file's header. Raises `ModelError`."""
    try:
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            length_bytes = stream.read(_LENGTH_BYTES)
            if len(length_bytes) < _LENGTH_BYTES:
                raise ModelError(
                    f"{path} is {size} bytes, too short for a safetensors file; {_REMEDY}"
                )
            header_bytes = int.from_bytes(length_bytes, "little")
            if header_bytes > MAX_HEADER_BYTES:
                raise ModelError(
                    f"{path} announces a header of {header_bytes} bytes, and at most "
                    f"{MAX_HEADER_BYTES} are allowed; it is no safetensors file, or it is damaged"
                )
            data_start = _LENGTH_BYTES + header_bytes
            if data_start > size:
                raise ModelError(
                    f"{path} is {size} bytes, but its header alone ends at byte {data_start}: "
                    f"the file is truncated; {_REMEDY}"
                )
            header = stream.read(header_bytes)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    entries = parse_json_object(header, f"header of {path}")
    entries.pop("__metadata__", None)
    tensors = tuple(_tensor(path, name, entry, data_start) for name, entry in entries.items())
    _check_ranges(path, size, data_start, tensors)
    return WeightFile(path.name, size, hashlib.sha256(header).hexdigest(), tensors)


def _tensor(path: Path, name: str, entry: object, data_start: int) -> TensorFacts:
    """Checks one header entry: {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}."""
    where = f"{path}: tensor {name[:200]}"
    if not isinstance(entry, dict):
        raise ModelError(f"{where} has no description in the header; {_REMEDY}")
    dtype = entry.get("dtype")
    bits = _DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if not isinstance(dtype, str) or bits is None:
        raise ModelError(f"{where} has unknown element type {str(dtype)[:40]}")
    shape = _counts(entry.get("shape"), _MAX_DIMENSIONS)
    offsets = _counts(entry.get("data_offsets"), 2)
    if shape is None or offsets is None or len(offsets) != 2:
        raise ModelError(f"{where} has a shape or offsets that cannot be right; {_REMEDY}")
    start, end = offsets
    described = prod(shape) * bits
    if described % 8 or described // 8 != end - start:
        raise ModelError(
            f"{where} of shape {list(shape)} and type {dtype} is {described // 8} bytes, but its "
            f"offsets {start} to {end} give {end - start}; {_REMEDY}"
        )
    return TensorFacts(
        name=name,
        file=path.name,
        dtype=_TORCH_DTYPES.get(dtype, dtype),
        shape=shape,
        data_start=data_start + start,
        data_end=data_start + end,
    )


def _counts(value: object, longest: int) -> tuple[int, ...] | None:
    """A list of at most `longest` integers, each from 0 to 2**63 - 1; else None."""
    if not isinstance(value, list) or len(value) > longest:
        return None
    for item in value:
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < 1 << 63:
            return None
    return tuple(value)


def _check_ranges(path: Path, size: int, data_start: int, tensors: tuple[TensorFacts, ...]) -> None:
    """The tensors must fill the file to its last byte, without hole or overlap."""
    position = data_start
    for tensor in sorted(tensors, key=lambda tensor: (tensor.data_start, tensor.data_end)):
        if tensor.data_start != position:
            raise ModelError(
                f"{path}: tensor {tensor.name[:200]} starts at byte {tensor.data_start}, but the "
                f"one before it ends at {position}; {_REMEDY}"
            )
        position = tensor.data_end
    if position > size:
        last = max(tensors, key=lambda tensor: tensor.data_end)
        raise ModelError(
            f"{path} is {size} bytes, but its header describes {position} (tensor "
            f"{last.name[:200]} ends there): the file is truncated; {_REMEDY}"
        )
    if position < size:
        raise ModelError(
            f"{path} is {size} bytes, but its header describes only {position}; {_REMEDY}"
        )


def _read_index(path: Path) -> dict[str, str]:
    """The index's `weight_map`: tensor name to file name."""
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path}: weight_map is missing or empty; {_REMEDY}")
    for name, file in weight_map.items():
        # A name with a slash or ".." would let a model directory read other files.
        if not isinstance(file, str) or Path(file).name != file or "\0" in file:
            raise ModelError(
                f"{path}: tensor {name[:200]} is not in a file of this directory: {str(file)[:200]}"
            )
    if len(set(weight_map.values())) > _MAX_FILES:
        raise ModelError(f"{path} names more than {_MAX_FILES} files")
    return weight_map


def _check_index(path: Path, index: dict[str, str], tensors: Mapping[str, TensorFacts]) -> None:
    for name, file in index.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.file != file:
            raise ModelError(
                f"{path / file} has no tensor {name[:200]}, but {INDEX_FILE} says so; {_REMEDY}"
            )


def _no_weights(path: Path) -> ModelError:
    others = ("pytorch_model*.bin", "consolidated*.safetensors", "*.gguf", "*.pth")
    for pattern in others:
        if any(path.glob(pattern)):
            return ModelError(
                f"{path} has its weights as {pattern}, and only {SINGLE_FILE} (or {INDEX_FILE} "
                "with its files) is read; convert it with transformers' save_pretrained"
            )
    return ModelError(f"{path} has neither {SINGLE_FILE} nor {INDEX_FILE}; {_REMEDY}")

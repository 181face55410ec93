"""Reads a rank's part of a checkpoint: its stage's tensors, its TP slice of each.

Nothing else of the files is read: a slice comes straight out of the mapped
safetensors file. Which tensors a stage needs and how each is split is listed
in `services.topology.weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.errors import ModelError
from services.topology.checkpoint import CheckpointFacts, inspect_checkpoint
from services.topology.facts import DTYPE_BYTES, ModelFacts
from services.topology.weights import Split, WeightSpec, kv_heads_per_rank

Progress = Callable[[int, int], None]
"""Called with (bytes read so far, bytes to read)."""


class WeightReader:
    """Reads slices for one TP rank, and counts what it has read.

    A context manager: files stay open while it is. Raises `ModelError` that
    names file, tensor and remedy for whatever is missing, damaged or of
    another shape than config.json says.
    """

    def __init__(
        self,
        facts: ModelFacts,
        tp_rank: int,
        tp_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._facts = facts
        self._tp_rank = tp_rank
        self._tp_size = tp_size
        self._dtype = dtype
        self._device = device
        self._checkpoint: CheckpointFacts = inspect_checkpoint(facts.path)
        self._files: dict[str, Any] = {}  # safetensors has no public type for an open file
        self._progress: Progress = _no_progress
        self._loaded_bytes = 0
        self._total_bytes = 0

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files.clear()

    def expect(self, specs: Iterable[WeightSpec], progress: Progress) -> None:
        """Announces what will be read, so that progress has a total; checks that
        all of it is there before anything is read."""
        self._total_bytes = sum(self._slice_bytes(spec) for spec in specs)
        self._loaded_bytes = 0
        self._progress = progress
        progress(0, self._total_bytes)

    def read(self, spec: WeightSpec) -> Tensor:
        """This rank's slice of a tensor, in the model's dtype, on the device.

        A vocabulary slice is padded with zeros to the same size on every rank.
        """
        stored = self._stored_dtype_and_file(spec)[1]
        rows = spec.shape[0]
        where: tuple[slice, ...]
        match spec.split:
            case Split.REPLICATED:
                where = (slice(0, rows),)
            case Split.COLUMN:
                where = (self._part(rows),)
            case Split.KV_COLUMN:
                where = (self._kv_part(),)
            case Split.ROW:
                where = (slice(0, rows), self._part(spec.shape[1]))
            case Split.VOCABULARY:
                per_rank = vocabulary_part(rows, self._tp_size)
                start = self._tp_rank * per_rank
                where = (slice(min(start, rows), min(start + per_rank, rows)),)
        tensor = self._slice(stored, spec.name, where)
        if spec.split is Split.VOCABULARY and tensor.shape[0] < per_rank:
            padding = tensor.new_zeros((per_rank - tensor.shape[0], *tensor.shape[1:]))
            tensor = torch.cat((tensor, padding))
        self._loaded_bytes += self._slice_bytes(spec)
        self._progress(self._loaded_bytes, self._total_bytes)
        return tensor.to(self._device, self._dtype)

    def _part(self, size: int) -> slice:
        per_rank = size // self._tp_size
        return slice(self._tp_rank * per_rank, (self._tp_rank + 1) * per_rank)

    def _kv_part(self) -> slice:
        heads = kv_heads_per_rank(self._facts, self._tp_size)
        # With more ranks than KV heads, tp_size / kv_heads neighbours hold the same head.
        first = self._tp_rank * self._facts.num_key_value_heads // self._tp_size
        return slice(first * self._facts.head_dim, (first + heads) * self._facts.head_dim)

    def _slice(self, file: str, name: str, where: tuple[slice, ...]) -> Tensor:
        path = self._facts.path / file
        try:
            if file not in self._files:
                self._files[file] = safe_open(str(path), framework="pt", device="cpu")
            tensor: Tensor = self._files[file].get_slice(name)[where]
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{path}: tensor {name} cannot be read ({error}); "
                "the download is incomplete or damaged, download the model again"
            ) from None
        return tensor

    def _slice_bytes(self, spec: WeightSpec) -> int:
        stored_dtype = self._stored_dtype_and_file(spec)[0]
        elements = spec.elements_per_rank(self._facts, self._tp_size)
        return elements * DTYPE_BYTES[stored_dtype]

    def _stored_dtype_and_file(self, spec: WeightSpec) -> tuple[str, str]:
        stored = self._checkpoint.tensors.get(spec.name)
        path: Path = self._facts.path
        if stored is None:
            raise ModelError(
                f"{path} has no tensor {spec.name}, which {self._facts.architecture} needs; "
                "the download is incomplete or damaged, download the model again"
            )
        where = f"{path / stored.file}: tensor {spec.name}"
        if stored.shape != spec.shape:
            raise ModelError(
                f"{where} has shape {list(stored.shape)}, but config.json makes it "
                f"{list(spec.shape)}; config.json and weights belong to different models"
            )
        if stored.dtype not in DTYPE_BYTES:
            raise ModelError(
                f"{where} has element type {stored.dtype}; supported: {', '.join(DTYPE_BYTES)}. "
                "Use an unquantized checkpoint of the model"
            )
        return stored.dtype, stored.file


def vocabulary_part(vocab_size: int, tp_size: int) -> int:
    """Rows of embedding or head on each rank, padding included."""
    return -(-vocab_size // tp_size)


def _no_progress(loaded_bytes: int, total_bytes: int) -> None:
    pass

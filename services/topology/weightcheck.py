"""Whether the weights that a config.json promises are the ones that lie beside it.

Reads safetensors headers, or the index's total where the files are not there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.errors import ModelError
from services.topology.checkpoint import INDEX_FILE, SINGLE_FILE, inspect_checkpoint
from services.topology.facts import MeshShape, ModelFacts
from services.topology.jsonfile import read_json_object
from services.topology.memory import end_bytes
from services.topology.weights import layer_bytes, model_weights, nextn_weights


@dataclass(frozen=True, slots=True)
class WeightCheck:
    """Computed against stored."""

    source: str | None
    """"headers" of the safetensors files, or "index": the total that the index states. None
    where there are no weights."""
    computed_bytes: int
    """What the model needs, in the checkpoint's element type."""
    not_loaded_bytes: int
    """Layers for multi-token prediction, computed."""
    checkpoint_bytes: int | None
    """All tensors of the checkpoint; None where that cannot be read."""
    equal: bool | None
    """Headers: every tensor that is needed is there in its size. Index: the totals agree.
    None where that cannot be said."""
    problem: str | None
    """What differs, or why it cannot be said; None if equal."""


def check_weight_bytes(path: Path, facts: ModelFacts) -> WeightCheck:
    """Compares the weights in the model directory, if there are any, with `facts`."""
    index = path / INDEX_FILE
    single = (path / SINGLE_FILE).is_file()
    computed = whole_model_bytes(facts)
    nextn = sum(spec.num_bytes(facts.dtype) for spec in nextn_weights(facts))

    def result(
        source: str | None, stored: int | None, equal: bool | None, problem: str | None
    ) -> WeightCheck:
        return WeightCheck(source, computed, nextn, stored, equal, problem)

    if not single and not index.is_file():
        return result(None, None, None, None)
    if not single and not _any_file(index):
        total = _index_total(index)
        if total is None:
            return result("index", None, None, f"{index.name} states no total size")
        equal = total == computed + nextn
        problem = None if equal else f"{index.name} says {total} bytes"
        return result("index", total, equal, problem)
    try:
        checkpoint = inspect_checkpoint(path)
    except ModelError as error:
        return result("headers", None, None, error.message)
    needed = {spec.name: spec.num_bytes(facts.dtype) for spec in model_weights(facts)}
    stored = {name: tensor.num_bytes for name, tensor in checkpoint.tensors.items()}
    wrong = [name for name, size in needed.items() if stored.get(name) != size]
    problem = None
    if wrong:
        name = wrong[0]
        found = f"{stored[name]} bytes" if name in stored else "missing"
        problem = (
            f"{len(wrong)} tensors differ, the first is {name}: "
            f"computed {needed[name]} bytes, in the checkpoint {found}"
        )
    return result("headers", sum(stored.values()), not wrong, problem)


def whole_model_bytes(facts: ModelFacts) -> int:
    """Every tensor that the model needs, each once, in the checkpoint's element type."""
    whole = MeshShape(1, 1, 1, (facts.num_hidden_layers,))
    return sum(layer_bytes(facts, 1, facts.dtype)) + sum(end_bytes(facts, whole, 0, facts.dtype))


def _any_file(index: Path) -> bool:
    """Whether any of the index's weight files is there."""
    return any(index.parent.glob("*.safetensors"))


def _index_total(index: Path) -> int | None:
    metadata = read_json_object(index).get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    # Some writers state the total as 1.0e11.
    return int(total) if isinstance(total, int | float) and total > 0 else None

"""A model's own sampling defaults and end-of-sequence ids.

generation_config.json gives both; as in vLLM only the numbers that stand there
become defaults, and `do_sample` does not make requests greedy: a client that
sends no temperature gets the model's, else 1.0, as with OpenAI.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from gateway.frontend import limits
from gateway.frontend.model_files import read_json
from services.errors import ConfigError, ModelError
from services.ranges import as_float32

AUTO = "auto"
NONE = "none"
GENERATION_CONFIG_FILE = "generation_config.json"
MODEL_CONFIG_FILE = "config.json"


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What a request that says nothing gets. None means the neutral value."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    eos_token_ids: frozenset[int] = frozenset()


def load_generation_defaults(model_path: Path, generation_config: str = AUTO) -> GenerationDefaults:
    """Reads the defaults.

    `generation_config` is "auto" (the model's own file, where there is one), "none" (no
    sampling defaults) or a directory. End-of-sequence ids always come from the model's
    generation_config.json and config.json together: "none" must not make answers endless.
    Raises `ConfigError` for a directory without the file, `ModelError` for a value out of range.
    """
    own = read_json(model_path / GENERATION_CONFIG_FILE) or {}
    eos_token_ids = _eos_ids(own, model_path / GENERATION_CONFIG_FILE)
    eos_token_ids |= _model_eos_ids(model_path)
    if generation_config == AUTO:
        path, values = model_path / GENERATION_CONFIG_FILE, own
    elif generation_config == NONE:
        return GenerationDefaults(eos_token_ids=eos_token_ids)
    else:
        path = Path(generation_config) / GENERATION_CONFIG_FILE
        chosen = read_json(path)
        if chosen is None:
            raise ConfigError(
                f"--generation-config {generation_config!r} has no {GENERATION_CONFIG_FILE}; "
                "use 'auto', 'none' or a directory that has one",
                param="--generation-config",
            )
        values = chosen
        eos_token_ids |= _eos_ids(values, path)
    top_k = _number(values, "top_k", path, low=0.0)
    return GenerationDefaults(
        temperature=_number(values, "temperature", path, low=0.0, high=limits.MAX_TEMPERATURE),
        top_p=_number(values, "top_p", path, above=0.0, high=1.0),
        top_k=None if top_k is None else int(top_k),
        min_p=_number(values, "min_p", path, low=0.0, high=1.0),
        repetition_penalty=_number(
            values,
            "repetition_penalty",
            path,
            low=limits.MIN_REPETITION_PENALTY,
            high=limits.MAX_REPETITION_PENALTY,
        ),
        eos_token_ids=eos_token_ids,
    )


def _model_eos_ids(model_path: Path) -> frozenset[int]:
    path = model_path / MODEL_CONFIG_FILE
    return _eos_ids(read_json(path) or {}, path)


def _eos_ids(values: dict[str, object], path: Path) -> frozenset[int]:
    value = values.get("eos_token_id")
    if value is None:
        return frozenset()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) and one >= 0 for one in ids):
        raise ModelError(f"{path}: eos_token_id is {value!r}, which is no token id or list of them")
    return frozenset(ids)


def _number(
    values: dict[str, object],
    name: str,
    path: Path,
    *,
    low: float = -math.inf,
    above: float = -math.inf,
    high: float = math.inf,
) -> float | None:
    value = values.get(name)
    if value is None:
        return None
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        # The stages get 32 bits: what counts is the value that they see.
        number = as_float32(value)
        if math.isfinite(number) and low <= number <= high and number > above:
            return float(value)
    raise ModelError(f"{path}: {name} is {value!r}, which is no number in its range")

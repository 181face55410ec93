"""A tiny Llama checkpoint that a test may break, and the facts that describe it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from services.topology.facts import ModelFacts
from services.topology.families import read_model_facts
from services.topology.weights import model_weights

LLAMA_CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "float32",
}


class ModelDirectory:
    """A model directory on disk; methods write or damage its parts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = dict(LLAMA_CONFIG)
        path.mkdir()
        self.write_config()

    def write_config(self, *without: str, **changes: object) -> None:
        self.config.update(changes)
        for key in without:
            self.config.pop(key, None)
        (self.path / "config.json").write_text(json.dumps(self.config))

    def facts(self) -> ModelFacts:
        return read_model_facts(self.path)

    def arrays(self) -> dict[str, np.ndarray]:
        """Every tensor of the model, zeros."""
        return {
            spec.name: np.zeros(spec.shape, dtype=np.float32)
            for spec in model_weights(self.facts())
        }

    def write_single(self, arrays: dict[str, np.ndarray] | None = None) -> Path:
        file = self.path / "model.safetensors"
        save_file(self.arrays() if arrays is None else arrays, file)
        return file

    def write_sharded(self, num_files: int = 2) -> list[Path]:
        """Tensors dealt out over files by their place in the list, and an index."""
        arrays = self.arrays()
        files = [
            self.path / f"model-{number + 1:05}-of-{num_files:05}.safetensors"
            for number in range(num_files)
        ]
        weight_map: dict[str, str] = {}
        for number, file in enumerate(files):
            part = {name: array for name, array in list(arrays.items())[number::num_files]}
            weight_map.update(dict.fromkeys(part, file.name))
            save_file(part, file)
        self.write_index(weight_map)
        return files

    def write_index(self, weight_map: object) -> None:
        index = self.path / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    def read_index(self) -> dict[str, str]:
        index = json.loads((self.path / "model.safetensors.index.json").read_text())
        return dict(index["weight_map"])

"""A stage without weights: keeps a key for each token, passes hashes on, and takes the
time that its cost says.

Stands where `StageModel` stands, so steps, slots, block tables, boundaries and the
sampler are the real ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from services.errors import ConfigError
from services.topology.facts import DTYPE_BYTES, ModelFacts
from services.topology.weights import kv_heads_per_rank
from stage_worker.kv.paged_cache import MAX_BLOCKS, kv_block_bytes
from stage_worker.layers.attention.metadata import AttentionMetadata
from stage_worker.layers.rotary import RotaryRows
from stage_worker.layers.tensor_parallel import TensorParallel
from stage_worker.simulated import hashing
from stage_worker.simulated.hashing import KeyCache
from stage_worker.weights import Progress
from stagemesh.v1 import stage_worker_pb2

CERTAIN_LOGIT = 1e4
"""Of the next token, where all others have 0: whatever a request asks for (temperature up to
2, biases up to 100, penalties from 0.01 to 100), the sampler takes this one."""
NANOSECONDS = 1e9


class SimulatedModel:
    """See `stage_worker.platforms.base.Model`."""

    def __init__(
        self,
        facts: ModelFacts,
        plan: stage_worker_pb2.StagePlan,
        tensor_parallel: TensorParallel,
        default_kv_bytes: Callable[[stage_worker_pb2.StagePlan], int],
        busy_until: Callable[[int], None],
    ) -> None:
        """`busy_until` hears at which `time.monotonic_ns()` a step will be done.

        Raises `ConfigError` for a model whose activations have no room for a hash.
        """
        row_bytes = facts.hidden_size * DTYPE_BYTES[plan.dtype]
        if row_bytes < hashing.ROW_BYTES:
            raise ConfigError(
                f"a token's activations are {row_bytes} bytes, and a simulated device needs "
                f"{hashing.ROW_BYTES}: take a model with a larger hidden_size",
                param="--device",
            )
        self.facts = facts
        self.device = torch.device("cpu")
        self._plan = plan
        self._dtype: torch.dtype = getattr(torch, plan.dtype)
        self._tensor_parallel = tensor_parallel
        self._default_kv_bytes = default_kv_bytes
        self._busy_until = busy_until
        self._cache: KeyCache | None = None
        self._started_ns = 0

    @property
    def is_first(self) -> bool:
        """Whether it takes token ids."""
        return self._plan.placement.pp_rank == 0

    @property
    def is_last(self) -> bool:
        """Whether it gives logits."""
        return self._plan.placement.pp_rank == self._plan.topology.pp_size - 1

    @property
    def has_cache(self) -> bool:
        """Whether the key cache is allocated."""
        return self._cache is not None

    def apply_plan(
        self, plan: stage_worker_pb2.StagePlan, on_progress: Progress
    ) -> stage_worker_pb2.RankReport:
        """There are no weights to load. The cache is as large as that of the real model."""
        self._plan = plan
        self._dtype = getattr(torch, plan.dtype)
        placement = plan.placement
        block_bytes = kv_block_bytes(
            placement.layer_end - placement.layer_start,
            plan.block_size,
            kv_heads_per_rank(self.facts, self._tensor_parallel.size),
            self.facts.head_dim,
            DTYPE_BYTES[plan.dtype],
        )
        budget = plan.kv_cache_memory_bytes or self._default_kv_bytes(plan)
        self._cache = KeyCache(plan.num_blocks, plan.block_size) if plan.num_blocks else None
        return stage_worker_pb2.RankReport(
            kv_block_bytes=block_bytes,
            possible_blocks=min(max(plan.num_blocks, budget // block_bytes), MAX_BLOCKS),
            num_blocks=plan.num_blocks,
        )

    def rotary(self, positions: Tensor) -> RotaryRows:
        """Nothing is rotated; positions [n] stand in for both tables."""
        return RotaryRows(positions, positions)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[n] -> [n, hidden], with the ids where later stages find a key. A step begins here."""
        self._started_ns = time.monotonic_ns()
        words = np.zeros((len(token_ids), 2), np.uint64)
        words[:, 0] = token_ids.numpy()
        return self._pack(words)

    def forward(
        self, hidden_states: Tensor, rotary: RotaryRows, metadata: AttentionMetadata
    ) -> Tensor:
        """[n, hidden] -> [n, hidden]; the device is busy from the step's beginning on."""
        started_ns = self._started_ns if self.is_first else time.monotonic_ns()
        self._busy_until(started_ns + self._cost_ns(metadata))
        if self._cache is None:
            raise ConfigError("the key cache is not allocated: Load must come before a step")
        words = hashing.unpack(hidden_states)
        keys, given = words[:, 0], words[:, 1]
        if self.is_first:
            keys = hashing.token_keys(keys, rotary.cos.numpy().astype(np.uint64))
        read = self._cache.attend(keys, metadata)
        words[:, 0] = keys
        words[:, 1] = read if self.is_first else hashing.checked(given, read)
        return self._pack(words)

    def logits(self, hidden_states: Tensor, indices: Tensor) -> Tensor:
        """[m, vocab] float32 of the tokens `indices` [m]: all on the one next token."""
        histories = hashing.unpack(hidden_states)[:, 1][indices.numpy()]
        tokens = torch.from_numpy(hashing.next_tokens(histories, self.facts.vocab_size))
        logits = torch.zeros((len(tokens), self.facts.vocab_size))
        return logits.scatter_(1, tokens[:, None], CERTAIN_LOGIT)

    def _pack(self, words: np.ndarray) -> Tensor:
        return hashing.pack(words, self.facts.hidden_size, self._dtype)

    def _cost_ns(self, metadata: AttentionMetadata) -> int:
        costs = self._plan.simulated_costs
        if not costs:
            return 0
        cost = costs[self._plan.placement.pp_rank]
        seconds = cost.fixed_seconds + cost.per_token_seconds * metadata.num_tokens
        if cost.per_context_token_seconds:
            seconds += cost.per_context_token_seconds * hashing.context_tokens(metadata)
        return int(seconds * NANOSECONDS)

"""The two ends of a model, cut over the vocabulary: embedding and LM head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stage_worker.layers.context import LayerContext
from stage_worker.layers.linear import Linear


class VocabParallelEmbedding:
    """Rank i holds rows i * p to (i + 1) * p of the table."""

    __slots__ = ("_tensor_parallel", "weight")

    def __init__(self, weight: Tensor, context: LayerContext) -> None:
        self.weight = weight
        self._tensor_parallel = context.tensor_parallel

    def __call__(self, token_ids: Tensor) -> Tensor:
        """[n] int64 -> [n, hidden], the same on all ranks."""
        if self._tensor_parallel.size == 1:
            return F.embedding(token_ids, self.weight)
        rows = self.weight.shape[0]
        local = token_ids - self._tensor_parallel.rank * rows
        foreign = (local < 0) | (local >= rows)
        embedded = F.embedding(local.masked_fill(foreign, 0), self.weight)
        embedded.masked_fill_(foreign.unsqueeze(-1), 0.0)
        return self._tensor_parallel.all_reduce(embedded)

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes


class VocabParallelHead:
    """[n, hidden] -> logits [n, vocab_size] in float32, the same on all ranks."""

    __slots__ = ("_linear", "_num_bytes", "_tensor_parallel", "_vocab_size")

    def __init__(
        self, weight: Tensor, vocab_size: int, context: LayerContext, *, shared: bool
    ) -> None:
        """`shared` says that the weight is the embedding of the same rank: it is
        counted there, unless packing makes a copy of it."""
        self._linear: Linear = context.operators.linear(weight, None)
        self._num_bytes = 0 if shared and self._linear.keeps_weight else self._linear.num_bytes
        self._tensor_parallel = context.tensor_parallel
        self._vocab_size = vocab_size

    def __call__(self, hidden_states: Tensor) -> Tensor:
        logits = self._tensor_parallel.all_gather_last_dim(self._linear(hidden_states))
        return logits[:, : self._vocab_size].to(torch.float32)

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

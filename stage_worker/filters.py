"""min_p, top_k and top_p: which tokens of a distribution may be drawn.

Each filter is a threshold on the logits, so tokens that are exactly as likely
as the last one kept are kept too, and the outcome does not depend on how a
sort breaks ties.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

NUCLEUS_GUESS = 256
"""Most likely tokens looked at for top_p before the whole vocabulary is sorted:
the nucleus of a chat model is nearly always smaller."""


def filter_logits(
    logits: Tensor, *, min_p: Sequence[float], top_k: Sequence[int], top_p: Sequence[float]
) -> Tensor:
    """[m, vocab] with -inf in place of what is filtered out.

    Filters apply in the order min_p, top_k, top_p, each to what the one before
    left, renormalized. Neutral values are 0, 0 and 1.
    """
    if any(share > 0.0 for share in min_p):
        # log(0) is not defined; -inf keeps everything.
        logs = [math.log(share) if share > 0.0 else -math.inf for share in min_p]
        floor = logits.amax(-1) + torch.tensor(logs, device=logits.device)
        logits = _keep_from(logits, floor)
    if any(count > 0 for count in top_k):
        logits = _keep_from(logits, _top_k_floor(logits, top_k))
    if any(mass < 1.0 for mass in top_p):
        logits = _keep_from(logits, _top_p_floor(logits, top_p))
    return logits


def _keep_from(logits: Tensor, floor: Tensor) -> Tensor:
    return logits.masked_fill(logits < floor.unsqueeze(-1), -math.inf)


def _top_k_floor(logits: Tensor, top_k: Sequence[int]) -> Tensor:
    vocab_size = logits.shape[-1]
    counts = [min(count, vocab_size) for count in top_k]
    best = logits.topk(max(counts), -1).values
    return torch.stack(
        [
            best[i, count - 1] if count > 0 else best.new_tensor(-math.inf)
            for i, count in enumerate(counts)
        ]
    )


def _top_p_floor(logits: Tensor, top_p: Sequence[float]) -> Tensor:
    """The least logit of the smallest set of best tokens whose mass reaches top_p."""
    best = logits.topk(min(NUCLEUS_GUESS, logits.shape[-1]), -1).values
    log_total = logits.logsumexp(-1, keepdim=True)
    mass = (best - log_total).exp().cumsum(-1, dtype=torch.float64)
    floors = []
    for i, wanted in enumerate(top_p):
        if wanted >= 1.0:
            floors.append(best.new_tensor(-math.inf))
        elif float(mass[i, -1]) >= wanted or best.shape[-1] == logits.shape[-1]:
            floors.append(_floor_of(best[i], mass[i], wanted))
        else:
            ordered = logits[i].sort(descending=True).values
            all_mass = (ordered - log_total[i]).exp().cumsum(-1, dtype=torch.float64)
            floors.append(_floor_of(ordered, all_mass, wanted))
    return torch.stack(floors)


def _floor_of(ordered: Tensor, mass: Tensor, wanted: float) -> Tensor:
    # Rounding can leave the whole mass a little below what is wanted.
    index = min(int(torch.searchsorted(mass, wanted)), ordered.shape[-1] - 1)
    return ordered[index]

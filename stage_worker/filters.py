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

NUCLEUS_GUESSES = (256, 4096)
"""Most likely tokens looked at for top_p before the whole vocabulary is sorted: the
nucleus of a chat model is nearly always smaller than the first. For 8 rows of 49152
on one core the first costs about 4 ms, the sort 65 ms.
"""


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
    vocab_size = logits.shape[-1]
    floors = torch.full((len(top_p),), -math.inf, device=logits.device)
    open_rows = [i for i, mass in enumerate(top_p) if mass < 1.0]
    for guess in (*NUCLEUS_GUESSES, vocab_size):
        if not open_rows:
            break
        rows = logits[open_rows]
        best = rows.topk(min(guess, vocab_size), -1).values
        shares = (best - rows.logsumexp(-1, keepdim=True)).exp()
        mass = shares.cumsum(-1, dtype=torch.float64)
        wanted = torch.tensor([[top_p[i]] for i in open_rows], dtype=torch.float64)
        # [open rows]: index of the first token at which the mass is there.
        found = torch.searchsorted(mass, wanted.to(mass.device)).squeeze(-1).tolist()
        still_open = []
        for line, (i, index) in enumerate(zip(open_rows, found, strict=True)):
            if index < best.shape[-1]:
                floors[i] = best[line, index]
            else:
                still_open.append(i)
        # After the whole vocabulary only rounding is missing: such a row keeps all.
        open_rows = still_open
    return floors

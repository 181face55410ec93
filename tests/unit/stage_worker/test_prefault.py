"""Pages that are asked for before memory is used."""

from __future__ import annotations

import ctypes
import os

import numpy as np
import torch

from stage_worker.platforms.prefault import PIECE_BYTES, prefault

PAGE = os.sysconf("SC_PAGE_SIZE")
SECONDS = 20.0


def resident_bytes(tensor: torch.Tensor) -> int:
    """Of whole pages inside the tensor."""
    begin = -(-tensor.data_ptr() // PAGE) * PAGE
    size = (tensor.data_ptr() + tensor.nbytes - begin) // PAGE * PAGE
    pages = (ctypes.c_ubyte * (size // PAGE))()
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert mincore(begin, size, pages) == 0
    return PAGE * sum(page & 1 for page in pages)


def zeros(num_bytes: int) -> torch.Tensor:
    return torch.from_numpy(np.zeros(num_bytes, np.uint8))


def test_the_first_bytes_of_each_tensor_get_pages_and_keep_their_contents() -> None:
    tensors = [zeros(64 << 20) for _ in range(2)]
    tensors[0][1000] = 7
    thread = prefault(tensors, most_bytes=32 << 20)
    assert thread is not None
    thread.join(SECONDS)
    assert not thread.is_alive()
    for tensor in tensors:
        # A large page at the end is given as a whole.
        assert 16 << 20 <= resident_bytes(tensor) + 2 * PAGE <= (16 << 20) + 2 * PIECE_BYTES
    assert tensors[0][1000] == 7
    assert tensors[0].sum() == 7


def test_tensors_smaller_than_their_share_get_what_they_have() -> None:
    tensors = [zeros(3 << 20), zeros(100)]
    thread = prefault(tensors)
    assert thread is not None
    thread.join(SECONDS)
    assert resident_bytes(tensors[0]) >= (3 << 20) - 2 * PAGE


def test_without_tensors_nothing_is_begun() -> None:
    assert prefault([]) is None

"""Pages that are asked for before memory is used, and memory that goes back when it is dropped."""

from __future__ import annotations

import ctypes
import gc
import os

import pytest
import torch

from stage_worker.platforms import prefault
from stage_worker.platforms.cpu import CpuPlatform
from stage_worker.platforms.prefault import PIECE_BYTES, Prefault

PAGE = os.sysconf("SC_PAGE_SIZE")
SECONDS = 20.0
CPU = torch.device("cpu")
MEGABYTE = 1 << 20


def resident_bytes(tensor: torch.Tensor) -> int:
    """Of whole pages inside the tensor."""
    begin = -(-tensor.data_ptr() // PAGE) * PAGE
    size = (tensor.data_ptr() + tensor.nbytes - begin) // PAGE * PAGE
    pages = (ctypes.c_ubyte * (size // PAGE))()
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert mincore(begin, size, pages) == 0
    return PAGE * sum(page & 1 for page in pages)


def process_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return PAGE * int(statm.read().split()[1])


def zeros(num_bytes: int) -> torch.Tensor:
    return CpuPlatform().zeros((num_bytes,), torch.uint8, CPU)


def test_the_first_bytes_of_each_tensor_get_pages_and_keep_their_contents() -> None:
    tensors = [zeros(64 * MEGABYTE) for _ in range(2)]
    tensors[0][1000] = 7
    pages = Prefault()
    pages.begin(tensors, most_bytes=32 * MEGABYTE)
    assert pages.wait(SECONDS)
    for tensor in tensors:
        # A large page at the end is given as a whole.
        given = resident_bytes(tensor)
        assert 16 * MEGABYTE - 2 * PAGE <= given <= 16 * MEGABYTE + 2 * PIECE_BYTES
    assert tensors[0][1000] == 7
    assert tensors[0].sum() == 7


def test_most_of_a_cache_waits_for_its_use() -> None:
    tensors = [zeros(16 * MEGABYTE) for _ in range(4)]
    pages = Prefault()
    pages.begin(tensors)
    assert pages.wait(SECONDS)
    assert sum(map(resident_bytes, tensors)) <= 16 * MEGABYTE + 8 * PIECE_BYTES


def test_what_is_given_up_asks_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [zeros(64 * MEGABYTE)]
    pages = Prefault()

    def cut(tensors: object, share: int) -> object:
        yield from ()
        pages.cancel()
        yield tensors[0].data_ptr(), PIECE_BYTES  # type: ignore[index]

    monkeypatch.setattr(prefault, "_pieces", cut)
    pages.begin(tensors)
    assert pages.wait(SECONDS)
    assert resident_bytes(tensors[0]) == 0


def test_without_tensors_nothing_is_begun() -> None:
    pages = Prefault()
    pages.begin([])
    assert pages.wait(0)


def test_a_cache_is_not_there_before_its_use_nor_after_it_was_dropped() -> None:
    """Also the second time, with something small in between: malloc would keep the first one."""
    kept = []
    before = process_bytes()
    for _ in range(3):
        tensors = [zeros(24 * MEGABYTE).view(torch.float32) for _ in range(8)]
        assert process_bytes() - before < 24 * MEGABYTE
        for tensor in tensors:
            tensor[:: PAGE // 4] = 1.0
        assert process_bytes() - before > 180 * MEGABYTE
        kept.append(torch.ones(100))
        del tensors, tensor
        gc.collect()
    assert process_bytes() - before < 24 * MEGABYTE
    assert all(one.sum() == 100 for one in kept)

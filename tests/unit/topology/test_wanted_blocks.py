"""How many KV blocks are of use to a mesh."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.config import ServeConfig
from services.mesh_plan import MOST_CACHED_BLOCKS, make_plan
from tests.unit.topology.model_directory import ModelDirectory


@pytest.mark.parametrize(
    ("keeps_prefixes", "max_num_seqs", "blocks"),
    [
        # Blocks outlive their requests, however few may run at a time.
        (True, 1, MOST_CACHED_BLOCKS),
        (True, 2 * MOST_CACHED_BLOCKS, 8 * 2 * MOST_CACHED_BLOCKS),
        # Nobody could ever use more.
        (False, 1, 8),
        (False, 64, 8 * 64),
    ],
)
def test_wanted_blocks(
    tmp_path: Path, keeps_prefixes: bool, max_num_seqs: int, blocks: int
) -> None:
    directory = ModelDirectory(tmp_path / "tiny")
    directory.write_single()
    config = ServeConfig(
        model="m",
        max_model_len=8 * 16,
        block_size=16,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(8192, max_num_seqs),
        enable_prefix_caching=keeps_prefixes,
        device="cpu",
    )
    assert make_plan(config, directory.path, "here").wanted_blocks == blocks

"""What a plan may ask of a rank before anything is allocated for it. Pure."""

from __future__ import annotations

from services.errors import ConfigError
from stagemesh.v1 import stage_worker_pb2

MAX_BLOCK_TABLE_BYTES = 1 << 30
"""Of all slots together: 64 sequences of 60 million tokens, or 16,000 of 250,000."""
MAX_MODEL_LEN = 1 << 24
"""Tokens of one sequence; tables of positions are made for all of them."""
MAX_BATCHED_TOKENS = 1 << 24
BLOCK_TABLE_ENTRY_BYTES = 4


def check_sizes(plan: stage_worker_pb2.StagePlan) -> None:
    """Raises `ConfigError` naming the first size of the plan that no rank can serve."""
    for name, most in (
        ("block_size", MAX_MODEL_LEN),
        ("max_model_len", MAX_MODEL_LEN),
        ("max_num_batched_tokens", MAX_BATCHED_TOKENS),
        ("max_num_seqs", MAX_BLOCK_TABLE_BYTES // BLOCK_TABLE_ENTRY_BYTES),
    ):
        value = getattr(plan, name)
        if not 1 <= value <= most:
            raise ConfigError(f"the plan's {name} is {value}; 1 to {most} work")
    blocks_per_sequence = -(-plan.max_model_len // plan.block_size)
    table_bytes = plan.max_num_seqs * blocks_per_sequence * BLOCK_TABLE_ENTRY_BYTES
    if table_bytes > MAX_BLOCK_TABLE_BYTES:
        raise ConfigError(
            f"block tables of {plan.max_num_seqs} sequences with {blocks_per_sequence} blocks each "
            f"are {table_bytes} bytes, above {MAX_BLOCK_TABLE_BYTES}: lower --max-num-seqs or "
            "--max-model-len, or raise --block-size"
        )

"""Names for full KV blocks, so that equal prefixes find each other.

A block's keys and values depend on its tokens and on everything before them, so its
name is a hash over its token ids and the name of the block before. The chain starts
from a salt: requests with different salts share nothing.

The hash is cryptographic because prompts come from strangers: two that collide would
read each other's context.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 32


def first_hash(salt: str) -> bytes:
    """What stands for "the block before" at the start of a sequence."""
    return blake2b(salt.encode(), digest_size=HASH_BYTES).digest()


def extend_block_hashes(
    hashes: list[bytes], token_ids: Sequence[int], block_size: int, salt: str = ""
) -> None:
    """Appends the hashes of blocks that `token_ids` fill and `hashes` does not have yet.

    Token ids are below 2**32, as on the wire. About 1 us for a block.
    """
    num_full = len(token_ids) // block_size
    if num_full == len(hashes):
        return
    parent = hashes[-1] if hashes else first_hash(salt)
    for index in range(len(hashes), num_full):
        start = index * block_size
        tokens = array("I", token_ids[start : start + block_size]).tobytes()
        parent = blake2b(parent + tokens, digest_size=HASH_BYTES).digest()
        hashes.append(parent)

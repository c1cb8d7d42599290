"""Chain hashes: the content address of each full block of a token sequence."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from kvstore.ids import BlockHash, BlockRef, LayoutFingerprint, Namespace, StripeId

BLOCKS_PER_STRIPE = 8
"""A long prefix asks few nodes, yet its load spreads: 8 blocks of 32 tokens are some 3 MB of a small model, 35 MB of a large one in
bf16."""

_ROOT_TAG = b"larder.root.1"


def root_hash(*, namespace: Namespace, model_digest: bytes, adapter_digest: bytes = b"", layout: LayoutFingerprint) -> BlockHash:
    """The hash before block 0. Each part is length-prefixed, so no two different sets of parts run together into the same bytes."""
    digest = hashlib.sha256(_ROOT_TAG)
    for part in (namespace.encode(), model_digest, adapter_digest, layout):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return BlockHash(digest.digest())


def chain_of(token_ids: Sequence[int], *, block_tokens: int, root: BlockHash) -> tuple[BlockRef, ...]:
    """One ref per full block; block i covers tokens [0, (i + 1) * block_tokens). A tail that fills no block is skipped.

    The same input gives the same bytes in every process and version: ids are packed as little-endian u32 (struct.error if one does not
    fit).

    Cost: O(len(token_ids)), one SHA-256 over 32 + 4 * block_tokens bytes a block.
    Source: Kwon et al., PagedAttention, SOSP 2023, section 4.4.
    """
    assert block_tokens > 0
    return extend_chain((), token_ids, block_tokens=block_tokens, root=root)


def extend_chain(chain: tuple[BlockRef, ...], next_token_ids: Sequence[int], *, block_tokens: int, root: BlockHash) -> tuple[BlockRef, ...]:
    """`chain` and one ref more per full block of the tokens that follow it: chain_of(a + b) == extend_chain(chain_of(a), b) for a of full
    blocks.

    Cost: O(len(next_token_ids)) hashing, whatever the length of `chain`, plus one copy of the tuple.
    """
    packer = struct.Struct(f"<{block_tokens}I")
    parent = chain[-1].hash if chain else root
    stripe = chain[-1].stripe if chain else StripeId(root)
    refs: list[BlockRef] = []
    index = len(chain)
    for start in range(0, len(next_token_ids) - block_tokens + 1, block_tokens):
        hashed = BlockHash(hashlib.sha256(parent + packer.pack(*next_token_ids[start : start + block_tokens])).digest())
        if index % BLOCKS_PER_STRIPE == 0:
            stripe = StripeId(hashed)
        refs.append(BlockRef(hash=hashed, parent=parent, stripe=stripe, index=index))
        parent = hashed
        index += 1
    return chain + tuple(refs)

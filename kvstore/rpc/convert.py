"""Between protobuf messages and the types of kvstore/ids.py. What comes from the wire is checked here, before anything is
allocated for it: every `*_from_proto` raises InvalidRequest with what was wrong and what would be right.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Sized

from kvpb.v1 import store_pb2

from kvstore.errors import InvalidRequest
from kvstore.ids import HASH_BYTES, BlockHash, BlockRef, KeySpace, LayoutFingerprint, Namespace, StripeId
from kvstore.units import MIB

MAX_BATCH_ITEMS = 4096
"""Items of one request. A chain of 4,096 blocks is 131,072 tokens, as long as the longest prompts; longer ones split."""

MAX_CHUNK_BYTES = MIB
"""Data of one WriteChunk or ReadChunk: the size at which loopback throughput no longer grows."""

MAX_NAMESPACE_BYTES = 255


def key_space_to_proto(key_space: KeySpace) -> store_pb2.KeySpace:
    return store_pb2.KeySpace(namespace=key_space.namespace, layout_fingerprint=key_space.layout)


def key_space_from_proto(message: store_pb2.KeySpace) -> KeySpace:
    return KeySpace(
        namespace_from_proto(message.namespace), LayoutFingerprint(_digest(message.layout_fingerprint, "key_space.layout_fingerprint"))
    )


def namespace_from_proto(name: str) -> Namespace:
    if not 0 < len(name.encode()) <= MAX_NAMESPACE_BYTES:
        raise InvalidRequest(f"namespace must have 1 to {MAX_NAMESPACE_BYTES} bytes, this one has {len(name.encode())}")
    return Namespace(name)


def block_ref_to_proto(ref: BlockRef) -> store_pb2.BlockRef:
    return store_pb2.BlockRef(hash=ref.hash, parent=ref.parent, stripe=ref.stripe, index=ref.index)


def block_ref_from_proto(message: store_pb2.BlockRef) -> BlockRef:
    return BlockRef(
        hash=BlockHash(_digest(message.hash, "block.hash")),
        parent=BlockHash(_digest(message.parent, "block.parent")),
        stripe=StripeId(_digest(message.stripe, "block.stripe")),
        index=message.index,
    )


def block_refs_to_proto(refs: Iterable[BlockRef]) -> list[store_pb2.BlockRef]:
    return [block_ref_to_proto(ref) for ref in refs]


def block_refs_from_proto(messages: Sequence[store_pb2.BlockRef]) -> list[BlockRef]:
    check_batch(messages, "blocks")
    return [block_ref_from_proto(message) for message in messages]


def hashes_from_proto(hashes: Sequence[bytes]) -> list[BlockHash]:
    check_batch(hashes, "hashes")
    return [BlockHash(_digest(digest, "hash")) for digest in hashes]


def check_batch(items: Sized, field: str) -> None:
    """Raises InvalidRequest when a request carries more items than a node handles in one go."""
    if len(items) > MAX_BATCH_ITEMS:
        raise InvalidRequest(f"{len(items)} {field} in one request; at most {MAX_BATCH_ITEMS}, send several requests")


def _digest(digest: bytes, field: str) -> bytes:
    if len(digest) != HASH_BYTES:
        raise InvalidRequest(f"{field} must have {HASH_BYTES} bytes, this one has {len(digest)}")
    return digest

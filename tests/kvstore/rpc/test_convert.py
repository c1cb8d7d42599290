import hashlib

import pytest
from kvpb.v1 import store_pb2

from kvstore.errors import InvalidRequest
from kvstore.ids import BlockHash, BlockRef, KeySpace, LayoutFingerprint, Namespace, StripeId
from kvstore.rpc.convert import (
    MAX_BATCH_ITEMS,
    MAX_NAMESPACE_BYTES,
    block_ref_from_proto,
    block_ref_to_proto,
    block_refs_from_proto,
    hashes_from_proto,
    key_space_from_proto,
    key_space_to_proto,
)


def digest(text):
    return hashlib.sha256(text.encode()).digest()


REF = BlockRef(BlockHash(digest("hash")), BlockHash(digest("parent")), StripeId(digest("stripe")), 7)


def test_what_goes_out_comes_back_the_same():
    key_space = KeySpace(Namespace("köche"), LayoutFingerprint(digest("layout")))
    assert key_space_from_proto(key_space_to_proto(key_space)) == key_space
    assert block_ref_from_proto(block_ref_to_proto(REF)) == REF


@pytest.mark.parametrize("size", [0, 31, 33])
@pytest.mark.parametrize("field", ["hash", "parent", "stripe"])
def test_a_digest_of_another_length_is_named_in_the_refusal(field, size):
    message = block_ref_to_proto(REF)
    setattr(message, field, b"x" * size)
    with pytest.raises(InvalidRequest, match=rf"block.{field} must have 32 bytes, this one has {size}"):
        block_ref_from_proto(message)


@pytest.mark.parametrize(
    ("message", "wrong"),
    [
        (store_pb2.KeySpace(namespace="a", layout_fingerprint=b"short"), "key_space.layout_fingerprint must have 32 bytes, this one has 5"),
        (store_pb2.KeySpace(namespace="", layout_fingerprint=digest("layout")), "namespace .* has 0"),
        (store_pb2.KeySpace(namespace="a" * (MAX_NAMESPACE_BYTES + 1), layout_fingerprint=digest("layout")), "namespace .* has 256"),
        (store_pb2.KeySpace(namespace="ä" * (MAX_NAMESPACE_BYTES // 2 + 1), layout_fingerprint=digest("layout")), "namespace .* has 256"),
        (store_pb2.KeySpace(), "namespace .* has 0"),
    ],
)
def test_a_key_space_that_cannot_be_one_is_refused(message, wrong):
    with pytest.raises(InvalidRequest, match=wrong):
        key_space_from_proto(message)


def test_a_batch_above_the_limit_is_refused_with_the_limit():
    with pytest.raises(InvalidRequest, match=str(MAX_BATCH_ITEMS)):
        block_refs_from_proto([block_ref_to_proto(REF)] * (MAX_BATCH_ITEMS + 1))
    with pytest.raises(InvalidRequest, match=str(MAX_BATCH_ITEMS)):
        hashes_from_proto([REF.hash] * (MAX_BATCH_ITEMS + 1))

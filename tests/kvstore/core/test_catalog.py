from __future__ import annotations

import random

from kvstore.core.catalog import BUCKETS, Catalog
from kvstore.ids import BlockHash, KeySpace, LayoutFingerprint, Namespace, StripeId

SPACE = KeySpace(Namespace("tenant"), LayoutFingerprint(b"L" * 32))


def blocks_of(rng: random.Random, stripes: int) -> list[tuple[StripeId, BlockHash]]:
    ids = [StripeId(rng.randbytes(32)) for _ in range(stripes)]
    return [(stripe, BlockHash(rng.randbytes(32))) for stripe in ids for _ in range(8)]


def test_two_catalogs_have_the_same_digests_exactly_when_they_hold_the_same_blocks(seed: int) -> None:
    rng = random.Random(seed)
    blocks = blocks_of(rng, 100)
    one, two = Catalog(), Catalog()
    for stripe, block in blocks:
        one.add(SPACE, stripe, block, 10)
        one.add(SPACE, stripe, block, 10)  # told twice
    for stripe, block in rng.sample(blocks, len(blocks)):
        two.add(SPACE, stripe, block, 10)
    digests = [{stripe.stripe: stripe.digest for stripe in catalog} for catalog in (one, two)]
    assert digests[0] == digests[1]
    assert (one.blocks, one.bytes) == (800, 8000)
    stripe, block = blocks[17]
    two.remove(stripe, block)
    two.remove(stripe, block)
    differing = {found.stripe for found in two if found.digest != digests[0][found.stripe]}
    assert differing == {stripe}
    assert (two.blocks, two.bytes) == (799, 7990)
    for stripe, block in blocks:
        two.remove(stripe, block)
    assert (two.blocks, two.bytes, list(two)) == (0, 0, [])


def test_a_walk_bears_changes_under_way_and_sees_what_stays_once(seed: int) -> None:
    rng = random.Random(seed)
    catalog = Catalog()
    staying, going = blocks_of(rng, 300), blocks_of(rng, 300)
    for stripe, block in staying + going:
        catalog.add(SPACE, stripe, block, 1)
    seen = []
    for number, found in enumerate(catalog):
        seen.append(found.stripe)
        if number == 100:
            for stripe, block in going:
                catalog.remove(stripe, block)
            for stripe, block in blocks_of(rng, 50):
                catalog.add(SPACE, stripe, block, 1)
    assert len(seen) == len(set(seen))
    assert {stripe for stripe, _ in staying} <= set(seen)
    assert max(len(catalog.stripes(bucket)) for bucket in range(BUCKETS)) < 20, "the buckets are about as full"

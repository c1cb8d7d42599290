from __future__ import annotations

import subprocess
import sys

import pytest

from kvstore.core.chain import BLOCKS_PER_STRIPE, chain_of, extend_chain, root_hash
from kvstore.ids import LayoutFingerprint, Namespace

LAYOUT = LayoutFingerprint(b"l" * 32)
ROOT = root_hash(namespace=Namespace("n"), model_digest=b"m", layout=LAYOUT)


def test_equal_prefixes_have_equal_hashes_and_differ_from_the_first_different_token_on() -> None:
    one = chain_of([*range(64)], block_tokens=8, root=ROOT)
    two = chain_of([*range(40), 999, *range(41, 64)], block_tokens=8, root=ROOT)
    assert one[:5] == two[:5]
    assert all(a.hash != b.hash for a, b in zip(one[5:], two[5:], strict=True))


def test_a_tail_that_fills_no_block_is_skipped() -> None:
    assert len(chain_of(range(31), block_tokens=8, root=ROOT)) == 3
    assert chain_of(range(7), block_tokens=8, root=ROOT) == ()


def test_a_chain_grown_block_by_block_is_the_chain_of_the_whole() -> None:
    whole = chain_of(range(25 * 4), block_tokens=4, root=ROOT)
    grown: tuple = ()
    for start in range(0, 100, 4):
        grown = extend_chain(grown, range(start, start + 4), block_tokens=4, root=ROOT)
    assert grown == whole


def test_every_block_names_its_parent_its_place_and_the_first_block_of_its_stripe() -> None:
    chain = chain_of(range(20 * 4), block_tokens=4, root=ROOT)
    assert [block.index for block in chain] == list(range(20))
    assert [block.parent for block in chain] == [ROOT, *(block.hash for block in chain[:-1])]
    for block in chain:
        assert block.stripe == chain[block.index - block.index % BLOCKS_PER_STRIPE].hash


@pytest.mark.parametrize(
    "changed",
    [
        {"namespace": Namespace("o")},
        {"model_digest": b"x"},
        {"adapter_digest": b"a"},
        {"layout": LayoutFingerprint(b"k" * 32)},
    ],
)
def test_a_reloaded_adapter_another_tenant_model_or_layout_is_another_root(changed: dict) -> None:
    parts = {"namespace": Namespace("n"), "model_digest": b"m", "adapter_digest": b"", "layout": LAYOUT}
    assert root_hash(**{**parts, **changed}) != root_hash(**parts)


def test_parts_of_the_root_do_not_run_together() -> None:
    one = root_hash(namespace=Namespace("ab"), model_digest=b"c", layout=LAYOUT)
    two = root_hash(namespace=Namespace("a"), model_digest=b"bc", layout=LAYOUT)
    assert one != two


def test_three_processes_with_different_hash_seeds_compute_the_same_keys() -> None:
    program = (
        "from kvstore.core.chain import *\n"
        "root = root_hash(namespace='ünïcode', model_digest=b'm', adapter_digest=b'a', layout=b'l' * 32)\n"
        "print(root.hex(), *[b.hash.hex() for b in chain_of([0, 1, 2**32 - 1, 7], block_tokens=2, root=root)])"
    )
    seen = {
        subprocess.run([sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True).stdout
        for seed in ("0", "1", "4242")
    }
    # These very digits: a change of them orphans every block on every disk.
    assert seen == {GOLDEN}


GOLDEN = (
    "25530e6a9ea031314f73eb59949abfc71fb1a41a1badd372f6acd9cc748b974f "
    "846d2801c59615890f983b2d96e31f4135c520e3580401eab79cf5dd59c6ac41 "
    "34cde0adfda09625194788722444792cf80bfc857792efd5038eb7abcaeaf4a4\n"
)

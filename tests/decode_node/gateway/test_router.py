from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from decode_node.gateway.router import (
    DecodeCandidate,
    PrefillCandidate,
    PrefixAffinity,
    RoutingPolicy,
    choose_decode,
    choose_prefill,
    predicted_ttft_s,
)
from kvstore.core.chain import chain_of
from kvstore.ids import BlockHash, NodeId

POLICY = RoutingPolicy(min_prefill_tokens=128, assumed_prefill_tokens_per_s=500.0, affinity_slack=2)
A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def prefill(node_id: NodeId, *, queued: int = 0, speed: float = 1000.0, suspect: bool = False) -> PrefillCandidate:
    return PrefillCandidate(node_id=node_id, queued_tokens=queued, tokens_per_s=speed, suspect=suspect)


def decode(node_id: NodeId, sequences: int = 0, *, suspect: bool = False) -> DecodeCandidate:
    return DecodeCandidate(node_id=node_id, sequences=sequences, suspect=suspect)


def test_the_prefill_node_with_the_earliest_predicted_first_token_is_taken() -> None:
    candidates = [prefill(A, queued=4000, speed=4000), prefill(B, queued=500, speed=1000)]
    assert predicted_ttft_s(candidates[0], uncached_tokens=1000, policy=POLICY) == 1.25
    assert choose_prefill(candidates, uncached_tokens=1000, policy=POLICY) == A
    assert choose_prefill(candidates, uncached_tokens=200, policy=POLICY) == B


def test_a_short_uncached_tail_needs_no_prefill_node() -> None:
    assert choose_prefill([prefill(A)], uncached_tokens=127, policy=POLICY) is None
    assert choose_prefill([prefill(A)], uncached_tokens=128, policy=POLICY) == A


def test_an_excluded_or_suspect_prefill_node_is_not_taken() -> None:
    assert choose_prefill([prefill(A), prefill(B, suspect=True)], uncached_tokens=999, excluded=[A], policy=POLICY) is None


def test_an_unmeasured_prefill_node_counts_with_the_assumed_speed() -> None:
    assert choose_prefill([prefill(A, speed=0), prefill(B, speed=501)], uncached_tokens=999, policy=POLICY) == B


def test_the_least_loaded_decode_node_is_taken() -> None:
    assert choose_decode([decode(A, 3), decode(B, 1), decode(C, 2)], policy=POLICY) == B


def test_a_node_that_has_the_prefix_is_kept_while_it_is_not_clearly_busier() -> None:
    assert choose_decode([decode(A, 2), decode(B, 0)], preferred=A, policy=POLICY) == A
    assert choose_decode([decode(A, 3), decode(B, 0)], preferred=A, policy=POLICY) == B


def test_a_node_that_failed_this_session_comes_last_but_before_giving_up() -> None:
    assert choose_decode([decode(A, 0), decode(B, 9)], excluded=[A], preferred=A, policy=POLICY) == B
    assert choose_decode([decode(A, 0), decode(B, 0, suspect=True)], excluded=[A], policy=POLICY) == B
    assert choose_decode([decode(A, 0)], excluded=[A], policy=POLICY) == A


def test_a_suspect_decode_node_is_used_only_when_no_other_is_left() -> None:
    assert choose_decode([decode(A, 0, suspect=True), decode(B, 50)], preferred=A, policy=POLICY) == B
    assert choose_decode([decode(A, 0, suspect=True)], policy=POLICY) == A


def test_without_nodes_there_is_no_choice() -> None:
    assert choose_decode([], preferred=A, policy=POLICY) is None
    assert choose_prefill([], uncached_tokens=10_000, policy=POLICY) is None


@given(
    st.lists(
        st.tuples(st.sampled_from([A, B, C]), st.integers(0, 5), st.booleans()), min_size=1, max_size=3, unique_by=lambda item: item[0]
    ),
    st.sampled_from([None, A, B, C]),
    st.sets(st.sampled_from([A, B, C])),
)
def test_a_choice_is_always_a_candidate_of_the_best_kind(nodes, preferred, excluded) -> None:
    candidates = [decode(node_id, sequences, suspect=suspect) for node_id, sequences, suspect in nodes]
    chosen = next(it for it in candidates if it.node_id == choose_decode(candidates, preferred=preferred, excluded=excluded, policy=POLICY))
    best = min((it.node_id in excluded, it.suspect) for it in candidates)
    assert (chosen.node_id in excluded, chosen.suspect) == best
    peers = [it.sequences for it in candidates if (it.node_id in excluded, it.suspect) == best]
    assert chosen.sequences <= min(peers) + POLICY.affinity_slack


def chain(tokens: list[int]):
    return chain_of(tokens, block_tokens=4, root=BlockHash(bytes(32)))


def test_the_next_turn_of_a_conversation_finds_the_node_of_the_last_one() -> None:
    affinity = PrefixAffinity(100)
    turn = list(range(200))
    affinity.remember(chain(turn), A)
    affinity.remember(chain([7, *turn]), B)
    assert affinity.lookup(chain([*turn, 1, 2, 3, 4, 5])) == A
    assert affinity.lookup(chain(turn[:70])) == A
    assert affinity.lookup(chain([9, *turn])) is None
    assert affinity.lookup(()) is None


def test_the_longest_known_prefix_decides() -> None:
    affinity = PrefixAffinity(100)
    system = list(range(64))
    affinity.remember(chain([*system, *[1] * 64]), A)
    affinity.remember(chain([*system, *[2] * 64]), B)
    assert affinity.lookup(chain([*system, *[1] * 80])) == A
    assert affinity.lookup(chain([*system, *[3] * 80])) == B


def test_a_million_prompts_do_not_grow_the_affinity_beyond_its_limit() -> None:
    affinity = PrefixAffinity(50)
    for number in range(2_000):
        affinity.remember(chain([number] * 40), A)
    assert len(affinity) == 50
    assert affinity.lookup(chain([1_999] * 40)) == A
    assert affinity.lookup(chain([0] * 40)) is None

"""The prefill stage over real gRPC: what it asks for, and that its failures cost time and nothing else."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.core.view import MemberState
from kvstore.errors import Overloaded, Unavailable

PROMPT = "a prompt of forty characters and no more"
assert len(PROMPT) == 40  # 10 blocks of 4 byte tokens


def test_a_cold_prompt_is_prefilled_and_the_decode_node_is_told_of_each_block(serving) -> None:
    async def scenario(kitchen) -> None:
        response = await kitchen.complete(PROMPT, larder={"priority": 3})
        assert [node.priority for node in kitchen.prefill[0].requests] == [3]
        told = next(node.published[0] for node in kitchen.decode if node.published)
        assert told == sorted(set(told))
        assert told[-1] == 10
        usage = response.json()["usage"]
        assert len(kitchen.prefill[0].requests) == 1
        assert len(kitchen.shelf.hashes) == 10
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        assert (usage["larder"]["hit_blocks"], usage["larder"]["prompt_blocks"]) == (0, 10)

    serving(scenario)


def test_a_second_question_on_the_same_text_hits_and_needs_no_prefill_node(serving) -> None:
    async def scenario(kitchen) -> None:
        await kitchen.complete(PROMPT)
        response = await kitchen.complete(PROMPT + " again")
        usage = response.json()["usage"]
        assert len(kitchen.prefill[0].requests) == 1
        assert usage["prompt_tokens_details"]["cached_tokens"] == 40
        assert (usage["larder"]["hit_blocks"], usage["larder"]["prompt_blocks"]) == (10, 11)

    serving(scenario)


def test_a_partial_hit_counts_what_was_there_before_this_requests_own_prefill(serving) -> None:
    async def scenario(kitchen) -> None:
        await kitchen.complete(PROMPT)
        response = await kitchen.complete(PROMPT + " and then a long tail that is new")
        usage = response.json()["usage"]
        assert len(kitchen.prefill[0].requests) == 2
        assert usage["larder"]["hit_blocks"] == 10

    serving(scenario)


def test_the_decode_node_has_the_request_while_prefill_still_publishes(serving) -> None:
    async def scenario(kitchen) -> None:
        kitchen.prefill[0].hang_after_blocks = 4
        answer = asyncio.ensure_future(kitchen.complete(PROMPT))
        await kitchen.until(lambda: any(node.published and node.published[0][-1:] == [4] for node in kitchen.decode), "told of 4 blocks")
        assert not answer.done()
        assert kitchen.prefill[0].cancelled.is_set() is False
        # The node stalls; a second one goes on from its blocks, and the same decode node hears of that.
        assert (await answer).json()["choices"][0]["text"] == kitchen.expected_text(PROMPT, 1, 20)
        (told,) = [node.published[0] for node in kitchen.decode if node.published]
        assert told[-1] == 10
        assert len(kitchen.prefill[1].requests) == 1

    serving(scenario, prefill_nodes=2)


def test_a_decode_node_lost_while_prefill_publishes_is_replaced_and_its_successor_told(serving) -> None:
    async def scenario(kitchen) -> None:
        kitchen.prefill[0].hang_after_blocks = 4
        answer = asyncio.ensure_future(kitchen.complete(PROMPT))
        await kitchen.until(lambda: any(node.published and node.published[0][-1:] == [4] for node in kitchen.decode), "told of 4 blocks")
        (first,) = [node for node in kitchen.decode if node.published]
        (second,) = [node for node in kitchen.decode if node is not first]
        await first.kill()
        response = (await answer).json()
        assert response["choices"][0]["text"] == kitchen.expected_text(PROMPT, 1, 20)
        assert second.published[0][0] == 4
        assert response["usage"]["larder"]["failovers"] == 1

    serving(scenario)


def test_usage_tells_pool_from_store(serving) -> None:
    async def scenario(kitchen) -> None:
        cold = (await kitchen.complete(PROMPT)).json()["usage"]["larder"]
        assert (cold["hit_blocks"], cold["pool_blocks"], cold["store_blocks"]) == (0, 0, 0)
        for node in kitchen.decode:
            node.pool_blocks = 3
        hit = (await kitchen.complete(PROMPT)).json()["usage"]["larder"]
        assert (hit["hit_blocks"], hit["pool_blocks"], hit["store_blocks"]) == (10, 3, 7)

    serving(scenario)


def test_a_short_prompt_needs_no_prefill_node(serving) -> None:
    async def scenario(kitchen) -> None:
        await kitchen.complete("short")
        assert not kitchen.prefill[0].requests

    serving(scenario)


def test_a_prefill_node_that_dies_in_the_middle_is_replaced_by_another(serving) -> None:
    async def scenario(kitchen) -> None:
        kitchen.prefill[0].die_after_blocks = 4
        response = await kitchen.complete(PROMPT)
        assert response.json()["choices"][0]["text"] == kitchen.expected_text(PROMPT, 1, 20)
        assert [len(node.requests) for node in kitchen.prefill] == [1, 1]
        assert len(kitchen.shelf.hashes) == 10
        assert response.json()["usage"]["larder"]["hit_blocks"] == 0

    serving(scenario, prefill_nodes=2)


@pytest.mark.parametrize("trouble", ["dies", "hangs", "frozen", "busy", "refuses", "gone"])
def test_without_a_usable_prefill_node_the_decode_node_computes(serving, trouble) -> None:
    async def scenario(kitchen) -> None:
        (node,) = kitchen.prefill
        if trouble == "dies":
            node.die_after_blocks = 0
        elif trouble == "hangs":
            node.hang_after_blocks = 2
        elif trouble == "frozen":
            node.freeze()
        elif trouble == "busy":
            node.refusal = Overloaded("full")
        elif trouble == "refuses":
            node.refusal = Unavailable("drains")
        else:
            await node.kill()
        response = await kitchen.complete(PROMPT)
        node.thaw()
        assert response.status_code == 200
        assert response.json()["choices"][0]["text"] == kitchen.expected_text(PROMPT, 1, 20)

    serving(scenario)


def test_a_hung_prefill_of_one_request_does_not_hold_up_another(serving) -> None:
    async def scenario(kitchen) -> None:
        kitchen.prefill[0].hang_after_blocks = 2
        slow = asyncio.ensure_future(kitchen.complete(PROMPT))
        await kitchen.until(lambda: bool(kitchen.prefill[0].requests), "the slow one is at the prefill node")
        assert (await kitchen.complete("short")).status_code == 200
        assert not slow.done()
        assert (await slow).status_code == 200
        await asyncio.wait_for(kitchen.prefill[0].cancelled.wait(), 5)

    serving(scenario)


def test_a_draining_prefill_node_gets_nothing(serving) -> None:
    async def scenario(kitchen) -> None:
        kitchen.refresh_view({"prefill-0": MemberState.DRAINING})
        fleet = kitchen.service.fleet
        await kitchen.until(lambda: not fleet.prefill_candidates(fleet.served.identity), "the view was seen")
        assert (await kitchen.complete(PROMPT)).status_code == 200
        assert not kitchen.prefill[0].requests

    serving(scenario)


def test_without_any_store_node_nothing_is_prefilled_in_vain(serving) -> None:
    async def scenario(kitchen) -> None:
        for node in kitchen.stores:
            await node.kill()
        await kitchen.until(lambda: not kitchen.service.fleet.has_store, "noticed")
        response = await kitchen.complete(PROMPT)
        assert response.json()["choices"][0]["text"] == kitchen.expected_text(PROMPT, 1, 20)
        assert not kitchen.prefill[0].requests
        assert kitchen.shelf.probes == len(kitchen.decode[0].requests) + len(kitchen.decode[1].requests)

    serving(scenario)


@pytest.mark.parametrize("failure", [Unavailable("no store"), None])
def test_a_store_that_cannot_say_what_it_holds_counts_as_empty(serving, failure) -> None:
    async def scenario(kitchen) -> None:
        if failure is None:
            kitchen.service._store = Hanging()
        else:
            kitchen.service._store = Failing(failure)
        response = await kitchen.complete("short")
        assert response.status_code == 200
        assert response.json()["choices"][0]["text"] == kitchen.expected_text("short", 1, 20)

    serving(scenario)


class Hanging:
    async def probe_prefix(self, key_space, chain):
        await asyncio.Event().wait()


class Failing:
    def __init__(self, failure) -> None:
        self.failure = failure

    async def probe_prefix(self, key_space, chain):
        raise self.failure


def test_a_node_of_both_roles_computes_the_prompt_where_it_answers(serving) -> None:
    """No detour over the store: the answer goes to the node that would have prefilled, and nothing waits for a publish."""

    async def scenario(kitchen) -> None:
        busy, free = kitchen.decode
        busy.prefiller.queued_tokens = 1000
        roster = kitchen.service.fleet.prefill
        await kitchen.until(
            lambda: any(node.load.queued_tokens for node in roster.nodes.values() if node.load), "the gateway knows which one is busy"
        )
        body = (await kitchen.complete(PROMPT)).json()
        assert body["usage"]["larder"]["decode_nodes"] == [free.node_id]
        assert body["choices"][0]["text"] == kitchen.expected_text(PROMPT, 1, 20)
        assert busy.prefiller.requests == free.prefiller.requests == []
        assert (await kitchen.http.get("/health")).json()["status"] == "ok"

    serving(scenario, prefill_nodes=0, both_roles=True)

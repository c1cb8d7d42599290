"""Streams of a decode node that drains: each moves when its successor is prepared, or stays until it is cut."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.core.view import MemberState
from kvstore.errors import Unavailable


def test_a_draining_node_gets_no_new_sessions_and_hands_its_streams_over(serving) -> None:
    async def scenario(kitchen) -> None:
        def drain(node) -> None:
            kitchen.refresh_view({node.node_id: MemberState.DRAINING})
            node.fail_at[10] = Unavailable("this node drains")

        broken = kitchen.break_at(10, drain)
        text, *_ = await kitchen.streamed()
        assert text == kitchen.expected_text("tell me", 1, 30)
        await asyncio.sleep(0.15)  # three polls: the gateway has seen the view
        for _ in range(4):
            response = await kitchen.complete()
            assert response.json()["usage"]["larder"]["decode_nodes"] != [broken[0].node_id]

    serving(scenario)


def test_a_stream_on_a_draining_node_moves_when_its_successor_is_prepared_and_not_before(serving) -> None:
    async def scenario(kitchen) -> None:
        loaded = asyncio.Event()
        tokens_at = {}

        def drain(node) -> None:
            kitchen.refresh_view({node.node_id: MemberState.DRAINING})

        broken = kitchen.break_at(10, drain)
        for node in kitchen.decode:
            node.token_pause_s = 0.01
            node.preparing = loaded.wait
            node.recoded = True
        stream = asyncio.ensure_future(kitchen.streamed(max_tokens=400))
        await kitchen.until(lambda: any(node.prepared for node in kitchen.decode), "a successor is asked")
        (session,) = kitchen.service.sessions
        tokens_at["asked"] = len(session.transcript.generated_token_ids)
        await kitchen.until(lambda: len(session.transcript.generated_token_ids) > tokens_at["asked"] + 20, "the old node goes on")
        (successor,) = [node for node in kitchen.decode if node.prepared]
        assert not successor.requests
        loaded.set()
        text, token_ids, _, usage = await stream
        assert text == kitchen.expected_text("tell me", 1, 400)
        assert usage["larder"]["decode_nodes"] == [broken[0].node_id, successor.node_id]
        assert (usage["larder"]["failovers"], usage["larder"]["moves"]) == (0, 1)
        assert kitchen.counted("larder_moves_total") == 1
        assert all(asked.recoded for asked in (*successor.prepared, *successor.requests))
        prepared = list(successor.prepared[0].token_ids)
        assert prepared == [*b"tell me", *token_ids][: len(prepared)]
        assert len(successor.requests[0].generated_token_ids) > tokens_at["asked"] + 20

    serving(scenario)


def test_a_stream_whose_blocks_the_store_has_lost_moves_all_the_same(serving) -> None:
    async def scenario(kitchen) -> None:
        kitchen.break_at(10, lambda node: kitchen.refresh_view({node.node_id: MemberState.DRAINING}))
        for node in kitchen.decode:
            node.token_pause_s = 0.005
            node.prepares_all = False
        text, _, _, usage = await kitchen.streamed(max_tokens=400)
        assert text == kitchen.expected_text("tell me", 1, 400)
        assert (usage["larder"]["failovers"], usage["larder"]["moves"]) == (0, 1)
        assert sum(len(node.prepared) for node in kitchen.decode) == 8

    serving(scenario)


@pytest.mark.parametrize("trouble", ["no successor", "cannot prepare"])
def test_a_stream_that_cannot_move_stays_until_it_is_cut(serving, trouble) -> None:
    async def scenario(kitchen) -> None:
        def drain(node) -> None:
            kitchen.refresh_view({node.node_id: MemberState.DRAINING})
            if trouble != "no successor":
                node.fail_at[200] = Unavailable("this node drains")

        kitchen.break_at(10, drain)

        async def refuse() -> None:
            raise Unavailable("full")

        for node in kitchen.decode:
            node.token_pause_s = 0.005
            node.preparing = refuse
        text, token_ids, _, usage = await kitchen.streamed(max_tokens=250)
        assert text == kitchen.expected_text("tell me", 1, 250)
        assert len(token_ids) == 250
        assert usage["larder"]["moves"] == 0
        assert not any(asked.recoded for node in kitchen.decode for asked in node.prepared)

    serving(scenario, decode_nodes=1 if trouble == "no successor" else 2, limits={"failures_in_a_row": 50})

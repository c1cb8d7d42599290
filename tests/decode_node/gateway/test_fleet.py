"""Which nodes serve: who is used, who is not, who comes back, and what /health says of them."""

from __future__ import annotations

import asyncio

from kvstore.core.view import MemberState


def test_health_says_what_is_degraded_and_is_ready_while_a_decode_node_answers(serving) -> None:
    async def scenario(kitchen) -> None:
        async def health(path="/health"):
            response = await kitchen.http.get(path)
            return response.status_code, response.json()

        assert await health() == (200, {"status": "ok", "degraded": []})
        assert await health("/health/live") == (200, {"status": "live"})
        for node in (*kitchen.stores, *kitchen.prefill):
            await node.kill()
        await kitchen.until(lambda: len(kitchen.service.fleet.health().degraded) == 5, "noticed")
        status, body = await health()
        assert (status, body["status"]) == (200, "degraded")
        for words in ("store node store-0 does not answer", "no store node", "no prefill node", "prefill node prefill-0 does not answer"):
            assert any(words in sentence for sentence in body["degraded"])
        assert (await kitchen.complete("a prompt that would have been prefilled")).status_code == 200
        for node in kitchen.decode:
            await node.kill()
        await kitchen.until(lambda: not kitchen.service.fleet.health().ready, "noticed")
        status, body = await health("/health/ready")
        assert (status, body["status"]) == (503, "unavailable")
        assert (await health("/health/live"))[0] == 200
        assert (await kitchen.complete()).status_code == 503

    serving(scenario)


def test_without_any_decode_node_requests_get_503_at_once(serving) -> None:
    async def scenario(kitchen) -> None:
        for path, body in (
            ("/v1/completions", {"model": "oracle", "prompt": "x"}),
            ("/v1/chat/completions", {"model": "oracle", "messages": [{"role": "user", "content": "x"}]}),
            ("/tokenize", {"prompt": "x"}),
        ):
            response = await kitchen.http.post(path, json=body)
            assert response.status_code == 503
            assert response.json()["error"]["type"] == "server_error"

    serving(scenario, decode_nodes=0)


def test_a_node_of_another_model_is_not_used(serving) -> None:
    async def scenario(kitchen) -> None:
        kitchen.decode[0].digest = b"X" * 32
        fleet = kitchen.service.fleet
        await kitchen.until(lambda: len(fleet.decode_candidates(fleet.served.identity)) == 2, "the other one polled")
        for _ in range(6):
            assert (await kitchen.complete()).status_code == 200
        assert not kitchen.decode[0].requests
        assert any("decode-0 serves another model" in sentence for sentence in fleet.health().degraded)

    serving(scenario, decode_nodes=3)


def test_the_context_is_what_every_decode_node_can_hold(serving) -> None:
    async def scenario(kitchen) -> None:
        kitchen.decode[1].max_positions = 64
        await kitchen.until(lambda: kitchen.service.fleet.served.max_positions == 64, "its poll says so")
        assert (await kitchen.http.get("/v1/models")).json()["data"][0]["max_model_len"] == 64
        refused = await kitchen.complete("x", max_tokens=64)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert (await kitchen.complete("x", max_tokens=63)).status_code == 200

    serving(scenario)


def test_sessions_spread_over_the_decode_nodes(serving) -> None:
    async def scenario(kitchen) -> None:
        for node in kitchen.decode:
            node.token_pause_s = 0.005
        responses = await asyncio.gather(*(kitchen.complete(f"{number} is a prompt") for number in range(12)))
        assert all(response.status_code == 200 for response in responses)
        assert [len(node.requests) for node in kitchen.decode] == [4, 4, 4]

    serving(scenario, decode_nodes=3)


def test_the_next_turn_goes_to_the_node_that_has_the_conversation(serving) -> None:
    async def scenario(kitchen) -> None:
        conversation = "a conversation that has begun. "
        nodes = set()
        for turn in range(5):
            usage = (await kitchen.complete(conversation)).json()["usage"]
            nodes.add(usage["larder"]["decode_nodes"][0])
            conversation += f"turn {turn}: more and more. "
        assert len(nodes) == 1

    serving(scenario, decode_nodes=3)


def test_a_node_that_restarts_with_a_new_boot_id_and_address_is_followed(serving) -> None:
    async def scenario(kitchen) -> None:
        (node,) = kitchen.decode
        await node.kill()
        await node.start()
        kitchen.refresh_view()
        fleet = kitchen.service.fleet
        await kitchen.until(lambda: fleet.decode.nodes["decode-0"].member.address == node.address and fleet.health().ready, "followed")
        assert (await kitchen.complete()).status_code == 200
        kitchen.refresh_view({"decode-0": MemberState.LEFT})
        await kitchen.until(lambda: not fleet.health().ready, "gone")

    serving(scenario, decode_nodes=1)

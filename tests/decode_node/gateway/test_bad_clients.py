"""Clients that send too much, or too slowly, or leave, or never read: each is given up, and holds up nobody."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest

from kvstore.units import milliseconds


def test_a_body_beyond_the_limit_is_413_announced_or_not(serving) -> None:
    async def scenario(kitchen) -> None:
        response = await kitchen.http.post("/v1/completions", content=b"x" * 2000)
        assert response.status_code == 413
        assert response.json()["error"]["code"] == "request_too_large"

        async def pieces():
            for _ in range(4):
                yield b"x" * 500

        response = await kitchen.http.post("/v1/completions", content=pieces())
        assert response.status_code == 413

    serving(scenario, limits={"body": 1000})


def test_a_client_that_sends_a_huge_body_before_it_reads_still_gets_its_413(serving) -> None:
    async def scenario(kitchen) -> None:
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", kitchen.port)
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (8 << 20))
            writer.write(b"x" * (8 << 20))
            await writer.drain()
            answer = await asyncio.wait_for(reader.read(), 5)
            assert b" 413 " in answer.splitlines()[0]
            assert b"request_too_large" in answer
            writer.close()

    serving(scenario, limits={"body": 1000})


def test_a_prompt_far_beyond_the_context_is_refused_before_it_is_tokenized_whole(serving) -> None:
    async def scenario(kitchen) -> None:
        for path, body in (
            ("/v1/completions", {"model": "oracle", "prompt": "x" * (4 << 20)}),
            ("/v1/chat/completions", {"model": "oracle", "messages": [{"role": "user", "content": "x"}] * 30_000}),
            ("/tokenize", {"prompt": "x" * (4 << 20)}),
        ):
            response = await asyncio.wait_for(kitchen.http.post(path, json=body), 5)
            assert response.status_code == 400, path
            assert response.json()["error"]["code"] == "context_length_exceeded"
            assert "512 tokens" in response.json()["error"]["message"]

    serving(scenario)


def test_a_later_request_head_that_drips_in_is_cut_off_too(serving) -> None:
    async def scenario(kitchen) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", kitchen.port)
        writer.write(b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"}")
        writer.write(b"GET /health/live HTTP/1.1\r\n")

        async def drip() -> None:
            while True:
                writer.write(b"x-slow: 1\r\n")
                await asyncio.sleep(0.05)

        dripping = asyncio.ensure_future(drip())
        try:
            assert await asyncio.wait_for(reader.read(), 5) == b""
        except ConnectionError:
            pass  # the drop that came after the end
        finally:
            dripping.cancel()
            writer.close()

    serving(scenario)


def test_half_a_request_ends_by_itself(serving) -> None:
    async def scenario(kitchen) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", kitchen.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        answer = await asyncio.wait_for(reader.read(), 5)
        assert b" 408 " in answer.splitlines()[0]
        assert b"request_timeout" in answer
        writer.close()

        reader, writer = await asyncio.open_connection("127.0.0.1", kitchen.port)
        writer.write(b"POST /v1/completions HTT")
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()

        _, writer = await asyncio.open_connection("127.0.0.1", kitchen.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        await writer.drain()
        writer.close()
        assert (await kitchen.complete()).status_code == 200

    serving(scenario)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("stage", ["prefill", "decode"])
def test_a_client_that_goes_away_stops_its_work_everywhere(serving, stream, stage) -> None:
    async def scenario(kitchen) -> None:
        if stage == "prefill":
            kitchen.prefill[0].hang_after_blocks = 1
        for node in kitchen.decode:
            node.token_pause_s = 0.01
        request = asyncio.ensure_future(kitchen.complete("a prompt that is long enough to be prefilled", max_tokens=400, stream=stream))
        working = kitchen.prefill[0] if stage == "prefill" else kitchen.decode[0]
        await kitchen.until(lambda: bool(working.requests) and len(kitchen.service.sessions) == 1, "the work has begun")
        request.cancel()
        await asyncio.wait_for(working.cancelled.wait(), 5)
        await kitchen.until(lambda: len(kitchen.service.sessions) == 0, "the session is gone")
        fleet = kitchen.service.fleet
        assert all(node.in_flight == 0 for node in (*fleet.decode.nodes.values(), *fleet.prefill.nodes.values()))

    serving(scenario, timeouts={"prefill_stall": 20 * 10**9})


def test_a_client_that_reads_nothing_is_given_up(serving) -> None:
    async def scenario(kitchen) -> None:
        body = json.dumps({"model": "oracle", "prompt": "x", "max_tokens": 500, "stream": True}).encode()
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", kitchen.port))
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
            await kitchen.until(lambda: len(kitchen.service.sessions) == 1, "begun")
            await kitchen.until(lambda: len(kitchen.service.sessions) == 0, "given up")
        generated = kitchen.counted("larder_answer_tokens_total")
        assert 0 < generated < 500

    # Small buffers: some 100 KB of events must fill them.
    serving(scenario, timeouts={"send": milliseconds(300)}, send_buffer_bytes=4096)


def test_too_many_answers_at_once_are_429(serving) -> None:
    async def scenario(kitchen) -> None:
        kitchen.decode[0].freeze()
        kitchen.decode[1].freeze()
        waiting = asyncio.ensure_future(kitchen.complete())
        await kitchen.until(lambda: len(kitchen.service.sessions) == 1, "one in progress")
        response = await kitchen.complete()
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "overloaded"
        kitchen.decode[0].thaw()
        kitchen.decode[1].thaw()
        assert (await waiting).status_code == 200

    serving(scenario, limits={"sessions": 1})

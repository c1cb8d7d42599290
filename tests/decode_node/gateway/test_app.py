"""The HTTP door over real sockets: replies, errors in OpenAI's shape, clients that leave or never finish."""

from __future__ import annotations

import asyncio
import json
import socket

import openai
import pytest

from kvstore.core.view import MemberState
from kvstore.units import milliseconds

CHAT = {"model": "oracle", "messages": [{"role": "user", "content": "你好"}], "seed": 1, "max_tokens": 20}


def data_lines(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.split("\n\n") if line]


def test_a_completion_is_the_oracles_text_with_usage(serving) -> None:
    async def scenario(kitchen) -> None:
        response = await kitchen.complete("tell me a story", seed=7, max_tokens=30)
        assert response.status_code == 200
        body = response.json()
        assert body["choices"][0]["text"] == kitchen.expected_text("tell me a story", 7, 30)
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["object"] == "text_completion"
        usage = body["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (15, 30, 45)
        assert usage["larder"]["failovers"] == 0
        assert usage["larder"]["prompt_blocks"] == 3
        assert usage["larder"]["ttft_ms"] > 0
        assert response.headers["x-larder-request-id"] in body["id"]

    serving(scenario)


def test_a_stream_ends_with_done_and_says_the_same(serving) -> None:
    async def scenario(kitchen) -> None:
        response = await kitchen.complete("hello", seed=7, max_tokens=30, stream=True, stream_options={"include_usage": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = data_lines(response.text)
        assert lines[-1] == "[DONE]"
        pieces = [json.loads(line) for line in lines[:-1]]
        assert "".join(piece["choices"][0]["text"] for piece in pieces[:-1]) == kitchen.expected_text("hello", 7, 30)
        assert pieces[-2]["choices"][0]["finish_reason"] == "length"
        assert pieces[-1]["choices"] == []
        assert pieces[-1]["usage"]["completion_tokens"] == 30
        assert len({piece["id"] for piece in pieces}) == 1

    serving(scenario)


def test_without_include_usage_a_stream_has_none(serving) -> None:
    async def scenario(kitchen) -> None:
        response = await kitchen.complete(stream=True)
        assert all(json.loads(line)["choices"] for line in data_lines(response.text)[:-1])

    serving(scenario)


def test_token_ids_of_a_stream_and_of_a_whole_answer_are_equal(serving) -> None:
    async def scenario(kitchen) -> None:
        whole = (await kitchen.complete(larder={"return_token_ids": True})).json()["choices"][0]
        streamed = data_lines((await kitchen.complete(larder={"return_token_ids": True}, stream=True)).text)[:-1]
        token_ids = [token_id for line in streamed for token_id in json.loads(line)["choices"][0]["token_ids"]]
        assert token_ids == whole["token_ids"]
        assert bytes(token_ids).decode() == whole["text"]
        assert "token_ids" not in (await kitchen.complete()).json()["choices"][0]

    serving(scenario)


def test_the_openai_client_completes_and_chats_whole_and_streaming(serving) -> None:
    async def scenario(kitchen) -> None:
        async with openai.AsyncOpenAI(base_url=kitchen.url + "/v1", api_key="none") as client:
            expected = kitchen.expected_text("hello", 3, 20)
            whole = await client.completions.create(model="oracle", prompt="hello", seed=3, max_tokens=20)
            assert whole.choices[0].text == expected
            stream = await client.completions.create(model="oracle", prompt="hello", seed=3, max_tokens=20, stream=True)
            assert "".join([piece.choices[0].text async for piece in stream]) == expected

            prompt = "<user>你好\n<assistant>"
            expected = kitchen.expected_text(prompt, 3, 20)
            chat = await client.chat.completions.create(
                model="oracle", messages=[{"role": "user", "content": "你好"}], seed=3, max_completion_tokens=20
            )
            assert chat.choices[0].message.content == expected
            assert chat.choices[0].message.role == "assistant"
            assert chat.usage is not None
            assert chat.usage.prompt_tokens == len(prompt.encode())
            chunks = await client.chat.completions.create(
                model="oracle",
                messages=[{"role": "user", "content": "你好"}],
                seed=3,
                max_tokens=20,
                stream=True,
                stream_options={"include_usage": True},
            )
            received = [chunk async for chunk in chunks]
            assert received[0].choices[0].delta.role == "assistant"
            assert "".join(chunk.choices[0].delta.content or "" for chunk in received if chunk.choices) == expected
            assert received[-1].usage is not None
            assert received[-1].usage.completion_tokens == 20
            assert [model.id async for model in client.models.list()] == ["oracle"]
            assert (await client.models.retrieve("oracle")).id == "oracle"
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await client.completions.create(model="gpt-9", prompt="hello")
            with pytest.raises(openai.BadRequestError, match="not supported"):
                await client.completions.create(model="oracle", prompt="hello", suffix="!")

    serving(scenario)


def test_chinese_streams_without_broken_characters_and_stops_at_a_chinese_stop_string(serving) -> None:
    async def scenario(kitchen) -> None:
        answer = "储藏室里有🙂面包，还有牛奶。结束。后面不该出现"
        for node in kitchen.decode:
            node.script = list(answer.encode())
            node.token_pause_s = 0.002
        response = await kitchen.http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 200, "stream": True, "stop": "结束"})
        pieces = [json.loads(line) for line in data_lines(response.text)[:-1]]
        texts = [piece["choices"][0]["delta"].get("content", "") for piece in pieces]
        assert "".join(texts) == "储藏室里有🙂面包，还有牛奶。"
        assert all("\ufffd" not in text for text in texts)
        assert pieces[-1]["choices"][0]["finish_reason"] == "stop"
        await asyncio.wait_for(kitchen.decode[0].cancelled.wait(), 5)

    serving(scenario)


def test_a_completion_begins_with_the_space_before_its_first_word(serving) -> None:
    async def scenario(kitchen) -> None:
        for node in kitchen.decode:
            node.script = list(b"bcd")
        answer = (await kitchen.complete("x a", echo=True, logprobs=None)).json()["choices"][0]["text"]
        assert answer == "x a b c d"
        streamed = data_lines((await kitchen.complete("x a", stream=True)).text)[:-1]
        assert "".join(json.loads(line)["choices"][0]["text"] for line in streamed) == " b c d"
        chat = (await kitchen.http.post("/v1/chat/completions", json=CHAT)).json()
        assert chat["choices"][0]["message"]["content"] == "b c d"

    serving(scenario, words=True)


def test_an_answer_the_model_ends_itself_stops(serving) -> None:
    async def scenario(kitchen) -> None:
        for node in kitchen.decode:
            node.script = list("完。".encode())
        body = (await kitchen.complete()).json()
        assert body["choices"][0]["text"] == "完。"
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"]["completion_tokens"] == 6

    serving(scenario)


def test_what_the_node_is_asked_for(serving) -> None:
    async def scenario(kitchen) -> None:
        await kitchen.complete("x", temperature=0, top_k=5, top_p=0.5, seed=-1, ignore_eos=True, max_tokens=3)
        await kitchen.complete("x", seed=None, max_tokens=None)
        await kitchen.complete("x", seed=None, top_p=0, top_k=-1)
        await kitchen.complete("x", seed=None, top_p=1e-50, larder={"priority": -2})
        await kitchen.complete(
            "x", min_p=0.25, presence_penalty=0.5, frequency_penalty=-1, repetition_penalty=1.5, logit_bias={"5": 2}, stop_token_ids=[9]
        )
        first, second, third, nearly, fourth = (request for node in kitchen.decode for request in node.requests)
        sampling = first.sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.seed) == (0.0, 5, 0.5, 2**64 - 1)
        assert (first.ignore_eos, first.max_tokens, first.namespace, first.priority) == (True, 3, "default", 0)
        assert (second.sampling.temperature, second.sampling.top_p) == (1.0, 1.0)
        assert second.max_tokens == 511
        assert second.sampling.seed != third.sampling.seed
        assert (third.sampling.temperature, third.sampling.top_k) == (0.0, 0)
        assert (third.sampling.min_p, third.sampling.repetition_penalty, third.HasField("top_logprobs")) == (0.0, 1.0, False)
        assert (nearly.sampling.temperature, nearly.sampling.top_p, nearly.priority) == (0.0, 1.0, -2)
        asked = fourth.sampling
        assert (asked.min_p, asked.presence_penalty, asked.frequency_penalty, asked.repetition_penalty) == (0.25, 0.5, -1.0, 1.5)
        assert (dict(asked.logit_bias), list(fourth.stop_token_ids)) == ({5: 2.0}, [9])

    serving(scenario, decode_nodes=1)


def test_prompts_as_token_ids_and_as_text_are_the_same(serving) -> None:
    async def scenario(kitchen) -> None:
        texts = {(await kitchen.complete(prompt)).json()["choices"][0]["text"] for prompt in ("hi 你", list("hi 你".encode()), ["hi 你"])}
        assert len(texts) == 1

    serving(scenario)


BAD_INPUT = [
    ("POST", "/v1/completions", {"model": "gpt-9", "prompt": "x"}, 404, "model_not_found", "serves 'oracle'"),
    ("POST", "/v1/chat/completions", {**CHAT, "model": "gpt-9"}, 404, "model_not_found", "gpt-9"),
    ("POST", "/v1/completions", {"model": "oracle", "prompt": ""}, 400, None, "empty"),
    ("POST", "/v1/completions", {"model": "oracle", "prompt": []}, 400, None, "empty"),
    ("POST", "/v1/completions", {"model": "oracle", "prompt": [256]}, 400, None, "[0, 256)"),
    ("POST", "/v1/completions", {"model": "oracle", "prompt": [-1]}, 400, None, "[0, 256)"),
    ("POST", "/v1/completions", {"model": "oracle", "prompt": "x" * 512}, 400, "context_length_exceeded", "512 tokens"),
    ("POST", "/v1/completions", {"model": "oracle", "prompt": "x" * 500, "max_tokens": 13}, 400, "context_length_exceeded", "513"),
    ("POST", "/v1/completions", {"model": "oracle", "prompt": "x", "max_tokens": 512}, 400, "context_length_exceeded", "512"),
    ("POST", "/v1/completions", {"model": "oracle", "prompt": "x", "logit_bias": {"256": 1}}, 400, None, "[0, 256)"),
    ("POST", "/v1/completions", {"model": "oracle", "prompt": "x", "stop_token_ids": [256]}, 400, None, "[0, 256)"),
    ("POST", "/v1/completions", {"model": "oracle", "prompt": [256], "echo": True}, 400, None, "[0, 256)"),
    ("POST", "/v1/completions", {"model": "oracle", "prompt": "x", "foo": 1}, 400, "unknown_parameter", "'foo'"),
    ("POST", "/v1/completions", {"model": "oracle"}, 400, "missing_required_parameter", "'prompt'"),
    ("POST", "/v1/completions", [1], 400, "invalid_json", "object"),
    ("POST", "/v1/completions", "{not json", 400, "invalid_json", "JSON"),
    ("POST", "/v1/completions", '{"model": "oracle", "prompt": "\\ud800"}', 400, "invalid_json", "JSON"),
    ("POST", "/v1/completions", '{"model": "oracle", "prompt": "x", "temperature": NaN}', 400, "invalid_json", "JSON"),
    ("POST", "/v1/completions", "[" * 5000, 400, "invalid_json", "JSON"),
    ("POST", "/v1/completions", b"\xff\xfe", 400, "invalid_json", "JSON"),
    ("POST", "/v1/completions", "", 400, "invalid_json", "JSON"),
    ("GET", "/v1/completions", None, 405, "method_not_allowed", "GET"),
    ("POST", "/v1/models", None, 405, "method_not_allowed", "POST"),
    ("GET", "/v1/models/gpt-9", None, 404, "model_not_found", "gpt-9"),
    ("GET", "/nothing/here", None, 404, "unknown_url", "/nothing/here"),
    ("POST", "/tokenize", {}, 400, None, "prompt or messages"),
]  # fmt: skip


def test_bad_input_gets_a_clear_error_of_openais_shape(serving) -> None:
    async def scenario(kitchen) -> None:
        for method, path, body, status, code, words in BAD_INPUT:
            content = body if isinstance(body, str | bytes | None) else json.dumps(body)
            response = await kitchen.http.request(method, path, content=content)
            assert response.status_code == status, (path, body)
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["code"] == code, (path, body)
            assert words in error["message"], (path, body)
            assert response.headers["x-larder-request-id"]
        assert (await kitchen.complete()).status_code == 200

    serving(scenario)


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


def test_live_sessions_say_which_decode_node_serves_them(serving) -> None:
    async def scenario(kitchen) -> None:
        for node in kitchen.decode:
            node.token_pause_s = 0.01
        request = asyncio.ensure_future(kitchen.complete(max_tokens=100))
        await kitchen.until(lambda: any(session.state == "streaming" for session in kitchen.service.sessions), "streaming")
        (listed,) = (await kitchen.http.get("/larder/sessions")).json()["sessions"]
        assert listed["decode_node"] in ("decode-0", "decode-1")
        assert listed["state"] == "streaming"
        assert listed["generated_tokens"] >= 1
        response = await request
        assert response.headers["x-larder-request-id"] == listed["request_id"]
        assert (await kitchen.http.get("/larder/sessions")).json() == {"sessions": []}

    serving(scenario)


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
            ("/v1/chat/completions", CHAT),
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


def test_api_keys_name_namespaces_and_tenants_see_only_their_own(serving) -> None:
    async def scenario(kitchen) -> None:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic key-a"}, {"authorization": "Bearer"}):
            response = await kitchen.http.post("/v1/completions", json={"model": "oracle", "prompt": "x"}, headers=headers)
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert (await kitchen.http.get("/v1/models")).status_code == 401
        assert (await kitchen.http.get("/larder/sessions")).status_code == 401
        assert (await kitchen.http.get("/health")).status_code == 200
        assert (await kitchen.http.get("/metrics")).status_code == 404
        a, b = ({"authorization": f"Bearer key-{name}"} for name in "ab")
        prompt = {"model": "oracle", "prompt": "the same words of two tenants", "max_tokens": 5}
        for headers, hits in ((a, 0), (a, 7), (b, 0)):
            usage = (await kitchen.http.post("/v1/completions", json=prompt, headers=headers)).json()["usage"]
            assert usage["larder"]["hit_blocks"] == hits
        assert [request.namespace for request in kitchen.prefill[0].requests] == ["tenant-a", "tenant-b"]
        for node in kitchen.decode:
            node.token_pause_s = 0.01
        request = asyncio.ensure_future(kitchen.http.post("/v1/completions", json={**prompt, "max_tokens": 50}, headers=a))
        await kitchen.until(lambda: len(kitchen.service.sessions) == 1, "begun")
        assert len((await kitchen.http.get("/larder/sessions", headers=a)).json()["sessions"]) == 1
        assert (await kitchen.http.get("/larder/sessions", headers=b)).json()["sessions"] == []
        await request

    serving(scenario, api_keys={"key-a": "tenant-a", "key-b": "tenant-b"})


def test_tokenize_says_the_tokens_and_the_chain(serving) -> None:
    async def scenario(kitchen) -> None:
        body = (await kitchen.http.post("/tokenize", json={"prompt": "nine byte"})).json()
        assert body["tokens"] == list(b"nine byte")
        assert (body["block_tokens"], body["namespace"], body["layout_fingerprint"]) == (4, "default", (b"L" * 32).hex())
        assert [block["index"] for block in body["blocks"]] == [0, 1]
        assert body["blocks"][1]["parent"] == body["blocks"][0]["hash"]
        assert body["blocks"][0]["stripe"] == body["blocks"][0]["hash"]
        chat = (await kitchen.http.post("/tokenize", json={"messages": CHAT["messages"]})).json()
        assert bytes(chat["tokens"]).decode() == "<user>你好\n<assistant>"

    serving(scenario)


def test_metrics_count_requests_by_route_and_never_by_path(serving) -> None:
    async def scenario(kitchen) -> None:
        await kitchen.complete()
        await kitchen.http.get("/a/path/of/the/clients/choosing")
        text = (await kitchen.http.get("/metrics")).text
        assert 'larder_requests_total{route="/v1/completions",status="200"} 1.0' in text
        assert 'larder_requests_total{route="unmatched",status="404"} 1.0' in text
        assert "choosing" not in text
        assert "larder_ttft_seconds_count 1.0" in text
        assert "larder_itl_seconds_count 19.0" in text

    serving(scenario)


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

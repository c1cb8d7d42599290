"""The HTTP door over real sockets: replies, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

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

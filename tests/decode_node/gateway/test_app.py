from __future__ import annotations

import json


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
        assert response.headers["x-larder-request-id"] in body["id"]

    serving(scenario)


def test_a_stream_ends_with_done_and_says_the_same(serving) -> None:
    async def scenario(kitchen) -> None:
        request = {
            "model": "oracle",
            "prompt": "hello",
            "seed": 7,
            "max_tokens": 30,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with kitchen.http.stream("POST", "/v1/completions", json=request) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        pieces = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
        assert "".join(piece["choices"][0]["text"] for piece in pieces[:-1]) == kitchen.expected_text("hello", 7, 30)
        assert pieces[-2]["choices"][0]["finish_reason"] == "length"
        assert pieces[-1]["choices"] == []
        assert pieces[-1]["usage"]["completion_tokens"] == 30

    serving(scenario)

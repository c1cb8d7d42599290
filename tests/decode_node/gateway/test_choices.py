"""What the official client is given for n, logprobs and echo, whole and streaming."""

from __future__ import annotations

import asyncio

import openai

from decode_node.gateway.choices import seed_of_choice
from kvstore.core.view import MemberState

LONG = "a prompt that is long enough for a prefill node of its own"


def test_each_of_n_choices_has_a_seed_of_its_own_and_one_prompt(serving) -> None:
    async def scenario(kitchen) -> None:
        expected = [kitchen.expected_text(LONG, seed_of_choice(1, index), 20) for index in range(3)]
        async with openai.AsyncOpenAI(base_url=kitchen.url + "/v1", api_key="none") as client:
            whole = await client.completions.create(model="oracle", prompt=LONG, seed=1, max_tokens=20, n=3)
            assert [choice.index for choice in whole.choices] == [0, 1, 2]
            assert [choice.text for choice in whole.choices] == expected
            assert len(set(expected)) == 3
            assert whole.usage is not None
            assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(LONG), 60)
            pieces = [
                piece
                async for piece in await client.completions.create(model="oracle", prompt=LONG, seed=1, max_tokens=20, n=3, stream=True)
            ]
        for index in range(3):
            own = [choice for piece in pieces for choice in piece.choices if choice.index == index]
            assert "".join(choice.text for choice in own) == expected[index]
            assert [choice.finish_reason for choice in own if choice.finish_reason] == ["length"]
        assert len(kitchen.prefill[0].requests) == 1  # the second time, the store had it
        for request in range(2):
            asked = [node for node in kitchen.decode if len(node.requests) > request]
            assert len(asked) == 1  # the choices of a request follow the first one to its node

    serving(scenario, decode_nodes=2)


def test_a_client_that_leaves_stops_all_choices(serving) -> None:
    async def scenario(kitchen) -> None:
        for node in kitchen.decode:
            node.token_pause_s = 0.005
        body = {"model": "oracle", "prompt": "x", "max_tokens": 400, "n": 4, "stream": True}
        async with kitchen.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            await kitchen.until(lambda: sum(node.streams for node in kitchen.decode) == 4, "all choices stream")
        await kitchen.until(lambda: sum(node.streams for node in kitchen.decode) == 0, "no choice streams any more")

    serving(scenario)


def test_the_usage_of_all_choices_counts_the_moves_of_each(serving) -> None:
    async def scenario(kitchen) -> None:
        for node in kitchen.decode:
            node.token_pause_s = 0.005
        answer = asyncio.ensure_future(kitchen.complete(n=2, max_tokens=300))
        await kitchen.until(lambda: sum(node.streams for node in kitchen.decode) == 2, "both choices stream")
        kitchen.refresh_view({node.node_id: MemberState.DRAINING for node in kitchen.decode if node.streams})
        for node in kitchen.decode:
            node.token_pause_s = 0.001
        usage = (await answer).json()["usage"]
        assert (usage["larder"]["moves"], usage["larder"]["failovers"], usage["completion_tokens"]) == (2, 0, 600)

    serving(scenario)


def test_a_failing_choice_fails_the_request(serving) -> None:
    async def scenario(kitchen) -> None:
        kitchen.service.sessions._limit = 2
        response = await kitchen.complete(n=3)
        assert response.status_code == 429
        assert len(kitchen.service.sessions) == 0

    serving(scenario)


def test_logprobs_of_a_chat_name_each_token_with_its_bytes(serving) -> None:
    async def scenario(kitchen) -> None:
        for node in kitchen.decode:
            node.script = list("a好".encode())
        async with openai.AsyncOpenAI(base_url=kitchen.url + "/v1", api_key="none") as client:
            chat = await client.chat.completions.create(
                model="oracle", messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=2, max_tokens=20
            )
            found = chat.choices[0].logprobs
            assert chat.choices[0].message.content == "a好"
            assert found is not None
            assert found.content is not None
            assert [entry.logprob for entry in found.content] == [0, -0.125, -0.25, -0.375]
            assert bytes(byte for entry in found.content for byte in entry.bytes or ()) == "a好".encode()
            assert [(top.token, top.logprob) for top in found.content[0].top_logprobs] == [("a", 0), ("b", -1)]
            stream = await client.chat.completions.create(
                model="oracle", messages=[{"role": "user", "content": "x"}], logprobs=True, max_tokens=20, stream=True
            )
            pieces = [choice async for piece in stream for choice in piece.choices]
            entries = [entry for piece in pieces if piece.logprobs for entry in piece.logprobs.content or ()]
            assert [entry.logprob for entry in entries] == [0, -0.125, -0.25, -0.375]
            assert all(entry.top_logprobs == [] for entry in entries)

    serving(scenario)


def test_logprobs_of_a_completion_are_lists_side_by_side(serving) -> None:
    async def scenario(kitchen) -> None:
        for node in kitchen.decode:
            node.script = list("a好b".encode())
        async with openai.AsyncOpenAI(base_url=kitchen.url + "/v1", api_key="none") as client:
            answer = await client.completions.create(model="oracle", prompt="x", logprobs=1, max_tokens=20)
        found = answer.choices[0].logprobs
        assert found is not None
        assert found.tokens == ["a", "bytes:\\xe5", "bytes:\\xa5", "bytes:\\xbd", "b"]
        assert found.token_logprobs == [0, -0.125, -0.25, -0.375, -0.5]
        assert found.text_offset == [0, 1, 1, 1, 2]
        assert found.top_logprobs is not None
        assert found.top_logprobs[4] == {"b": -0.5}

    serving(scenario)


def test_logprobs_go_on_where_a_node_died(serving) -> None:
    async def scenario(kitchen) -> None:
        kills = []
        for node in kitchen.decode:
            node.token_pause_s = 0.005
            node.before_token = lambda at, node=node: kills.append(asyncio.ensure_future(node.kill())) if at == 9 and not kills else None
        body = {"model": "oracle", "prompt": "x", "max_tokens": 20, "logprobs": 0, "seed": 1}
        answer = (await kitchen.http.post("/v1/completions", json=body)).json()
        await asyncio.gather(*kills)
        assert answer["usage"]["larder"]["failovers"] == 1
        assert answer["choices"][0]["logprobs"]["token_logprobs"] == [-position / 8 for position in range(20)]
        assert answer["choices"][0]["logprobs"]["text_offset"] == list(range(20))

    serving(scenario)


def test_an_echo_stands_before_each_answer(serving) -> None:
    async def scenario(kitchen) -> None:
        answers = [kitchen.expected_text("你好", seed_of_choice(1, index), 5) for index in range(2)]
        whole = (await kitchen.complete("你好", echo=True, n=2, max_tokens=5)).json()
        assert [choice["text"] for choice in whole["choices"]] == ["你好" + answer for answer in answers]
        ids = (await kitchen.complete(list("你好".encode()), echo=True, max_tokens=5)).json()
        assert ids["choices"][0]["text"] == "你好" + answers[0]
        async with openai.AsyncOpenAI(base_url=kitchen.url + "/v1", api_key="none") as client:
            stream = await client.completions.create(model="oracle", prompt="你好", echo=True, seed=1, max_tokens=5, stream=True)
            texts = [piece.choices[0].text async for piece in stream]
        assert texts[0] == "你好"
        assert "".join(texts) == "你好" + answers[0]

    serving(scenario)

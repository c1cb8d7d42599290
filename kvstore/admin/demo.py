"""The five acts of `kvctl demo`, measured at the client of a real cluster. Returns records; prints nothing.

Two short requests go before the first act, so that no act pays for threads that start and kernels that compile.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from importlib.resources import files
from typing import Any

import httpx

from kvstore.admin import commands
from kvstore.admin.cluster_access import ClusterAccess
from kvstore.admin.local_cluster import LocalCluster
from kvstore.admin.stream_client import Stream, stream_chat
from kvstore.errors import Unavailable

Act = dict[str, Any]
Tell = Callable[[str], None]

FIRST_QUESTION = "What does the lens of Skerry Light consist of, and how often does it go round?"
SECOND_QUESTION = "Who holds the record for coupling the second motor, and what is it?"
KILLED_QUESTION = "Tell the story of one day and one night on the rock, watch by watch."
ANSWER_TOKENS = 48
KILLED_ANSWER_TOKENS = 160
KILL_AFTER_TOKENS = 72
"""Two generated blocks of 32 tokens are sealed by then, and a tail of unsealed tokens is open."""
STREAM_LENGTHS = ((40, 96), (90, 24), (160, 64), (260, 16), (380, 80), (520, 32), (700, 48), (900, 40))
"""(words of the prompt, tokens of the answer) of act 3; each prompt is another part of the text."""
SEED = 7
_HIT_TOKENS = re.compile(r'^larder_hit_tokens_total\{tier="(\w+)"\} (\S+)$', re.MULTILINE)


async def play(cluster: LocalCluster, tell: Tell) -> AsyncGenerator[Act, None]:
    """Yield each act as it ends. Raises a LarderError when one cannot be played to its end."""
    async with httpx.AsyncClient(base_url=cluster.gateway_url, timeout=httpx.Timeout(120, connect=5), trust_env=False) as client:
        stage = _Stage(cluster, client, tell, await _model_name(client))
        await stage.warm_up()
        for act in (stage.cold, stage.hit, stage.streams, stage.decode_killed, stage.store_killed):
            yield await act()


def is_good(act: Act) -> bool:
    """Whether the act shows what it is meant to show."""
    checks = {
        "cold": lambda: act["ttft_ms"] > 0,
        "hit": lambda: act["hit_blocks"] > 0,
        "streams": lambda: act["completed"] == len(STREAM_LENGTHS),
        "decode_killed": lambda: act["tokens_equal"] and act["failovers"] >= 1,
        "store_killed": lambda: act["hit_blocks"] > 0 and act["tokens_equal"],
    }
    return bool(checks[act["name"]]())


class _Stage:
    def __init__(self, cluster: LocalCluster, client: httpx.AsyncClient, tell: Tell, model: str) -> None:
        self._cluster = cluster
        self._client = client
        self._tell = tell
        self._model = model
        self._text = files("kvstore.admin").joinpath("texts/lighthouse.txt").read_text()
        self._cold_ttft_ms = 0.0
        self._hit: Stream | None = None

    async def warm_up(self) -> None:
        self._tell("warming up")
        words = " ".join(f"warm-up {number}" for number in range(150))
        for _ in range(2):
            await asyncio.gather(*(self._ask([_user(f"{turn}: {words}")], max_tokens=40) for turn in "ab"))

    async def cold(self) -> Act:
        self._tell("act 1: a long prompt, cold")
        stream = await self._ask(self._about_text(FIRST_QUESTION))
        self._cold_ttft_ms = stream.ttft_ms
        return {
            "name": "cold",
            "prompt_tokens": stream.usage["prompt_tokens"],
            "hit_blocks": stream.larder["hit_blocks"],
            "ttft_ms": stream.ttft_ms,
            "tokens_per_s": stream.tokens_per_s,
        }

    async def hit(self) -> Act:
        self._tell("act 2: another question on the same text")
        before = await self._tokens_by_tier()
        stream = self._hit = await self._ask(self._about_text(SECOND_QUESTION))
        return {"name": "hit", **self._hit_fields(stream), "tokens_from": await self._tokens_by_tier(before)}

    async def streams(self) -> Act:
        self._tell(f"act 3: {len(STREAM_LENGTHS)} streams of mixed lengths at once")
        words = self._text.split()
        requests = []
        for number, (prompt_words, answer_tokens) in enumerate(STREAM_LENGTHS):
            part = " ".join(words[number * 20 : number * 20 + prompt_words])
            requests.append(self._ask([_user(f"{number}. Go on with this text: {part}")], max_tokens=answer_tokens))
        results = await asyncio.gather(*requests, return_exceptions=True)
        done = [result for result in results if isinstance(result, Stream)]
        for failed in (result for result in results if not isinstance(result, Stream)):
            if not isinstance(failed, Unavailable):
                raise failed
            self._tell(str(failed))
        complete = [stream for stream in done if len(stream.token_ids) == stream.usage["completion_tokens"] > 0]
        tokens = sum(len(stream.token_ids) for stream in done)
        took = max(stream.arrivals[-1] for stream in done) - min(stream.sent_at for stream in done) if done else 0.0
        return {"name": "streams", "completed": len(complete), "tokens": tokens, "tokens_per_s": round(tokens / took, 1) if took else 0.0}

    async def decode_killed(self) -> Act:
        """The killed run goes first: an undisturbed one before it would leave its blocks for the successor to find."""
        self._tell("act 4: kill -9 of the decode node in the middle of a stream")
        victims: list[str] = []

        def kill_once(stream: Stream) -> None:
            if not victims and len(stream.token_ids) >= KILL_AFTER_TOKENS:
                victims.append(self._cluster.decode_node_of_the_only_stream())
                self._cluster.processes[victims[0]].kill()

        question = self._about_text(KILLED_QUESTION)
        killed = await self._ask(question, max_tokens=KILLED_ANSWER_TOKENS, on_token=kill_once)
        self._tell(f"act 4: {victims[0]} killed, the stream went on; now the same without a kill")
        undisturbed = await self._ask(question, max_tokens=KILLED_ANSWER_TOKENS)
        self._cluster.restart(victims[0])
        return {
            "name": "decode_killed",
            "killed": victims[0],
            "tokens": len(killed.token_ids),
            "tokens_equal": killed.token_ids == undisturbed.token_ids,
            "failovers": killed.larder["failovers"],
            "gap_ms": killed.longest_gap_ms,
            "undisturbed_gap_ms": undisturbed.longest_gap_ms,
        }

    async def store_killed(self) -> Act:
        """Both decode nodes start anew before the question, so that no local pool can answer it: only the store can."""
        self._tell("act 5: fresh decode nodes, then kill -9 of a store node")
        assert self._hit is not None
        question = self._about_text(SECOND_QUESTION)
        await self._renew_decode_nodes()
        victim = await self._store_node_with_most_blocks(question)
        self._cluster.processes[victim].kill()
        before = await self._tokens_by_tier()
        stream = await self._ask(question)
        return {
            "name": "store_killed",
            "killed": victim,
            **self._hit_fields(stream),
            "tokens_from": await self._tokens_by_tier(before),
            "tokens_equal": stream.token_ids == self._hit.token_ids,
        }

    def _hit_fields(self, stream: Stream) -> Act:
        return {
            "hit_blocks": stream.larder["hit_blocks"],
            "prompt_blocks": stream.larder["prompt_blocks"],
            "ttft_ms": stream.ttft_ms,
            "ttft_ratio": round(stream.ttft_ms / self._cold_ttft_ms, 3),
        }

    async def _tokens_by_tier(self, before: Mapping[str, int] | None = None) -> dict[str, int]:
        """Prompt tokens by where the decode nodes had their KV from (pool, host, ssd, recompute), by their own metrics; since `before`."""
        counted: Counter[str] = Counter()
        for process in self._cluster.processes.values():
            if process.role == "decode" and process.exit_code is None:
                text = (await self._client.get(f"http://{process.addresses['metrics']}/metrics")).text
                counted.update({tier: round(float(tokens)) for tier, tokens in _HIT_TOKENS.findall(text)})
        counted.subtract(before or {})
        return {tier: tokens for tier, tokens in sorted(counted.items()) if tokens}

    def _about_text(self, question: str) -> list[Mapping[str, str]]:
        return [_user(f"{self._text}\nQuestion: {question}")]

    async def _ask(
        self,
        messages: list[Mapping[str, str]],
        *,
        max_tokens: int = ANSWER_TOKENS,
        on_token: Callable[[Stream], None] = lambda stream: None,
    ) -> Stream:
        body = {
            "model": self._model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "seed": SEED,
            "ignore_eos": True,
        }
        return await stream_chat(self._client, body, on_token=on_token)

    async def _renew_decode_nodes(self) -> None:
        """One after the other, so that the gateway always has one to talk to."""
        for process in [process for process in self._cluster.processes.values() if process.role == "decode"]:
            self._cluster.restart(process.name)

    async def _store_node_with_most_blocks(self, messages: list[Mapping[str, str]]) -> str:
        access = ClusterAccess(redis_url=self._cluster.redis_url, gateway_url=self._cluster.gateway_url)
        located = await commands.locate(access, {"messages": messages})
        first_copies = Counter(block["owners"][0] for block in located["blocks"] if block["copies"])
        if not first_copies:
            raise Unavailable("no store node holds a block of the prompt")
        return str(first_copies.most_common(1)[0][0])


async def _model_name(client: httpx.AsyncClient) -> str:
    try:
        return str((await client.get("/v1/models")).json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
        raise Unavailable(f"the gateway does not list its model: {error!r}") from None


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}

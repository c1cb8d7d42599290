"""A client of one cluster for measurements: prompts of an exact length that nobody has seen, and streams of tokens."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import httpx

from kvstore.admin.stream_client import Stream, stream_completion
from kvstore.errors import Unavailable

_WORDS = ("larder", "keeps", "what", "the", "kitchen", "has", "cooked", "and", "who", "comes", "back", "goes", "on", "from", "there")
_TIMEOUT_S = 600.0


class BenchClient:
    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self.http = http
        self._model = model

    async def prompt(self, tokens: int, *, seed: int) -> list[int]:
        """Exactly `tokens` token ids; another seed gives another first block."""
        draw = random.Random(seed)
        text = " ".join([f"{draw.getrandbits(64):x}", *draw.choices(_WORDS, k=tokens)])
        answer = await self.http.post("/tokenize", json={"model": self._model, "prompt": text})
        if answer.status_code != 200:
            raise Unavailable(f"the gateway does not tokenize: {answer.text[:200]}")
        token_ids: list[int] = answer.json()["tokens"]
        return token_ids[:tokens]

    async def ask(self, prompt: Sequence[int], *, tokens: int, on_token: Callable[[Stream], None] = lambda stream: None) -> Stream:
        """A greedy answer of exactly so many tokens. Raises Unavailable when there is no whole one."""
        body = {"model": self._model, "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "seed": 1, "ignore_eos": True}
        return await stream_completion(self.http, body, on_token=on_token)

    async def warm_up(self) -> None:
        """Kernels are compiled or loaded, and pools touched, before anything is measured."""
        for seed in (-1, -2):
            await self.ask(await self.prompt(300, seed=seed), tokens=40)


@asynccontextmanager
async def opened_client(url: str) -> AsyncIterator[BenchClient]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, trust_env=False, limits=limits) as http:
        yield BenchClient(http, str((await http.get("/v1/models")).json()["data"][0]["id"]))

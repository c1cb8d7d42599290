"""A gateway with oracle nodes, all over real sockets: gRPC to the nodes, HTTP from the client."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from decode_node.gateway.app import create_app
from decode_node.gateway.backends import GrpcBackends
from decode_node.gateway.config import GatewayConfig, LimitsConfig, RoutingConfig, TimeoutsConfig
from decode_node.gateway.fleet import Fleet
from decode_node.gateway.http_server import HttpServer
from decode_node.gateway.metrics import GatewayMetrics
from decode_node.gateway.service import GatewayService
from kvstore.clock import SystemClock
from kvstore.core.view import Member, MemberState, Role, View
from kvstore.ids import BootId, Epoch, NodeId
from kvstore.process import listening_socket
from kvstore.registry import StaticViews
from kvstore.units import Nanos, milliseconds, seconds
from prefill_node.model.tokenizer import Tokenizer

SCENARIO_TIMEOUT_S = 30.0
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

FAST = TimeoutsConfig(
    heartbeat=milliseconds(500),
    connect=milliseconds(700),
    poll_every=milliseconds(50),
    poll=milliseconds(400),
    prefill_stall=milliseconds(700),
    no_node=seconds(3),
    probe=milliseconds(300),
    body=milliseconds(500),
    head=milliseconds(500),
    stop=seconds(1),
)


def _load(name: str) -> ModuleType:
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"gateway_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


oracle_nodes = _load("oracle_nodes")


def byte_tokenizer() -> FastTokenizer:
    """Token id = byte value, so that any text can be written as tokens by hand."""
    letters = _letters_of_bytes()
    fast = FastTokenizer(models.BPE(vocab={letter: byte for byte, letter in enumerate(letters)}, merges=[]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    fast.decoder = decoders.ByteLevel()
    return fast


def word_tokenizer() -> FastTokenizer:
    """As SentencePiece has it: the tokens that oracles send are words of one letter with the space before them, which the decoder leaves
    out at the start of a text."""
    words = {f"\u2581{chr(token_id)}" if 97 <= token_id < 123 else f"<{token_id}>": token_id for token_id in range(256)}
    fast = FastTokenizer(models.WordLevel(vocab=words, unk_token="<0>"))
    fast.pre_tokenizer = pre_tokenizers.Metaspace()
    fast.decoder = decoders.Metaspace()
    return fast


def _letters_of_bytes() -> list[str]:
    """GPT-2's printable letter for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + number) for number, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


@dataclass
class Kitchen:
    """Everything a scenario touches."""

    http: httpx.AsyncClient
    url: str
    port: int
    service: GatewayService
    views: StaticViews
    shelf: Any
    decode: list[Any] = field(default_factory=list)
    prefill: list[Any] = field(default_factory=list)
    stores: list[Any] = field(default_factory=list)
    decode_role: Role = Role.DECODE
    extra_members: list[Member] = field(default_factory=list)

    def refresh_view(self, states: dict[str, MemberState] | None = None) -> None:
        """The view of all nodes as they are now."""
        roles = [(self.decode_role, self.decode), (Role.PREFILL, self.prefill), (Role.STORE, self.stores)]
        members = [
            Member(
                node_id=NodeId(node.node_id),
                boot_id=BootId(node.node_id.encode().ljust(16, b".")),
                role=role,
                address=node.address,
                state=(states or {}).get(node.node_id, MemberState.ACTIVE),
            )
            for role, nodes in roles
            for node in nodes
        ]
        self.views.replace(View(Epoch(self.views.view.epoch + 1), (*members, *self.extra_members)))

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for what the background does; the condition is checked often, and must come true."""
        for _ in range(1_000):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"did not happen in 10 s: {what}")

    def counted(self, name: str, **labels: str) -> float:
        return self.service.metrics.registry.get_sample_value(name, labels) or 0.0

    def expected_text(self, prompt: str, seed: int, tokens: int) -> str:
        return bytes(oracle_nodes.oracle_token(tuple(prompt.encode()), seed, position) for position in range(tokens)).decode()

    async def complete(self, prompt: Any = "tell me", **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": "oracle", "prompt": prompt, "seed": 1, "max_tokens": 20, **fields})

    async def streamed(self, prompt: str = "tell me", **fields: Any) -> tuple[str, list[int], str | None, Any]:
        """(text, token ids, finish reason, usage) of a stream; every piece is checked to be whole."""
        request = {
            "model": "oracle",
            "prompt": prompt,
            "seed": 1,
            "max_tokens": 30,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        text, reason, usage = "", None, None
        token_ids: list[int] = []
        async with self.http.stream(
            "POST", "/v1/completions", json={**request, "larder": {"return_token_ids": True}, **fields}
        ) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if not line or line == "data: [DONE]":
                    continue
                piece = json.loads(line.removeprefix("data: "))
                assert "error" not in piece, piece
                for choice in piece["choices"]:
                    text += choice["text"]
                    token_ids += choice["token_ids"]
                    reason = choice["finish_reason"] or reason
                usage = piece.get("usage") or usage
        return text, token_ids, reason, usage

    def break_at(self, position: int, how: Callable[[Any], Any]) -> list[Any]:
        """The first node that comes to `position` breaks there; the others never do."""
        broken: list[Any] = []

        def before_token(node: Any) -> Callable[[int], None]:
            def check(at: int) -> None:
                if at == position and not broken:
                    broken.append(node)
                    how(node)

            return check

        for node in self.decode:
            node.before_token = before_token(node)
        return broken


@asynccontextmanager
async def opened_kitchen(
    *,
    decode_nodes: int = 2,
    prefill_nodes: int = 1,
    store_nodes: int = 2,
    timeouts: dict[str, Nanos] | None = None,
    limits: dict[str, Any] | None = None,
    min_prefill_tokens: int = 16,
    send_buffer_bytes: int | None = None,
    both_roles: bool = False,
    words: bool = False,
    **config: Any,
) -> AsyncIterator[Kitchen]:
    shelf = oracle_nodes.Shelf()
    async with AsyncExitStack() as stack:
        decode = [oracle_nodes.DecodeNode(f"decode-{number}", shelf=shelf) for number in range(decode_nodes)]
        if both_roles:
            for node in decode:
                node.prefiller = oracle_nodes.PrefillNode(node.node_id, shelf=shelf)
        prefill = [oracle_nodes.PrefillNode(f"prefill-{number}", shelf=shelf) for number in range(prefill_nodes)]
        stores = [oracle_nodes.StoreNode(f"store-{number}") for number in range(store_nodes)]
        for node in (*decode, *prefill, *stores):
            await node.start()
            stack.push_async_callback(node.kill)
        sock = listening_socket("127.0.0.1", 0)
        if send_buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer_bytes)
        port = sock.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        settings = GatewayConfig(
            served_model_name="oracle",
            timeouts=dataclasses.replace(FAST, **(timeouts or {})),
            limits=LimitsConfig(**(limits or {})),
            routing=RoutingConfig(min_prefill_tokens=min_prefill_tokens),
            **config,
        )
        views = StaticViews(View(Epoch(0)))
        fleet = Fleet(
            views,
            GrpcBackends(),
            clock=SystemClock(),
            poll_every=settings.timeouts.poll_every,
            poll_timeout=settings.timeouts.poll,
            replicas=2,
        )
        service = GatewayService(
            settings,
            model_name="oracle",
            tokenizer=Tokenizer(word_tokenizer() if words else byte_tokenizer(), chat_template=CHAT_TEMPLATE, special={}),
            fleet=fleet,
            store=shelf,
            metrics=GatewayMetrics(CollectorRegistry()),
            clock=SystemClock(),
        )
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20, trust_env=False))
        kitchen = Kitchen(
            http=http,
            url=url,
            port=port,
            service=service,
            views=views,
            shelf=shelf,
            decode=decode,
            prefill=prefill,
            stores=stores,
            decode_role=Role.BOTH if both_roles else Role.DECODE,
        )
        kitchen.refresh_view()
        server = HttpServer(create_app(service), sock, head_timeout=settings.timeouts.head, stop_grace=settings.timeouts.stop)
        for background in (asyncio.ensure_future(fleet.run()), asyncio.ensure_future(server.serve())):
            stack.push_async_callback(_ended, background)
        rosters = (fleet.decode, fleet.prefill, fleet.stores)
        nodes = len((*decode, *prefill, *stores)) + (len(decode) if both_roles else 0)
        await kitchen.until(
            lambda: sum(node.answers for roster in rosters for node in roster.nodes.values()) == nodes, "every node has answered a poll"
        )
        yield kitchen


async def _ended(task: asyncio.Future[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


Scenario = Callable[[Kitchen], Awaitable[None]]


@pytest.fixture
def serving() -> Callable[..., None]:
    """Runs a scenario, an async function of a Kitchen, against a gateway of its own."""

    def run(scenario: Scenario, **options: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(SCENARIO_TIMEOUT_S), opened_kitchen(**options) as kitchen:
                await scenario(kitchen)

        asyncio.run(bounded())

    return run


@pytest.fixture
def oracle() -> ModuleType:
    """The module oracle_nodes.py."""
    return oracle_nodes


@pytest.fixture
def byte_tokenizer_json() -> str:
    text = byte_tokenizer().to_str()
    assert isinstance(text, str)
    return text


@pytest.fixture
def oracle_script() -> Path:
    """The script that serves one decode node in a process of its own."""
    return Path(__file__).with_name("oracle_nodes.py")


@pytest.fixture
def subprocess_environment() -> dict[str, str]:
    root = Path(__file__).parents[3]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(root / "proto")])}

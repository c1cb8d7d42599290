"""`python -m decode_node.gateway` as an operator starts and stops it, with a real Redis and an oracle decode node in the registry."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from kvstore.core.view import Member, Role
from kvstore.ids import BootId, NodeId
from kvstore.registry import EmbeddedRedis, RedisRegistry


@pytest.fixture(scope="module")
def redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def model(tmp_path: Path, byte_tokenizer_json: str) -> Path:
    """As much of a model folder as a gateway reads."""
    folder = tmp_path / "oracle"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "tokenizer.json").write_text(byte_tokenizer_json)
    return folder


@asynccontextmanager
async def gateway(environment, *flags: str):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "decode_node.gateway", "--http_port=0", *flags),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def test_it_says_ready_serves_and_lets_answers_end_when_it_is_stopped(redis, model, oracle, subprocess_environment) -> None:
    async def scenario() -> None:
        node = oracle.DecodeNode("decode-0")
        node.token_pause_s = 0.01
        await node.start()
        async with RedisRegistry(redis.url) as registry, AsyncExitStack() as stack:
            stack.push_async_callback(node.kill)
            await registry.join(Member(node_id=NodeId("decode-0"), boot_id=BootId(os.urandom(16)), role=Role.DECODE, address=node.address))
            async with gateway(subprocess_environment, f"--redis_url={redis.url}", f"--model={model}") as process:
                line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().split()
                assert line[:3] == ["READY", "gateway-0", "gateway"]
                addresses = dict(word.split("=") for word in line[3:])
                async with httpx.AsyncClient(base_url=f"http://{addresses['http']}", trust_env=False, timeout=30) as http:
                    health = (await http.get("/health")).json()
                    assert health["status"] == "degraded", health
                    assert [card["id"] for card in (await http.get("/v1/models")).json()["data"]] == ["oracle"]
                    request = {"model": "oracle", "prompt": "hello", "seed": 1, "max_tokens": 100, "stream": True}
                    async with http.stream("POST", "/v1/completions", json=request) as response:
                        lines = []
                        async for line in response.aiter_lines():
                            if not line:
                                continue
                            lines.append(line)
                            if len(lines) == 5:
                                process.send_signal(signal.SIGTERM)
                    assert lines[-1] == "data: [DONE]"
                    shown = [json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines[:-1]]
                    tokens = [oracle.oracle_token(tuple(b"hello"), 1, position) for position in range(100)]
                    assert "".join(shown) == bytes(tokens).decode()
                stderr = (await process.stderr.read()).decode()
                assert await asyncio.wait_for(process.wait(), 15) == 0, stderr
                assert "Traceback" not in stderr

    asyncio.run(scenario())


def test_it_goes_on_serving_while_redis_is_away_and_says_so(model, oracle, subprocess_environment) -> None:
    async def scenario() -> None:
        node = oracle.DecodeNode("decode-0")
        await node.start()
        with EmbeddedRedis() as redis:
            async with RedisRegistry(redis.url) as registry, AsyncExitStack() as stack:
                stack.push_async_callback(node.kill)
                member = Member(node_id=NodeId("decode-0"), boot_id=BootId(os.urandom(16)), role=Role.DECODE, address=node.address)
                await registry.join(member)
                async with gateway(subprocess_environment, f"--redis_url={redis.url}", f"--model={model}") as process:
                    line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().split()
                    url = "http://" + dict(word.split("=") for word in line[3:])["http"]
                    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as http:
                        await asyncio.to_thread(redis.stop)
                        async with asyncio.timeout(30):
                            sentences: list[str] = []
                            while not any("Redis does not answer" in sentence for sentence in sentences):
                                response = await http.get("/health")
                                assert response.status_code == 200
                                sentences = response.json()["degraded"]
                                await asyncio.sleep(0.1)
                        answer = await http.post("/v1/completions", json={"model": "oracle", "prompt": "hello", "max_tokens": 5})
                        assert answer.status_code == 200
                        assert answer.json()["usage"]["completion_tokens"] == 5

    asyncio.run(scenario())


def test_a_wrong_start_is_one_line_on_stderr_and_exit_2(redis, model, subprocess_environment, tmp_path) -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            starts = {
                f"cannot listen on 127.0.0.1:{port}": [f"--redis_url={redis.url}", f"--model={model}", f"--http_port={port}"],
                "is no folder": [f"--redis_url={redis.url}", f"--model={tmp_path / 'absent'}"],
                "timeouts.heartbeat must be at least 500ms": ["--timeouts.heartbeat=10ms"],
            }
            for words, flags in starts.items():
                async with gateway(subprocess_environment, *flags) as process:
                    stdout, stderr = await asyncio.wait_for(process.communicate(), 60)
                    assert process.returncode == 2
                    assert stdout == b""
                    assert words in stderr.decode()
                    assert len(stderr.decode().strip().splitlines()) == 1, stderr.decode()

    asyncio.run(scenario())

"""A real Redis for all tests of this folder, empty at the start of each."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from kvstore.core.view import Member, MemberState, Role
from kvstore.ids import BootId, NodeId
from kvstore.registry import EmbeddedRedis, RedisRegistry, RegistryConfig
from kvstore.units import Bytes, milliseconds, seconds

CONFIG = RegistryConfig(
    lease_ttl=milliseconds(450),
    dead_after=milliseconds(350),
    forget_after=seconds(600),
    poll_every=milliseconds(30),
    call_timeout=milliseconds(300),
    longest_pause=milliseconds(60),
)


@pytest.fixture(scope="session")
def redis_process() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def redis_server(redis_process: EmbeddedRedis) -> EmbeddedRedis:
    flush(redis_process)
    return redis_process


def flush(server: EmbeddedRedis) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as connection:
        connection.sendall(b"FLUSHALL\r\n")
        assert connection.recv(16).startswith(b"+OK")


@pytest.fixture
def empty_redis() -> Callable[[EmbeddedRedis], None]:
    return flush


@pytest.fixture
def registry_config() -> RegistryConfig:
    return CONFIG


@pytest.fixture
def registry_on() -> Callable[..., RedisRegistry]:
    """An unstarted registry with short times."""

    def make(server: EmbeddedRedis, *, config: RegistryConfig = CONFIG) -> RedisRegistry:
        return RedisRegistry(server.url, config=config)

    return make


@pytest.fixture
def member() -> Callable[..., Member]:
    def make(node_id: str, *, state: MemberState = MemberState.ACTIVE, role: Role = Role.STORE, port: int = 7000) -> Member:
        return Member(
            node_id=NodeId(node_id),
            boot_id=BootId(os.urandom(16)),
            role=role,
            address=f"127.0.0.1:{port}",
            zone="zone-a",
            weight=1.5,
            capacity_bytes=Bytes((1 << 53) + 1),
            state=state,
        )

    return make


@pytest.fixture
def run() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    """Run a test's coroutine; no task may be left over when it ends."""

    def run_in_loop(test: Coroutine[Any, Any, Any]) -> Any:
        async def bounded() -> Any:
            before = asyncio.all_tasks()
            async with asyncio.timeout(30):
                result = await test
            left = [task for task in asyncio.all_tasks() - before if not task.done()]
            assert not left, left
            return result

        return asyncio.run(bounded())

    return run_in_loop


@pytest.fixture
def until() -> Callable[..., Coroutine[Any, Any, None]]:
    """Wait until the registry's view satisfies the condition; bounded."""

    async def wait(registry: RedisRegistry, happened: Callable[[], bool], *, within_s: float = 8) -> None:
        async with asyncio.timeout(within_s):
            while not happened():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    return wait

"""Every kind of Redis that a URL can name, each a real server."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import ConfigError
from kvstore.registry import EmbeddedRedis, RedisRegistry
from kvstore.registry.redis_server import find_redis_server
from kvstore.registry.redis_url import open_redis
from kvstore.units import seconds


async def lives_there(url: str, config: Any, member: Any, until: Any) -> None:
    """A whole membership: scripts, announcements, renewals, and a second process that sees it."""
    async with RedisRegistry(url, config=config) as one, RedisRegistry(url, config=config) as two:
        await one.join(member("s1"))
        await until(two, lambda: [each.node_id for each in two.view.members] == ["s1"])
        await one.drain()
        await until(two, lambda: two.view.members[0].state.value == "draining")
        await asyncio.sleep(2 * config.lease_ttl / 1e9)
        assert two.view.members[0].state.value == "draining", "it goes on renewing"


def test_a_unix_socket(run, tmp_path: Path, registry_config, member, until) -> None:
    path = tmp_path / "redis.sock"
    with EmbeddedRedis(options=("--unixsocket", str(path))):
        run(lives_there(f"unix://{path}?db=1", registry_config, member, until))


def test_a_redis_cluster(run, tmp_path: Path, registry_config, member, until) -> None:
    options = ("--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf", "--dir", str(tmp_path))
    with EmbeddedRedis(options=options) as server:

        async def test() -> None:
            client = open_redis(server.url, timeout_s=5)
            await client.commands.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
            while "cluster_state:ok" not in str(await client.commands.execute_command("CLUSTER", "INFO")):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            await client.close()
            await lives_there(f"redis+cluster://127.0.0.1:1,127.0.0.1:{server.port}", registry_config, member, until)

        run(test())


def test_a_sentinel_names_the_present_master(run, tmp_path: Path, registry_config, member, until) -> None:
    with EmbeddedRedis() as master, sentinel_of(master, tmp_path) as port:
        run(lives_there(f"redis+sentinel://127.0.0.1:1,127.0.0.1:{port}/larder/2", registry_config, member, until))


def test_tls_with_a_certificate_that_is_checked(run, tmp_path: Path, registry_config, member, until) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no openssl to make a certificate with")
    command = (
        openssl,
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    )
    subprocess.run(
        [*command, "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    patient = dataclasses.replace(registry_config, call_timeout=seconds(5))
    with EmbeddedRedis() as server:

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
            writer.close()

        async def through(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            to_server, from_us = await asyncio.open_connection("127.0.0.1", server.port)
            await asyncio.gather(pump(reader, from_us), pump(to_server, writer), return_exceptions=True)

        async def test() -> None:
            door = await asyncio.start_server(through, "127.0.0.1", 0, ssl=context)
            address = f"rediss://127.0.0.1:{door.sockets[0].getsockname()[1]}/0"
            await lives_there(f"{address}?ssl_ca_certs={tmp_path / 'cert.pem'}", patient, member, until)
            with pytest.raises(ConfigError, match="certificate"):
                await RedisRegistry(address, config=patient).start()
            door.close()
            await asyncio.sleep(0)
            while others := [task for task in asyncio.all_tasks() if task.get_coro().__name__ in ("through", "pump")]:  # type: ignore[union-attr]
                await asyncio.wait(others)

        run(test())


@pytest.mark.parametrize(
    "wrong",
    [
        "redis+sentinel://h:1",
        "redis+sentinel://h:1,:2/service",
        "redis+sentinel://h:port/service",
        "redis+cluster://h:1/3",
        "redis+ring://h:1",
        "redis+cluster://h:1?no_such_option=1",
    ],
)
def test_a_url_that_says_too_little_or_too_much_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="redis_url"):
        open_redis(wrong, timeout_s=1)


@contextmanager
def sentinel_of(master: EmbeddedRedis, folder: Path) -> Iterator[int]:
    """A sentinel that watches the master as "larder"; its port."""
    with EmbeddedRedis() as probe:
        port = probe.port  # free in a moment
    file = folder / "sentinel.conf"
    file.write_text(f"port {port}\nbind 127.0.0.1\ndir {folder}\nsentinel monitor larder 127.0.0.1 {master.port} 1\n")
    process = subprocess.Popen([str(find_redis_server()), str(file), "--sentinel"], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        while b"monitor master" not in (line := process.stdout.readline()):
            assert line, "the sentinel ended"
        yield port
    finally:
        process.terminate()
        process.wait(timeout=10)
        process.stdout.close()  # type: ignore[union-attr]

"""Which Redis a URL means: one server, the present master of a Sentinel group, or a Redis Cluster.

`redis://`, `rediss://` (TLS) and `unix://` are redis-py's own, with all its options in the query. The two that it knows as classes only are
written in the same way, each with `rediss+` for TLS:

    redis+sentinel://[user:password@]host[:port],host[:port]/service[/db][?sentinel_username=&sentinel_password=&...]
    redis+cluster://[user:password@]host[:port],host[:port][?...]
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import redis.asyncio
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from kvstore.errors import ConfigError

_SENTINEL_PORT = 26379
_CLUSTER_PORT = 6379
_FORMS = "redis://, rediss://, unix://, redis+sentinel://host:port,host:port/service or redis+cluster://host:port,host:port"


class RedisClient:
    """`commands` takes every command; what differs between the kinds of Redis is here. Belongs to one event loop."""

    def __init__(self, commands: Any, *, close: Callable[[], Awaitable[None]], publisher: Callable[[str], Awaitable[Any]]) -> None:
        """`publisher(channel)`: a client of the server from which the channel's messages come."""
        self.commands = commands
        self.close = close
        self._publisher = publisher

    @asynccontextmanager
    async def listening(self, channel: str) -> AsyncIterator[Any]:
        """A pubsub for the channel, not subscribed yet."""
        publisher = await self._publisher(channel)
        pubsub = publisher.pubsub(ignore_subscribe_messages=True)
        try:
            yield pubsub
        finally:
            await pubsub.aclose()
            if publisher is not self.commands:
                await publisher.aclose()


def open_redis(url: str, *, timeout_s: float) -> RedisClient:
    """Connects with the first command. Raises ConfigError when the URL is none. `timeout_s`: of connecting and of each answer."""
    # Attempts are the caller's to count.
    common: dict[str, Any] = {"decode_responses": True, "socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    retry: dict[str, Any] = {"retry": Retry(NoBackoff(), 0)}
    try:
        kind = urlsplit(url).scheme.partition("+")[2]
        match kind:
            case "":
                return _single(redis.asyncio.Redis.from_url(url, **common, **retry))
            case "sentinel":
                return _sentinel(url, common, retry)
            case "cluster":
                return _cluster(url, common, retry)
            case _:
                raise ValueError(f"unknown scheme; write {_FORMS}")
    except (ValueError, TypeError) as error:
        raise ConfigError(f"redis_url is no Redis URL: {without_password(url)!r}: {error}") from None


def without_password(url: str) -> str:
    """For messages: they end in logs."""
    before, at, after = url.rpartition("@")
    scheme, slashes, _ = before.partition("://")
    return f"{scheme}{slashes}***@{after}" if at else url


def _single(client: Any, *others: Any) -> RedisClient:
    async def close() -> None:
        for each in (client, *others):
            await each.aclose()

    async def publisher(channel: str) -> Any:
        return client

    return RedisClient(client, close=close, publisher=publisher)


def _sentinel(url: str, common: dict[str, Any], retry: dict[str, Any]) -> RedisClient:
    hosts, path, options, login = _parts(url, default_port=_SENTINEL_PORT)
    service, _, db = path.partition("/")
    if not service:
        raise ValueError("name the service: redis+sentinel://host:port,host:port/service")
    tls = {key: value for key, value in options.items() if key.startswith("ssl")}
    settings = common | retry | options | {"db": int(db or 0)}
    sentinel: Any = Sentinel(  # type: ignore[no-untyped-call]
        hosts, sentinel_kwargs=common | retry | tls | login, **settings
    )
    return _single(sentinel.master_for(service), *sentinel.sentinels)


def _cluster(url: str, common: dict[str, Any], retry: dict[str, Any]) -> RedisClient:
    hosts, path, options, login = _parts(url, default_port=_CLUSTER_PORT)
    if path.strip("/0") or login:
        raise ValueError("a Redis Cluster has one database and no service: redis+cluster://host:port,host:port")
    settings = common | retry | options
    client: Any = RedisCluster(startup_nodes=[ClusterNode(*host) for host in hosts], **settings)

    async def close() -> None:
        await client.aclose()

    async def publisher(channel: str) -> Any:
        """The owner of the channel's slot: there the scripts run, and publish. By a connection of its own."""
        await client.initialize()
        owner: Any = client.get_node_from_key(channel)
        return redis.asyncio.Redis(host=owner.host, port=owner.port, **settings)

    return RedisClient(client, close=close, publisher=publisher)


def _parts(url: str, *, default_port: int) -> tuple[list[tuple[str, int]], str, dict[str, Any], dict[str, str]]:
    """(hosts, path without its slash, options as redis-py reads them from a plain URL, login at the sentinels)."""
    split = urlsplit(url)
    login, at, netloc = split.netloc.rpartition("@")
    hosts = []
    for one in netloc.split(","):
        host, _, port = one.rpartition(":") if ":" in one.rpartition("]")[2] else (one, "", "")
        if not host:
            raise ValueError(f"{one!r} is no host:port")
        hosts.append((host.strip("[]"), int(port or default_port)))
    query = dict(parse_qsl(split.query))
    login_there = {key.removeprefix("sentinel_"): query.pop(key) for key in ("sentinel_username", "sentinel_password") if key in query}
    tls = split.scheme.startswith("rediss")
    options: dict[str, Any] = dict(parse_url(f"{'rediss' if tls else 'redis'}://{login}{at}host?{urlencode(query)}"))
    for key in ("host", "port", "connection_class"):
        options.pop(key, None)
    return hosts, split.path.removeprefix("/"), options | ({"ssl": True} if tls else {}), login_there

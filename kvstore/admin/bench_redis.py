"""Redis measured as a peer: one key a block, MGET and a pipeline of SETs."""

from __future__ import annotations

import redis

from kvstore.errors import ConfigError


class RedisRoute:
    """redis-py, with hiredis where it is installed; blocking, as redis-benchmark is."""

    def __init__(self, url: str, batch: int, payload: bytes) -> None:
        self._redis = redis.Redis.from_url(url)
        self._batch = batch
        self._payload = payload

    async def put(self, name: str) -> None:
        pipeline = self._redis.pipeline(transaction=False)
        for index in range(self._batch):
            pipeline.set(f"{name}-{index}", self._payload)
        pipeline.execute()

    async def get(self, name: str) -> None:
        found = self._redis.mget([f"{name}-{index}" for index in range(self._batch)])
        if any(value is None for value in found):
            raise ConfigError("Redis dropped keys of the benchmark: it has too little memory")


def cpu_seconds(url: str) -> float:
    """User and system time of the server since its start, by its own word."""
    with redis.Redis.from_url(url) as connection:
        usage = connection.info("cpu")
    return float(usage["used_cpu_user"]) + float(usage["used_cpu_sys"])


def limit_memory(url: str, most: int) -> None:
    """As a cache: it evicts what was used least recently, as a store node does."""
    with redis.Redis.from_url(url) as connection:
        connection.config_set("maxmemory", most)
        connection.config_set("maxmemory-policy", "allkeys-lru")


def forget_all(url: str) -> None:
    with redis.Redis.from_url(url) as connection:
        connection.flushall()

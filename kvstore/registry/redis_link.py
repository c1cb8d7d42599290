"""The scripts as typed calls on one Redis. Every failure of Redis, of whatever kind, is a RegistryAway."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Sequence
from enum import StrEnum
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from kvstore.core.view import Member, MemberState, View
from kvstore.errors import ConfigError, Unavailable
from kvstore.ids import Epoch
from kvstore.registry import scripts
from kvstore.registry.config import RegistryConfig
from kvstore.registry.member_record import record_of, view_of
from kvstore.units import Nanos, to_milliseconds, to_seconds

LISTEN_TIMEOUT_S = 5.0


class RegistryAway(Unavailable):
    """Redis did not answer: go on with the last view, try again later."""


class Renewal(StrEnum):
    RENEWED = "renewed"
    EMPTIED = "emptied"
    """Redis knows nobody at all: it lost everything."""
    ABSENT = "absent"
    """Redis knows others: join again."""
    REMOVED = "removed"
    """Declared dead, or left: join again."""
    SUPERSEDED = "superseded"
    """Another process took the node id over: stand back."""


class RedisLink:
    """Belongs to one event loop."""

    def __init__(self, url: str, *, config: RegistryConfig) -> None:
        """Raises ConfigError when the URL is none."""
        self._config = config
        timeout = to_seconds(config.call_timeout)
        try:
            self._redis: Any = redis.asyncio.Redis.from_url(
                url,
                decode_responses=True,
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
                # Attempts are ours to count: see the loops of redis_registry.py.
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError as error:
            raise ConfigError(f"redis_url is no Redis URL: {url!r}: {error}") from None
        base = f"{{larder:{config.cluster}}}"
        self._keys = [f"{base}:members", f"{base}:states", f"{base}:leases", f"{base}:meta"]
        self._channel = f"{base}:changes"
        self._join, self._renew, self._change, self._sweep, self._restore, self._view = (
            self._redis.register_script(text)
            for text in (scripts.JOIN, scripts.RENEW, scripts.CHANGE, scripts.SWEEP, scripts.RESTORE, scripts.VIEW)
        )

    async def ping(self) -> None:
        await _guarded(self._redis.ping())

    async def join(self, member: Member, *, comes_back: bool) -> bool:
        """Write the member's record, state and lease; False when another process has the node id (only if it `comes_back`)."""
        answer = await self._run(
            self._join,
            *(member.node_id, member.boot_id.hex(), record_of(member), member.state.value),
            *(_ms(self._config.lease_ttl), int(comes_back)),
        )
        return bool(answer[0] == "joined")

    async def renew(self, member: Member) -> Renewal:
        answer = await self._run(self._renew, member.node_id, member.boot_id.hex(), _ms(self._config.lease_ttl))
        return Renewal(answer[0])

    async def change(self, member: Member, *, before: MemberState, after: MemberState) -> bool:
        """False when the member is no longer this boot in state `before`."""
        answer = await self._run(self._change, member.node_id, member.boot_id.hex(), before.value, after.value)
        return bool(answer[0] == "changed")

    async def sweep(self) -> None:
        config = self._config
        await self._run(
            self._sweep,
            # A sweep every third of a lease and by every member: half a lease without any is a pause of everybody.
            *(_ms(config.dead_after), _ms(Nanos(config.lease_ttl // 2)), _ms(config.lease_ttl), _ms(config.forget_after)),
        )

    async def restore(self, members: Sequence[Member], *, known: Epoch) -> None:
        """Write all of them back, unless somebody did already."""
        flat: list[str] = []
        for member in members:
            flat += (member.node_id, member.boot_id.hex(), member.state.value, record_of(member))
        await self._run(self._restore, known, scripts.EPOCH_LEAP, _ms(self._config.lease_ttl), *flat)

    async def newer_view(self, known: Epoch) -> View | None:
        """The present view if its epoch is above `known`."""
        answer = await self._run(self._view, known, scripts.EPOCH_LEAP)
        if len(answer) == 1:
            return None
        epoch, records, states = answer
        return view_of(int(epoch), _pairs(records), _pairs(states))

    async def announcements(self) -> AsyncGenerator[None, None]:
        """Yields at once when listening, then after each announced change (and now and then without one)."""
        pubsub = self._redis.pubsub(ignore_subscribe_messages=True)
        try:
            await _guarded(pubsub.subscribe(self._channel))
            # The confirmation: a change before it is found by the poll that the first yield brings about, one after it is announced.
            await _guarded(pubsub.get_message(timeout=to_seconds(self._config.call_timeout)))
            while True:
                yield
                await _guarded(pubsub.get_message(timeout=LISTEN_TIMEOUT_S))
        finally:
            await pubsub.aclose()

    async def close(self) -> None:
        await self._redis.aclose()

    async def _run(self, script: Any, *arguments: object) -> Any:
        return await _guarded(script(keys=self._keys, args=[self._channel, *arguments]))


async def _guarded(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except (RedisError, OSError, TimeoutError) as error:
        raise RegistryAway(str(error) or type(error).__name__) from None


def _pairs(flat: Sequence[str]) -> dict[str, str]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _ms(duration: Nanos) -> int:
    return max(1, round(to_milliseconds(duration)))

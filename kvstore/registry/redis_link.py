"""The scripts as typed calls on one Redis. Every failure of Redis, of whatever kind, is a RegistryAway."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from typing import Any

from redis.exceptions import RedisError

from kvstore.core.view import MOST_HOT_STRIPES, Member, MemberState, View
from kvstore.errors import Unavailable
from kvstore.ids import Epoch, StripeId
from kvstore.registry import scripts
from kvstore.registry.config import RegistryConfig
from kvstore.registry.member_record import permille, record_of, view_of
from kvstore.registry.redis_url import open_redis
from kvstore.registry.standing import NotRenewed, Renewed
from kvstore.units import Nanos, to_milliseconds, to_seconds

LISTEN_TIMEOUT_S = 5.0


class RegistryAway(Unavailable):
    """Redis did not answer: go on with the last view, try again later."""


class RedisLink:
    """Belongs to one event loop."""

    def __init__(self, url: str, *, config: RegistryConfig) -> None:
        """Raises ConfigError when the URL is none."""
        self._config = config
        self._redis = open_redis(url, timeout_s=to_seconds(config.call_timeout))
        base = f"{{larder:{config.cluster}}}"
        self._keys = [f"{base}:members", f"{base}:states", f"{base}:leases", f"{base}:meta", f"{base}:hot"]
        self._channel = f"{base}:changes"
        self._join, self._renew, self._change, self._take_over, self._announce_hot, self._sweep, self._restore, self._view = (
            self._redis.commands.register_script(text)
            for text in (
                *(scripts.JOIN, scripts.RENEW, scripts.CHANGE, scripts.TAKE_OVER, scripts.ANNOUNCE_HOT),
                *(scripts.SWEEP, scripts.RESTORE, scripts.VIEW),
            )
        )

    async def ping(self) -> None:
        await _guarded(self._redis.commands.ping())

    async def join(self, member: Member, *, comes_back: bool) -> float | None:
        """Write the member's record, state and lease. The takeover that it has now: a restart faster than its lease finds that of the old
        boot. None when another process has the node id (only if it `comes_back`)."""
        answer = await self._run(
            self._join,
            *(member.node_id, member.boot_id.hex(), record_of(member), member.state.value),
            *(_ms(self._config.lease_ttl), int(comes_back), permille(member.takeover)),
        )
        return int(answer[2]) / 1000 if answer[0] == "joined" else None

    async def renew(self, member: Member) -> Renewed | NotRenewed:
        answer = await self._run(self._renew, member.node_id, member.boot_id.hex(), _ms(self._config.lease_ttl))
        if answer[0] != "renewed":
            return NotRenewed(answer[0])
        return Renewed(state=MemberState(answer[2]), takeover=int(answer[3]) / 1000)

    async def change(self, member: Member, *, before: MemberState, after: MemberState) -> bool:
        """False when the member is no longer this boot in state `before`."""
        answer = await self._run(self._change, member.node_id, member.boot_id.hex(), before.value, after.value)
        return bool(answer[0] == "changed")

    async def take_over(self, member: Member, *, takeover: float) -> bool:
        """False when the member is no longer this boot, owns nothing, or has another takeover than it thinks."""
        steps = (permille(member.takeover), permille(takeover))
        answer = await self._run(self._take_over, member.node_id, member.boot_id.hex(), *steps)
        return bool(answer[0] == "changed")

    async def announce_hot(self, member: Member, stripes: Mapping[StripeId, int], *, ttl: Nanos) -> bool:
        """False when the member is no longer this boot, or owns nothing."""
        flat = [part for stripe, extra in stripes.items() for part in (stripe.hex(), str(extra))]
        answer = await self._run(self._announce_hot, member.node_id, member.boot_id.hex(), _ms(ttl), MOST_HOT_STRIPES, *flat)
        return bool(answer[0] == "announced")

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
            flat += (member.node_id, member.boot_id.hex(), member.state.value, str(permille(member.takeover)), record_of(member))
        await self._run(self._restore, known, scripts.EPOCH_LEAP, _ms(self._config.lease_ttl), *flat)

    async def newer_view(self, known: Epoch) -> View | None:
        """The present view if its epoch is above `known`."""
        answer = await self._run(self._view, known, scripts.EPOCH_LEAP)
        if len(answer) == 1:
            return None
        epoch, records, states, hot = answer
        return view_of(int(epoch), _pairs(records), _pairs(states), _pairs(hot))

    async def announcements(self) -> AsyncGenerator[None, None]:
        """Yields at once when listening, then after each announced change (and now and then without one)."""
        try:
            async with self._redis.listening(self._channel) as pubsub:
                await _guarded(pubsub.subscribe(self._channel))
                # The confirmation: a change before it is found by the poll that the first yield brings about, one after it is announced.
                await _guarded(pubsub.get_message(timeout=to_seconds(self._config.call_timeout)))
                while True:
                    yield
                    await _guarded(pubsub.get_message(timeout=LISTEN_TIMEOUT_S))
        except (RedisError, OSError) as error:
            raise RegistryAway(str(error) or type(error).__name__) from None

    async def close(self) -> None:
        await self._redis.close()

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

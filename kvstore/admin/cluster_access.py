"""How a command reaches a cluster: the addresses, the view, and a call to each store node at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from kvstore.admin import saved_cluster
from kvstore.core.view import Member, MemberState, View
from kvstore.errors import ConfigError, InvalidRequest, LarderError, Unavailable
from kvstore.ids import BlockHash, BlockRef, KeySpace, LayoutFingerprint, Namespace, StripeId
from kvstore.registry.redis_registry import RedisRegistry
from kvstore.rpc.channel import ChannelPool
from kvstore.units import Nanos, seconds, to_seconds

Answer = TypeVar("Answer")

CALL_TIMEOUT = seconds(5)
_REACHABLE = frozenset({MemberState.JOINING, MemberState.ACTIVE, MemberState.SUSPECT, MemberState.DRAINING})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAccess:
    """Addresses of one cluster."""

    redis_url: str
    gateway_url: str | None
    api_key: str | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the store knows it."""

    tokens: int
    block_tokens: int
    key_space: KeySpace
    chain: tuple[BlockRef, ...]


def find_cluster(*, redis_url: str | None, gateway_url: str | None, api_key: str | None, state_folder: Path) -> ClusterAccess:
    """The named addresses, else those of the last `local up`. Raises ConfigError when neither is there."""
    if redis_url is not None:
        return ClusterAccess(redis_url=redis_url, gateway_url=gateway_url, api_key=api_key)
    saved = saved_cluster.load(state_folder)
    if saved is None or not saved.is_alive:
        raise ConfigError("no cluster known: give --redis URL (or LARDER_REDIS_URL), or start one with `kvctl local up`")
    return ClusterAccess(redis_url=saved.redis_url, gateway_url=gateway_url or saved.gateway_url, api_key=api_key)


async def read_view(access: ClusterAccess) -> View:
    """The present view. Raises ConfigError when Redis does not answer."""
    async with RedisRegistry(access.redis_url) as registry:
        return registry.view


def reachable(members: Sequence[Member]) -> list[Member]:
    """Those that may answer: not dead, not left."""
    return [member for member in members if member.state in _REACHABLE]


@asynccontextmanager
async def channels() -> AsyncIterator[ChannelPool]:
    pool = ChannelPool()
    try:
        yield pool
    finally:
        await pool.close()


async def ask_each(
    members: Sequence[Member], call: Callable[[Member, Any], Awaitable[Answer]], *, timeout: Nanos = CALL_TIMEOUT
) -> list[tuple[Member, Answer | LarderError]]:
    """`call(member, channel)` on every member at once; an answer or the error of each, in the order given. Never raises for a member."""

    async def one(member: Member, pool: ChannelPool) -> Answer | LarderError:
        try:
            return await asyncio.wait_for(call(member, pool.get(member.address)), to_seconds(timeout))
        except LarderError as error:
            return error
        except TimeoutError:
            return Unavailable(f"no answer within {to_seconds(timeout):g} s")

    async with channels() as pool:
        answers = await asyncio.gather(*(one(member, pool) for member in members))
    return list(zip(members, answers, strict=True))


async def gateway_health(access: ClusterAccess) -> dict[str, Any] | None:
    """What /health says; None when no gateway is known. Raises Unavailable when it does not answer."""
    if access.gateway_url is None:
        return None
    answer = await _call_gateway(access, "GET", "/health", None)
    return _json_object(answer)


async def tokenize(access: ClusterAccess, source: Mapping[str, Any]) -> Prompt:
    """The chain of block hashes of {"prompt": text} or {"messages": [...]}, by the gateway's tokenizer, in the caller's namespace.

    Raises ConfigError without a gateway, Unavailable, or InvalidRequest with what the gateway refused.
    """
    if access.gateway_url is None:
        raise ConfigError("the address of the gateway is needed: give --gateway URL (or LARDER_GATEWAY_URL)")
    answer = await _call_gateway(access, "POST", "/tokenize", source)
    record = _json_object(answer)
    if answer.status_code != 200:
        raise InvalidRequest(f"the gateway refused the prompt: {record.get('error', {}).get('message', answer.text)}")
    chain = tuple(
        BlockRef(
            hash=BlockHash(bytes.fromhex(block["hash"])),
            parent=BlockHash(bytes.fromhex(block["parent"])),
            stripe=StripeId(bytes.fromhex(block["stripe"])),
            index=block["index"],
        )
        for block in record["blocks"]
    )
    key_space = KeySpace(Namespace(record["namespace"]), LayoutFingerprint(bytes.fromhex(record["layout_fingerprint"])))
    tokens = record["tokens"]
    return Prompt(len(tokens) if isinstance(tokens, list) else tokens, record["block_tokens"], key_space, chain)


async def _call_gateway(access: ClusterAccess, method: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
    headers = {} if access.api_key is None else {"Authorization": f"Bearer {access.api_key}"}
    try:
        async with httpx.AsyncClient(timeout=to_seconds(CALL_TIMEOUT), trust_env=False) as client:
            return await client.request(method, f"{access.gateway_url}{path}", json=body, headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Unavailable(f"the gateway at {access.gateway_url} does not answer: {error or type(error).__name__}") from None


def _json_object(answer: httpx.Response) -> dict[str, Any]:
    try:
        record = answer.json()
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise Unavailable(f"{answer.request.url} answered {answer.status_code} with something that is not ours")
    return record

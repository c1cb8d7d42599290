"""Construction of channels, and the pool that keeps one channel per address."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import grpc.aio

from kvstore.rpc.server import IDLE_CONNECTION, MAX_MESSAGE_BYTES
from kvstore.units import MIB, to_milliseconds

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Whether and where a call is tried again is decided by client/routing.py, from deadlines and circuits; not twice.
    ("grpc.enable_retries", 0),
    # Two pools in one process (a client and a test server's client) must not share a broken connection.
    ("grpc.use_local_subchannel_pool", 1),
    # A restarted node is found again within a second; a node that is gone costs one connect attempt a second at most.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A peer that vanished without a FIN is noticed between calls; during a call its deadline comes first.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Before the server closes what is idle: its GOAWAY would put a line of gRPC's own into this process's log.
    ("grpc.client_idle_timeout_ms", int(to_milliseconds(IDLE_CONNECTION)) // 2),
    # Loopback, 46 payloads of 368 KiB in one stream: 22-37 ms without it, 17-27 ms with it.
    ("grpc.http2.lookahead_bytes", 4 * MIB),
)


def open_channel(address: str) -> Any:
    """A grpc.aio.Channel to "host:port". Connects with the first call; never raises for an absent peer."""
    return grpc.aio.insecure_channel(address, options=_OPTIONS)


class ChannelPool:
    """One channel per address, opened when first asked for. Belongs to one event loop."""

    def __init__(self) -> None:
        self._channels: dict[str, Any] = {}

    def get(self, address: str) -> Any:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address)
        return channel

    async def retain(self, addresses: Collection[str]) -> None:
        """Close every channel to another address; calls on them end as Unavailable."""
        for address in self._channels.keys() - set(addresses):
            await self._channels.pop(address).close()

    async def close(self) -> None:
        await self.retain(())

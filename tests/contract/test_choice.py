"""Which transport is chosen, and what happens when the better one goes away."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from typing import Any

import pytest

from kvstore.client import ClientConfig, StoreClient
from kvstore.core.view import View
from kvstore.errors import ConfigError
from kvstore.ids import Epoch
from kvstore.node.config import ShmAccess
from kvstore.registry.view_source import StaticViews
from kvstore.rpc.channel import ChannelPool
from kvstore.transport import AutoTransport, Peer, TransportKind
from kvstore.transport.ucx_worker import ucx_obstacle
from kvstore.units import milliseconds

BEST_WIRE = TransportKind.TCP if ucx_obstacle() else TransportKind.UCX


async def choice_of(store: Any, *kinds: str) -> Any:
    channels = ChannelPool()
    transport = AutoTransport(channels, kinds=kinds or tuple(TransportKind))
    [member] = store.views.view.stores
    try:
        return await transport.choice(Peer(member.node_id, member.boot_id, member.address))
    finally:
        await transport.close()
        await channels.close()


def test_the_fastest_that_both_sides_allow_is_chosen_and_says_why(run: Any, serving: Any) -> None:
    async def test() -> None:
        async with serving("grpc") as store:
            assert (await choice_of(store)).kind is TransportKind.SHM
            tcp = await choice_of(store, "tcp", "grpc")
            assert (tcp.kind, "no shm: not allowed here" in tcp.reason) == (TransportKind.TCP, True)
            assert (await choice_of(store, "grpc")).kind is TransportKind.GRPC
        async with serving("grpc", shm=ShmAccess.OFF) as store:
            best = await choice_of(store)
            assert (best.kind, "no shm: the node does not offer it" in best.reason) == (BEST_WIRE, True)
        async with serving("grpc", shm=ShmAccess.OFF, ucx=False) as store:
            tcp = await choice_of(store)
            assert (tcp.kind, "no ucx: the node does not offer it" in tcp.reason) == (TransportKind.TCP, True)
        async with serving("grpc", shm=ShmAccess.OFF, tcp=False) as store:
            assert (await choice_of(store)).kind is TransportKind.GRPC

    run(test())


def test_without_ucxx_on_this_side_there_is_no_ucx(run: Any, serving: Any, monkeypatch: Any) -> None:
    async def test() -> None:
        async with serving("grpc", shm=ShmAccess.OFF) as store:
            monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
            choice = await choice_of(store)
            assert (choice.kind, "no ucx: ucxx is not installed" in choice.reason) == (TransportKind.TCP, True)

    run(test())


def test_a_door_that_does_not_answer_is_passed_over(run: Any, serving: Any) -> None:
    async def test() -> None:
        async with serving("grpc", shm=ShmAccess.OFF) as store:
            real = store.server._doors.port
            with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never greets, like a port of somebody else
                store.server._doors.port = silent.getsockname()[1]
                choice = await choice_of(store)
                assert (choice.kind, choice.reason.startswith("no shm")) == (TransportKind.GRPC, True)
                assert "no tcp: " in choice.reason
            store.server._doors.port = real

    run(test())


def test_another_machine_is_not_asked_for_its_memory(run: Any, serving: Any, monkeypatch: Any) -> None:
    async def test() -> None:
        async with serving("grpc") as store:
            monkeypatch.setattr("kvstore.transport.choice.machine_identity", lambda: "elsewhere/4026531840")
            choice = await choice_of(store)
            assert (choice.kind, "no shm: another machine" in choice.reason) == (BEST_WIRE, True)

    run(test())


def test_a_restarted_node_is_reached_again_by_all_of_them(run: Any, serving: Any, chain: Any, client_config: Any) -> None:
    sizes = [100_000] * 5
    refs = chain(sizes)

    async def test() -> None:
        for kind in TransportKind:
            if kind is TransportKind.UCX and ucx_obstacle():
                continue
            async with serving(kind) as store:
                await store.put(refs, sizes)
                first, views = store.client, store.views
                kept = StoreClient(views, replicas=1, config=dataclasses.replace(client_config, transports=(kind.value,)))
                store.client = kept
                assert await store.read(refs, sizes) == ["ok"] * 5
                store.client = first
            async with serving(kind) as again:
                view = again.views.view
                views.replace(dataclasses.replace(view, epoch=view.epoch + 1))
                again.client, other = kept, again.client
                assert await again.read(refs, sizes) == ["ok"] * 5
                again.client = other
            await kept.close()

    run(test())


@pytest.mark.parametrize("kind", TransportKind)
def test_a_restart_that_no_view_tells_of_gives_nobody_foreign_bytes(
    kind: TransportKind, run: Any, serving: Any, chain: Any, key_space: Any, client_config: Any, right: Any
) -> None:
    """It is back at the same ports before its lease in the registry is over, with other blocks where those of the old leases lay."""
    sizes = [100_000] * 5
    refs = chain(sizes)
    by_this = dataclasses.replace(client_config, transports=(kind.value,), verify_mapped=False)

    async def test() -> None:
        async with serving(kind.value, ssd_path=None) as store:
            await store.put(refs, sizes)
            ports = {"port": store.server.port, "data_port": store.server._doors.port}
            views = StaticViews(store.views.view)
            kept = StoreClient(views, replicas=1, config=by_this)
            lease = await kept.acquire_prefix(key_space, refs)
            held = [block async for block in kept.read(lease, in_place=True)]
            assert all(right(block.payload, refs[block.index], sizes[0]) for block in held)
        async with serving(kind.value, ssd_path=None, **ports) as again:
            await again.put(refs[::-1], sizes)
            for told in (False, True):
                if told:
                    views.replace(dataclasses.replace(again.views.view, epoch=Epoch(views.view.epoch + 1)))
                async for block in kept.read(lease, in_place=True):
                    assert block.payload is None or right(block.payload, refs[block.index], sizes[0]), "foreign bytes"
                async with await kept.acquire_prefix(key_space, refs) as fresh:
                    found = [block async for block in kept.read(fresh, in_place=True)]
                    assert all(block.payload is None or right(block.payload, refs[block.index], sizes[0]) for block in found)
            assert [block.reason for block in found] == ["ok"] * 5, "with the view that tells of it"
            assert all(right(block.payload, refs[block.index], sizes[0]) for block in held), "memory of the old node, as long as it is held"
            await lease.release()
            await kept.close()

    run(test())


@pytest.mark.parametrize("kind", ["shm", "tcp"])
def test_of_a_node_that_is_gone_for_good_nothing_is_kept(
    kind: str, run: Any, serving: Any, chain: Any, key_space: Any, client_config: Any, eventually: Any
) -> None:
    """Each would cost its clients a few descriptors, and nodes that come and go have new names."""
    refs = chain([1000] * 2)
    brief = dataclasses.replace(client_config, previous_views=milliseconds(1))

    async def test() -> None:
        async with serving(kind, client_config=brief, ssd_path=None) as store:
            await store.put(refs, [1000] * 2)
            assert await store.read(refs, [1000] * 2) == ["ok"] * 2
            assert sum(store.server.status().data_connections.values()) > 0
            for _ in range(2):  # a view may have lost it for a moment
                store.views.replace(View(Epoch(store.views.view.epoch + 1)))
                assert await store.client.probe_prefix(key_space, refs) in (0, 2)
                await asyncio.sleep(0.002)
            await eventually(lambda: sum(store.server.status().data_connections.values()) == 0)

    run(test())


def test_an_unknown_transport_is_a_config_error() -> None:
    for kinds in ((), ("carrier-pigeon",)):
        with pytest.raises(ConfigError, match="transports must be some of shm, ucx, tcp, grpc"):
            AutoTransport(ChannelPool(), kinds=kinds)
    assert ClientConfig().transports == ("shm", "ucx", "tcp", "grpc")

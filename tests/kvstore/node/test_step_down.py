"""Payloads of a real codec on a node that steps them down on their way to its SSD."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.client import BlockPut, StoreClient
from kvstore.codec import BlockCodec, Rung, read_header
from kvstore.codec.rung_code import parse_target, rung_name
from kvstore.core.events.questions import AnswerLocate, LocateRequested
from kvstore.core.extent import Tier
from kvstore.core.layout import Layout
from kvstore.core.view import Member, MemberState, Role, View
from kvstore.errors import ConfigError
from kvstore.ids import AS_SEALED, BOOT_ID_BYTES, BootId, Epoch, KeySpace, Namespace, NodeId, RungCode
from kvstore.node.step_down_rules import parse_step_down
from kvstore.registry.redis_server import EmbeddedRedis
from kvstore.registry.view_source import StaticViews
from kvstore.units import Bytes, seconds

LAYOUT = Layout(layers=3, kv_heads=2, head_dim=64, dtype="bfloat16", block_tokens=32, rope=(("theta", "10000"),), precision="int8")
SPACE = KeySpace(Namespace("kitchen"), LAYOUT.fingerprint)
INT4 = parse_target("int4")


def codec(rung: Rung) -> BlockCodec:
    return BlockCodec(LAYOUT, model_digest=b"m" * 32, rung=rung)


def payloads(count: int) -> list[bytes]:
    rng = np.random.default_rng(5)
    fine = codec(Rung.INT8)
    blocks = (rng.standard_normal(fine.empty_block().shape, np.float32) for _ in range(count))
    return [fine.encode((block.view(np.uint32) >> 16).astype(np.uint16), start_position=32 * number) for number, block in enumerate(blocks)]


def client_of(server: Any) -> StoreClient:
    member = Member(
        node_id=NodeId(server.config.node_id),
        boot_id=server.boot_id,
        role=Role.STORE,
        address=server.address,
        zone="a",
        weight=1.0,
        capacity_bytes=Bytes(1),
        state=MemberState.ACTIVE,
    )
    return StoreClient(StaticViews(View(Epoch(1), (member,))), replicas=1)


async def placed(server: Any, refs: Any) -> list[dict[Tier, RungCode]]:
    locate = LocateRequested(request_id=server.node.next_request_id(), key_space=SPACE, hashes=tuple(ref.hash for ref in refs))
    places = (await server.node.ask(locate, AnswerLocate)).places
    return [{copy.tier: copy.rung for copy in place.copies} for place in places]


async def put_and_demoted(server: Any, refs: Any, blocks: list[bytes]) -> None:
    client = client_of(server)
    try:
        await client.put(SPACE, [BlockPut(ref, block) for ref, block in zip(refs, blocks, strict=True)])
        async with asyncio.timeout(60):
            while not all(Tier.SSD in copies for copies in await placed(server, refs)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        await client.close()


def test_what_a_node_has_stepped_down_reads_as_the_codec_would_have_made_it(serving: Any, chain: Any) -> None:
    async def scenario() -> None:
        refs, fine = chain("a", 3), payloads(3)
        config = {"ssd": True, "demote_above": 0.0, "step_down": {"*": "int4"}}
        async with serving(**config) as (server, _):
            await put_and_demoted(server, refs, fine)
            assert await placed(server, refs) == [{Tier.HOST: AS_SEALED, Tier.SSD: INT4}] * 3
            counters = server.status().counters
            assert counters["stepped_down:demote"] == 3
        async with serving(**config) as (server, _):
            client = client_of(server)
            try:
                assert not await client.acquire_prefix(SPACE, refs, as_sealed=True), "a running sequence must not get these numbers"
                async with await client.acquire_prefix(SPACE, refs) as lease:
                    assert [copy.rung for copy in lease.copies] == [INT4] * 3
                    assert lease.payload_bytes < 0.62 * sum(map(len, fine))
                    async for block in client.read(lease):
                        assert block.rung == INT4
                        assert bytes(block.payload) == codec(Rung.INT4).step_down(fine[block.index])
                        assert read_header(block.payload).rung is Rung.INT4
                        out = codec(Rung.INT8).empty_block()
                        codec(Rung.INT8).decode_into(block.payload, out, start_position=32 * block.index)
            finally:
                await client.close()

    asyncio.run(scenario())


def test_what_is_no_payload_or_cannot_be_stepped_down_goes_to_the_ssd_as_it_is(serving: Any, chain: Any) -> None:
    async def scenario() -> None:
        refs = chain("a", 2)
        exact = codec(Rung.RAW).encode(codec(Rung.RAW).empty_block(), start_position=0)
        async with serving(ssd=True, demote_above=0.0, step_down={"kitchen": "int4", "*": "int5"}) as (server, _):
            await put_and_demoted(server, refs, [b"no payload of any codec" * 100, exact])
            assert await placed(server, refs) == [{Tier.HOST: AS_SEALED, Tier.SSD: AS_SEALED}] * 2
            counters = server.status().counters
            assert (counters["not_stepped_down:no_payload"], counters["not_stepped_down:no_step_down"]) == (1, 1)

    asyncio.run(scenario())


def client_at(address: str) -> StoreClient:
    member = Member(
        node_id=NodeId("node-p"),
        boot_id=BootId(bytes(BOOT_ID_BYTES)),
        role=Role.STORE,
        address=address,
        zone="a",
        weight=1.0,
        capacity_bytes=Bytes(1),
        state=MemberState.ACTIVE,
    )
    return StoreClient(StaticViews(View(Epoch(1), (member,))), replicas=1)


def test_after_a_kill_9_among_step_downs_a_block_is_right_or_not_there(node_process: Any, chain: Any, tmp_path: Path) -> None:
    """And one whose record was spoiled meanwhile is not there."""
    refs, fine = chain("a", 48), payloads(48)
    coarse = [codec(Rung.INT4).step_down(payload) for payload in fine]

    async def put_until_killed(address: str, popen: Any) -> None:
        """16 are durable before the blow, which falls while the next are being stepped down."""
        client = client_at(address)
        try:
            reports = [await client.put(SPACE, [BlockPut(refs[at], fine[at])]) for at in range(16)]
            assert all(report.durable == (1,) for report in reports)
            late = [asyncio.ensure_future(client.put(SPACE, [BlockPut(refs[at], fine[at])])) for at in range(16, 48)]
            await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)
            popen.kill()
            await asyncio.wait(late)
        finally:
            await client.close()

    async def found_at(address: str) -> dict[int, bytes]:
        client = client_at(address)
        found = {}
        try:
            for at in range(48):
                async with await client.acquire_prefix(SPACE, [refs[at]]) as lease:
                    async for block in client.read(lease):
                        if block.payload is not None:
                            found[at] = bytes(block.payload)
                            assert (found[at], block.rung) in ((coarse[at], INT4), (fine[at], AS_SEALED))
        finally:
            await client.close()
        return found

    keys = {"write_policy": "write_through", "step_down": "*=int4"}
    with EmbeddedRedis() as redis:
        with node_process(redis, **keys) as (popen, address):
            asyncio.run(put_until_killed(address, popen))
            popen.wait()
        spoiled = 3
        flip_on_disk(tmp_path / "ssd", coarse[spoiled])
        with node_process(redis, **keys) as (popen, address):
            found = asyncio.run(found_at(address))
            assert spoiled not in found
            assert set(range(16)) - {spoiled} <= found.keys()
            assert spoiled not in asyncio.run(found_at(address))


def test_rules_read_as_they_are_written() -> None:
    finer, coarser = parse_step_down("int5, klt:6 after 1h behind 16")
    assert (rung_name(finer.rung), finer.after, finer.keep_last) == ("int5", 0, 0)
    assert (rung_name(coarser.rung), coarser.after, coarser.keep_last) == ("klt:6", seconds(3600), 16)
    for wrong in ("int8", "klt", "int4 behind", "int4 within 5s", "", "int4:3", "klt:0"):
        with pytest.raises(ConfigError, match=r"step_down|stepped down"):
            parse_step_down(wrong)


def flip_on_disk(folder: Path, payload: bytes) -> None:
    """In the one record that has it."""
    ((path, at),) = [(path, path.read_bytes().find(payload)) for path in folder.glob("region-*") if payload in path.read_bytes()]
    with open(path, "r+b") as file:
        file.seek(at + len(payload) // 2)
        file.write(bytes([payload[len(payload) // 2] ^ 1]))

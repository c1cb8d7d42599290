"""What must hold in one node after every event, whoever its clients are. Looks into the state: a simulation may."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from itertools import pairwise
from typing import Any

from sim.media import Media

from kvstore.core.copies import Copy, CopyState
from kvstore.core.events.notes import Note
from kvstore.core.extent import ALIGNMENT, Tier
from kvstore.core.index import Entry
from kvstore.core.store_state import StoreState
from kvstore.ids import AS_SEALED, BlockHash, KeySpace, OperationId

_SERVING = (CopyState.READABLE, CopyState.RECLAIMING)

Written = Mapping[tuple[KeySpace, BlockHash], Set[int]]
"""Checksums of all payloads that anybody ever wrote, by key."""


def moves_under_way(state: StoreState) -> Mapping[OperationId, Any]:
    """Of both tierings: each has an entry, a source and a target."""
    to_gpu = {} if state._gpu_tiering is None else state._gpu_tiering._moves
    return {**({} if state._tiering is None else state._tiering._moves.under_way), **to_gpu}


def all_copies(state: StoreState) -> list[Copy]:
    """Listed and unfreed copies of any state."""
    stock = state._stock
    found: dict[Copy, None] = {}
    entries: dict[Entry, None] = dict.fromkeys(stock.index)
    for lease in stock.leases._leases.values():
        entries.update(dict.fromkeys(lease.entries.values()))
    for reading in state._gets._readings.values():
        for hold in reading.held:
            if hold is not None:
                entries[hold[0]] = None
                found[hold[1]] = None
    for copy in state._scrubs._waiting:
        found[copy] = None
    for recoding in () if state._tiering is None else state._tiering._recoder._recodings.values():
        entries[recoding.entry] = None
        found[recoding.source] = None
    for move in moves_under_way(state).values():
        entries[move.entry] = None
        found[move.source] = None
        found[move.target] = None
    for entry in entries:
        found.update(dict.fromkeys(entry.copies))
    for reservation in stock.reservations._by_key.values():
        found[reservation.copy] = None
    return list(found)


def check_accounting(state: StoreState) -> None:
    """Bytes used = bytes on the medium; no two extents overlap; nothing is counted negative."""
    stock = state._stock
    copies = all_copies(state)
    for arena in (stock.arena, stock.gpu_arena):
        spans = sorted((copy.offset, copy.offset + copy.length) for copy in copies if copy.tier is arena.tier)
        assert sum(max(1, -(-(end - start) // ALIGNMENT)) for start, end in spans) * ALIGNMENT == arena.used, (
            f"{arena.tier.name} accounting"
        )
        for (_, end), (following, _) in pairwise(spans):
            assert end <= following, f"{arena.tier.name} extents overlap"
    on_ssd = [copy for copy in copies if copy.tier is Tier.SSD]
    ssd, ssd_readable = len(on_ssd), sum(copy.state is CopyState.READABLE for copy in on_ssd)
    held: Counter[Tier] = Counter()
    for copy in copies:
        held[copy.tier] += copy.length
    for key_space in stock.index.key_spaces():
        assert stock.quota.used(key_space.namespace) >= 0
    for tier, shares in stock._shares.items():
        assert sum(shares._used.values()) == held[tier], "shares of the namespaces"
    assert stock.pins.hard_bytes == sum(stock.pins._hard.values())
    assert all(entry.listed for entry, _ in stock.pins)
    twins = sum(entry.length for entry in stock.index if entry.readable_host and entry.readable_ssd)
    assert stock.twin_bytes == twins, "room that is free for the taking"
    if stock.regions is not None:
        live = live_bytes = 0
        for region in stock.regions:
            live += len(region.live)
            live_bytes += region.live_bytes
        assert live_bytes == stock.regions.live_bytes
        assert live == ssd_readable
        assert stock.copies[Tier.SSD] == ssd


def check_tiers(state: StoreState) -> None:
    """A block is in the configured tiers and in no other."""
    stock, config = state._stock, state._stock.config
    tiers = {usage.tier for usage in state.status().tiers}
    assert tiers == {tier for tier, here in ((Tier.GPU, config.gpu), (Tier.HOST, config.has_host), (Tier.SSD, config.ssd)) if here}
    for entry in stock.index:
        assert tiers.issuperset(entry.tiers), "a block is in a tier that this node has not got"


def check_listing(state: StoreState, media: Media, written: Written) -> None:
    """Nothing is listed before its bytes are down, and everything listed can be read and is what was written under its key."""
    index, readable = state._stock.index, CopyState.READABLE
    for entry in index:
        assert entry.readable, "listed without a readable copy"
        for copy in entry.copies:
            if copy.state is readable:
                assert media.holds(copy, copy.checksum), f"listed {copy.tier.name} copy holds other bytes"
                assert _was_put(media, copy, written[entry.key_space, entry.hash]), "listed under another key"
        parent = index.get(entry.key_space, entry.parent)
        if parent is not None:
            assert parent.children > 0


def _was_put(media: Media, copy: Copy, written: Set[int]) -> bool:
    """Its bytes are what somebody wrote, or what was made of that by a step-down, and it says which."""
    origin = media.stepped_from.get(copy.checksum)
    return copy.checksum in written if copy.rung == AS_SEALED else origin is not None and origin in written


def check_leased(entry: Entry | None, media: Media, checksum: int) -> None:
    """A leased block stays readable with the bytes it was leased with, unless they rot. `entry`: what the node says the lease covers."""
    assert entry is not None, "a lease lost a block before its end"
    assert entry.leases > 0
    serving = [copy for copy in entry.copies if copy.state in _SERVING]
    assert not serving or any(copy.checksum == checksum for copy in serving) or media.lost(checksum), "a lease lost its bytes"
    for copy in serving:
        assert media.holds(copy, copy.checksum), "a leased copy was overwritten"


def check_suffixes_first(state: StoreState, evicted_for_room: Iterable[Note]) -> None:
    """Whatever an event evicted for room, and is gone, left no child behind."""
    index = state._stock.index
    for note in evicted_for_room:
        assert note.key_space is not None
        assert note.block is not None
        if index.get(note.key_space, note.block.hash) is None:
            orphans = [entry for entry in index.entries(note.key_space).values() if entry.parent == note.block.hash]
            assert not orphans, "a head was evicted before its children"


def check_quiet(state: StoreState) -> None:
    """All has been quiet for longer than every timeout: nothing may be left over."""
    status = state.status()
    assert (status.leases, status.reservations, status.operations) == (0, 0, 0), "something was never swept"
    assert all(copy.state is CopyState.READABLE for copy in all_copies(state)), "a copy neither readable nor freed"
    assert all(entry.leases == 0 and copy.holds == 0 for entry in state._stock.index for copy in entry.copies)

"""Erasures: records of unlisted blocks voided on the medium, so that no restart lists them again."""

from __future__ import annotations

from functools import partial

from kvstore.core.extent import Tier
from kvstore.core.region import RegionTable
from kvstore.core.region_writer import Erased, RegionWriter
from kvstore.core.ssd_moves import SsdMoves
from kvstore.ids import BlockHash, KeySpace


class _Erasure:
    """All erasures under way of one key's records. Deletes of that key wait for all of them, whoever asked first."""

    def __init__(self) -> None:
        self.left = 0
        self.ok = True
        self.waiting: list[Erased] = []


class Erasures:
    def __init__(self, regions: RegionTable, writer: RegionWriter, moves: SsdMoves) -> None:
        self._regions = regions
        self._writer = writer
        self._moves = moves
        self._erasures: dict[tuple[KeySpace, BlockHash], _Erasure] = {}

    def erase(self, key_space: KeySpace, block: BlockHash, erased: Erased) -> bool:
        """Voids every record of an unlisted block on the medium, also one that is being written. False: there is none, and `erased` is
        not called; else it is called once, later, with whether it all went well."""
        key = key_space, block
        erasure = self._erasures.get(key) or _Erasure()
        part_erased = partial(self._part_erased, key, erasure)
        for region, record in self._regions.take_dead(key_space, block):
            erasure.left += 1
            self._writer.erase(region, record, part_erased)
        for region in self._regions.unread:
            erasure.left += 1
            region.waiting_for_footer.append(part_erased)
        for move in self._moves.under_way.values():
            if (
                move.target.tier is Tier.SSD
                and move.erased is None
                and (move.entry.key_space, move.entry.hash) == key
                and not move.entry.listed
            ):
                erasure.left += 1
                move.erased = part_erased
        if erasure.left == 0:
            return False
        self._erasures[key] = erasure
        erasure.waiting.append(erased)
        return True

    def _part_erased(self, key: tuple[KeySpace, BlockHash], erasure: _Erasure, ok: bool) -> None:
        erasure.ok &= ok
        erasure.left -= 1
        if erasure.left == 0:
            del self._erasures[key]
            for erased in erasure.waiting:
                erased(erasure.ok)

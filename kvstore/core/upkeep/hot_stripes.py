"""Hot stripes: what many read here gets a replica more for a time. Announced in the registry, so that every reader knows at one epoch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from kvstore.core.heat import hot_stripes
from kvstore.core.placement import reading_places
from kvstore.core.upkeep.handover import shipment_of
from kvstore.core.upkeep.repairer import Repairer
from kvstore.core.upkeep.surroundings import OwnMember
from kvstore.core.view import MOST_HOT_STRIPES
from kvstore.errors import LarderError
from kvstore.ids import StripeId
from kvstore.units import seconds, to_seconds

logger = logging.getLogger(__name__)

_WINDOW = seconds(5)


class HotStripes:
    """`run` never returns."""

    def __init__(self, repairer: Repairer, own: OwnMember, *, take_heat: Callable[[], Mapping[StripeId, int]]) -> None:
        """`take_heat`: the acquires since it was last called, by stripe."""
        self._repairer = repairer
        self._own = own
        self._take_heat = take_heat

    async def run(self) -> None:
        self._take_heat()
        while True:
            await self._repairer.surroundings.pause(_WINDOW)
            window = to_seconds(_WINDOW)
            await self.look({stripe: count / window for stripe, count in self._take_heat().items()})

    async def look(self, rates: Mapping[StripeId, float]) -> None:
        """Announces what is hot by these rates (acquires a second), and has what the extra replicas lack sent to them, where there is
        spare room. Readers that ask there before it has come ask the next replica."""
        repairer = self._repairer
        config = repairer.config
        hot = hot_stripes(
            rates,
            repairer.view,
            node_id=repairer.node_id,
            replicas=repairer.replicas,
            hot_rate=config.hot_rate,
            most_extra=config.hot_replicas,
        )
        if not hot:
            return
        try:
            await self._own.announce_hot(dict(list(hot.items())[:MOST_HOT_STRIPES]), ttl=config.hot_ttl)
        except LarderError as error:
            logger.info("hot stripes are not announced: %s", error)
            return
        self._fill(hot)

    def _fill(self, hot: Mapping[StripeId, int]) -> None:
        """Of those that the view knows by now; the next look finds the others."""
        repairer, view = self._repairer, self._repairer.view
        for stripe in hot:
            held = repairer.catalog.get(stripe)
            if held is None:
                continue
            for node_id in reading_places(stripe, view, replicas=repairer.replicas)[repairer.replicas :]:
                member = view.member(node_id)
                if member is not None:
                    repairer.queue.put(shipment_of(held, member, tuple(held.blocks), living=repairer.replicas, spare_room_only=True))

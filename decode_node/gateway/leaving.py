"""A stream's way off a draining node: another one loads its prefix while the old one goes on, and only then the stream moves.

So the client waits for no load: what is left between the last token of the old node and the first one of the new is a call and the
step that computes the tail.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from decode_node.gateway.fleet import DecodeNode, Fleet
from decode_node.gateway.nodes import ModelIdentity
from decode_node.gateway.router import RoutingPolicy, choose_decode
from kvstore.errors import LarderError
from kvstore.ids import Namespace, NodeId
from kvstore.units import seconds

logger = logging.getLogger(__name__)

_PREPARE = seconds(10)
"""A successor that has not loaded the prefix by then is not asked again."""


class Leaving:
    """Of one session, which looks in after each token."""

    def __init__(self, *, namespace: Namespace, identity: ModelIdentity, fleet: Fleet, policy: RoutingPolicy) -> None:
        self._namespace = namespace
        self._identity = identity
        self._fleet = fleet
        self._policy = policy
        self._target: DecodeNode | None = None
        self._preparing: asyncio.Future[None] | None = None
        self._failed: list[NodeId] = []

    def is_prepared(self, token_ids: Sequence[int]) -> bool:
        """Whether a successor has the prefix of this stream. Starts to prepare one if none is at it. Where there is none, or none that
        can, the stream stays where it is until it is cut."""
        if self._preparing is None:
            self._target = self._choose()
            if self._target is not None:
                work = self._target.backend.prepare(namespace=self._namespace, token_ids=token_ids, timeout=_PREPARE)
                self._preparing = asyncio.ensure_future(work)
            return False
        if not self._preparing.done():
            return False
        failure = self._preparing.exception()
        if failure is None:
            return True
        assert self._target is not None
        if not isinstance(failure, LarderError):
            logger.error("preparing decode node %s raised", self._target.member.node_id, exc_info=failure)
        self._failed.append(self._target.member.node_id)
        self._preparing = None
        return False

    def successor(self) -> DecodeNode | None:
        """The prepared node, once; None when there is none, or it has gone meanwhile."""
        target, prepared = self._target, self._preparing is not None and self._preparing.done()
        if target is None or not prepared:
            return None
        self._target = self._preparing = None
        return target if self._fleet.decode.nodes.get(target.member.node_id) is target and target.is_open else None

    def stop(self) -> None:
        if self._preparing is not None and not self._preparing.cancel() and not self._preparing.cancelled():
            self._preparing.exception()  # looked at, so that nobody logs it as forgotten

    def _choose(self) -> DecodeNode | None:
        node_id = choose_decode(self._fleet.decode_candidates(self._identity), excluded=self._failed, policy=self._policy)
        return None if node_id is None or node_id in self._failed else self._fleet.decode.nodes[node_id]

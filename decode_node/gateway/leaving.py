"""A stream's way off a draining node: another one loads its prefix while the old one goes on, and only then the stream moves.

So the client waits for no load: what is left between the last token of the old node and the first one of the new is a call, the end of
the step that the new node is in, and one more step, which computes the tail.
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

_MOST_TRIES = 8
"""After so many loads that did not bring every full block (the store lost one, or cannot keep up), the stream moves with a longer tail:
better than to be cut."""


class Leaving:
    """Of one session, which looks in after each token."""

    def __init__(self, *, namespace: Namespace, identity: ModelIdentity, fleet: Fleet, policy: RoutingPolicy) -> None:
        self._namespace = namespace
        self._identity = identity
        self._fleet = fleet
        self._policy = policy
        self._target: DecodeNode | None = None
        self._preparing: asyncio.Future[int] | None = None
        self._tries = 0
        """Loads that the target has ended."""
        self._failed: list[NodeId] = []

    def is_prepared(self, token_ids: Sequence[int], *, recoded: bool) -> bool:
        """Whether a successor has all full blocks of this stream, so that the tail is one step's work. Starts to prepare one if none is at
        it; once more if the stream has filled another block since. Where there is none, or none that can, the stream stays where it is
        until it is cut. `recoded`: some of its blocks were not as sealed, so the successor's need not be."""
        if self._preparing is None:
            self._prepare(token_ids, recoded=recoded)
            return False
        if not self._preparing.done():
            return False
        assert self._target is not None
        failure = self._preparing.exception()
        if failure is not None:
            if not isinstance(failure, LarderError):
                logger.error("preparing decode node %s raised", self._target.member.node_id, exc_info=failure)
            self._failed.append(self._target.member.node_id)
            self._target = self._preparing = None
            return False
        self._tries += 1
        if self._preparing.result() >= self._full_blocks(token_ids) or self._tries >= _MOST_TRIES:
            return True
        self._prepare(token_ids, recoded=recoded)
        return False

    def successor(self) -> DecodeNode | None:
        """The prepared node, once; None when there is none, or it has gone meanwhile."""
        target, preparing = self._target, self._preparing
        if target is None or preparing is None or not preparing.done() or preparing.exception() is not None:
            return None
        self._target = self._preparing = None
        return target if self._is_there(target) else None

    def stop(self) -> None:
        if self._preparing is not None and not self._preparing.cancel() and not self._preparing.cancelled():
            self._preparing.exception()  # looked at, so that nobody logs it as forgotten

    def _prepare(self, token_ids: Sequence[int], *, recoded: bool) -> None:
        if self._target is None or not self._is_there(self._target):
            self._target, self._preparing, self._tries = self._choose(), None, 0
        if self._target is not None:
            backend = self._target.backend
            work = backend.prepare(namespace=self._namespace, token_ids=token_ids, recoded=recoded, timeout=_PREPARE)
            self._preparing = asyncio.ensure_future(work)

    def _full_blocks(self, token_ids: Sequence[int]) -> int:
        """Those that a successor can take from a cache: it computes the last token itself."""
        assert self._target is not None
        assert self._target.load is not None
        return (len(token_ids) - 1) // self._target.load.block_tokens

    def _is_there(self, node: DecodeNode) -> bool:
        return self._fleet.decode.nodes.get(node.member.node_id) is node and node.is_open

    def _choose(self) -> DecodeNode | None:
        node_id = choose_decode(self._fleet.decode_candidates(self._identity), excluded=self._failed, policy=self._policy)
        return None if node_id is None or node_id in self._failed else self._fleet.decode.nodes[node_id]

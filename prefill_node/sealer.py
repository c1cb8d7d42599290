"""What the engine calls when a block is full: make its numbers canonical, and hand the payload to the publisher."""

from __future__ import annotations

import logging

import numpy as np

from kvstore.codec import BlockCodec
from kvstore.errors import CodecFailure
from kvstore.ids import AS_SEALED, BEHIND_RECODED, BlockRef, KeySpace
from prefill_node import metrics
from prefill_node.publish import Publisher, SealedPayload

log = logging.getLogger(__name__)


class PublishingSealer:
    """The engine's Sealer. `open` and `close` are called on the event loop, `seal` in the engine thread."""

    def __init__(self, codec: BlockCodec, publisher: Publisher, *, exact: BlockCodec, wait_for_room: bool) -> None:
        """`exact` is a codec of rung raw. `wait_for_room`: a full publish queue holds the engine up (prefill) instead of losing the
        payload (decode)."""
        self._codec = codec
        self._exact = exact
        self._publisher = publisher
        self._wait_for_room = wait_for_room
        self._key_spaces: dict[str, KeySpace] = {}

    def open(self, request_id: str, key_space: KeySpace) -> None:
        """Say where the blocks of a request belong; before the request is submitted."""
        assert request_id not in self._key_spaces
        self._key_spaces[request_id] = key_space

    def close(self, request_id: str) -> None:
        """The request is over. A block sealed after this is made canonical and stays unpublished."""
        self._key_spaces.pop(request_id, None)

    def seal(self, ref: BlockRef, block: np.ndarray, start_position: int, request_id: str, *, behind_recoded: bool) -> None:
        """Replace `block` by what the store will hold and queue its payload. `behind_recoded`: the store is told, so that nobody takes
        it for the numbers of a sequence that had its whole prefix as sealed.

        A block that the codec cannot encode (NaN, Inf) keeps its numbers and is not published; its sequence goes on, and whoever
        needs the block later computes it again.
        """
        key_space = self._key_spaces.get(request_id)
        try:
            payload = self._codec.encode_canonical(block, start_position=start_position)
        except CodecFailure as failure:
            log.warning("block %d of request %s was not sealed: %s", ref.index, request_id, failure)
            metrics.codec_failures.labels(reason=failure.reason).inc()
            if key_space is not None:
                self._publisher.refuse((key_space, ref.hash))
            return
        if key_space is None:
            metrics.unpublished_blocks.labels(reason="request_over").inc()
            return
        rung = BEHIND_RECODED if behind_recoded else AS_SEALED
        self._publisher.offer(SealedPayload(key_space, ref, payload, rung), wait=self._wait_for_room)

    def republish(self, ref: BlockRef, block: np.ndarray, start_position: int, request_id: str) -> None:
        """Queue the payload of a block that is sealed here already and missing in the store. For worker threads; may block.

        The payload gives back exactly the numbers that sequences here attend to: where encoding them once more would move them, they
        are stored as they are.
        """
        key_space = self._key_spaces.get(request_id)
        if key_space is None:
            metrics.unpublished_blocks.labels(reason="request_over").inc()
            return
        again = block.copy()
        try:
            payload = self._codec.encode_canonical(again, start_position=start_position)
            if not np.array_equal(again.view(np.uint8), block.view(np.uint8)):
                payload = self._exact.encode(block, start_position=start_position)
        except CodecFailure as failure:
            metrics.codec_failures.labels(reason=failure.reason).inc()
            self._publisher.refuse((key_space, ref.hash))
            return
        self._publisher.offer(SealedPayload(key_space, ref, payload), wait=True)

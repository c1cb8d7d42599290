"""The thread that steps payloads down, and what it has made until that is written. One thread: it is work for the background, and takes
no more than a core."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kvstore.codec.checksum import payload_checksum
from kvstore.core.events.moves import ExtentRecoded, RecodeExtent, RecodeOutcome
from kvstore.errors import CodecFailure, CorruptPayload, UnsupportedFormat
from kvstore.ids import OperationId
from kvstore.node.payload_source import PayloadSource
from kvstore.tiers.tier import TierFailure

if TYPE_CHECKING:
    from kvstore.codec.step_down import PayloadSteps

logger = logging.getLogger(__name__)


class Recoding:
    """The core bounds how many are under way, and so the bytes kept here."""

    def __init__(self, source: PayloadSource, loop: asyncio.AbstractEventLoop, *, steps: PayloadSteps) -> None:
        self._source = source
        self._loop = loop
        self._steps = steps
        self._made: dict[OperationId, bytes] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="step-down")

    def start(self, instruction: RecodeExtent, done: Callable[[ExtentRecoded], None]) -> None:
        """`done` is called once, on the event loop."""

        def run() -> None:
            outcome, payload = self._recode(instruction)
            self._loop.call_soon_threadsafe(finish, outcome, payload)

        def finish(outcome: ExtentRecoded, payload: bytes) -> None:
            if outcome.outcome is RecodeOutcome.OK:
                self._made[instruction.operation] = payload
            done(outcome)

        self._thread.submit(run)

    def take(self, operation: OperationId) -> bytes:
        return self._made.pop(operation)

    def drop(self, operation: OperationId) -> None:
        del self._made[operation]

    def close(self) -> None:
        """What has not begun is left."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _recode(self, instruction: RecodeExtent) -> tuple[ExtentRecoded, bytes]:
        operation = instruction.operation
        try:
            payload = self._source.read_now(instruction.source, instruction.checksum)
        except CorruptPayload:
            return ExtentRecoded(operation=operation, outcome=RecodeOutcome.SOURCE_CORRUPT), b""
        except TierFailure as failure:
            logger.warning("step-down: %s", failure)
            return ExtentRecoded(operation=operation, outcome=RecodeOutcome.SOURCE_FAILED), b""
        try:
            stepped = self._steps.step_down(payload, instruction.rung)
        except CodecFailure as failure:
            reason = failure.reason
        except UnsupportedFormat:
            reason = "unsupported"
        except CorruptPayload:
            reason = "no_payload"  # as it was put, so nobody's business here
        except Exception:
            logger.exception("step-down: a bug in the codec")  # the block is as good as before
            reason = "internal"
        else:
            checksum = payload_checksum(stepped)
            return ExtentRecoded(operation=operation, outcome=RecodeOutcome.OK, length=len(stepped), checksum=checksum), stepped
        return ExtentRecoded(operation=operation, outcome=RecodeOutcome.REFUSED, reason=reason), b""

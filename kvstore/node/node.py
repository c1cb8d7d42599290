"""The shell of one store: feeds events to the core, carries out its instructions, hands in every outcome."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kvstore.byte_budget import ByteBudget
from kvstore.clock import Clock
from kvstore.core.events import Event, Instruction
from kvstore.core.events.gets import AnswerRead, CancelRead, ReadRequested
from kvstore.core.events.moves import CopyExtent, CopyOutcome, DropRecoded, ExtentCopied, RecodeExtent
from kvstore.core.events.notes import Note
from kvstore.core.events.puts import AnswerReserve, DiscardReservation, ReserveStatus
from kvstore.core.events.regions import RegionsRecovered, RegionWritten, WriteRegion
from kvstore.core.events.stop import AnswerStop, StopRequested
from kvstore.core.events.tick import Tick
from kvstore.core.events.verification import ExtentsVerified, VerifyExtents, VerifyOutcome
from kvstore.core.extent import Tier
from kvstore.core.store_state import StoreState
from kvstore.core.upkeep.open_read import OpenRead
from kvstore.errors import CorruptPayload
from kvstore.ids import BlockHash, KeySpace, LeaseId, OperationId, RequestId
from kvstore.node.config import NodeConfig
from kvstore.node.incoming import IncomingPayloads
from kvstore.node.payload_source import RUN_BYTES, Found, PayloadSource, Stored
from kvstore.node.recoding import Recoding
from kvstore.node.scrub import scrub
from kvstore.node.ssd_writer import SsdWriter, WriteOutcome
from kvstore.tiers.host import HostArena
from kvstore.tiers.tier import FailureReason, TierFailure
from kvstore.tiers.tier import Tier as Medium
from kvstore.units import Nanos, seconds, to_seconds

if TYPE_CHECKING:
    from kvstore.codec.step_down import PayloadSteps

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

SCRUB_PAUSE = seconds(1)
"""Between two passes: of a store so small that its rate would not slow them down."""


class _Request(Protocol):
    @property
    def request_id(self) -> RequestId: ...


class Node:
    """Belongs to one event loop; every method is called there. Small host payloads are touched inline, large ones and the SSD in threads.

    `on_notes` is called with the Notes of each event (metrics, events). After a bug in here the core's state is not to be trusted any more:
    `until_crash` raises it, and the process must end.
    """

    def __init__(
        self,
        state: StoreState,
        *,
        host: HostArena,
        ssd: Medium | None,
        gpu: Medium | None = None,
        config: NodeConfig,
        clock: Clock,
        steps: PayloadSteps | None = None,
        on_notes: Callable[[Sequence[Note]], None] = lambda notes: None,
    ) -> None:
        loop = asyncio.get_running_loop()
        self.state = state
        self.incoming = IncomingPayloads(host)
        self._crashed: asyncio.Future[None] = loop.create_future()
        self._host = host
        self._gpu = gpu
        self._config = config
        self._clock = clock
        self._on_notes = on_notes
        self._executor = ThreadPoolExecutor(config.ssd_threads, thread_name_prefix="payload")
        buffer = ByteBudget(config.read_buffer_capacity)
        self.source = PayloadSource(host, ssd, gpu, executor=self._executor, timeout=config.read_deadline, buffer=buffer)
        self._writer = None if ssd is None else SsdWriter(ssd, loop)
        self._recoding = None if steps is None else Recoding(self.source, loop, steps=steps)
        self._request_ids = itertools.count(1)
        self._waiting: dict[RequestId, tuple[type, Callable[[Any], None]]] = {}
        self._reads: dict[int, OpenRead] = {}
        self._events: deque[Event] = deque()
        self._feeding = False
        self._copies: list[CopyExtent] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, recovered: RegionsRecovered | None) -> None:
        """`recovered`: what is on the SSD; None without an SSD tier."""
        if recovered is not None:
            self.feed(recovered)
        self.spawn(self._tick())
        if self._config.scrub_rate:
            self.spawn(scrub(self, bytes_per_second=self._config.scrub_rate, pause=SCRUB_PAUSE))

    async def until_crash(self) -> None:
        """Waits; raises the bug when there is one. Cancelling it is harmless."""
        await asyncio.shield(self._crashed)

    async def stop(self) -> None:
        """Demotes what is hot, for as long as `drain_deadline`, and ends every task and thread. The tiers stay open."""
        in_time = not self._crashed.done()
        if in_time:
            deadline = self._config.drain_deadline
            try:
                async with asyncio.timeout(to_seconds(deadline)):
                    stop = StopRequested(request_id=self.next_request_id(), within=deadline)
                    report = (await self.ask(stop, AnswerStop)).report
            except TimeoutError:
                in_time = False
                report = self.state.stop_report()
            logger.log(
                logging.WARNING if report.left_blocks and self._writer is not None else logging.INFO,
                "stop: %d blocks (%d bytes) were saved to the SSD, %d (%d bytes) were left when %s",
                *report,
                "all was done" if in_time else f"drain_deadline ({to_seconds(deadline):g} s) was over",
            )
        await self.close(finish=in_time)

    async def close(self, *, finish: bool = True) -> None:
        """`finish`: writes that wait are done first."""
        self._copies.clear()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._writer is not None:
            await asyncio.to_thread(self._writer.close, finish=finish)
        if self._recoding is not None:
            self._recoding.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    @property
    def reads(self) -> int:
        """Under way: their extents are kept."""
        return len(self._reads)

    def now(self) -> Nanos:
        return self._clock.now()

    def next_request_id(self) -> RequestId:
        return RequestId(next(self._request_ids))

    async def ask(self, request: _Request, answer: type[AnswerT]) -> AnswerT:
        """The core's answer to a request event. Those that the core answers at once are answered without giving up the loop."""
        waiting: asyncio.Future[AnswerT] = asyncio.get_running_loop().create_future()

        def settle(found: AnswerT) -> None:
            if not waiting.done():
                waiting.set_result(found)

        self.ask_now(request, answer, settle)
        try:
            return await waiting
        finally:
            self._waiting.pop(request.request_id, None)

    def ask_now(self, request: _Request, answer: type[AnswerT], answered: Callable[[AnswerT], None]) -> None:
        """The same without a wait: `answered` is called once, before this returns if the core answers at once. It is called amidst the
        core's instructions: it must be quick, and raise nothing."""
        self._waiting[request.request_id] = (answer, answered)
        self.feed(request)  # type: ignore[arg-type]  # every request is an Event

    def open_read_now(self, lease_id: LeaseId, key_space: KeySpace, hashes: Sequence[BlockHash], *, counts: bool = True) -> OpenRead:
        """The caller must `finish` it, whatever happens. `counts`: see ReadRequested."""
        request = ReadRequested(
            request_id=self.next_request_id(), lease_id=lease_id, key_space=key_space, hashes=tuple(hashes), counts=counts
        )
        plans: list[AnswerRead] = []
        self.ask_now(request, AnswerRead, plans.append)
        (plan,) = plans  # the core answers a read at once
        return self._reads[plan.operation] if plan.operation else OpenRead(plan, self.feed)

    def feed(self, event: Event) -> None:
        """Hands one event to the core and starts what it asks for. An event that comes up meanwhile is taken after it."""
        self._events.append(event)
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._events:
                notes: list[Note] = []
                for instruction in self.state.handle(self._events.popleft(), self._clock.now()):
                    if isinstance(instruction, Note):
                        notes.append(instruction)
                    else:
                        self._execute(instruction)
                if notes:
                    self._on_notes(notes)
        except Exception as error:
            self.crash(error)
            raise
        finally:
            self._feeding = False

    def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case DiscardReservation():
                self.incoming.close(instruction.write_token)
            case CancelRead():
                self._reads[instruction.operation].finish()
            case VerifyExtents():
                self._verify(instruction)
            case CopyExtent():
                self._copy(instruction)
            case RecodeExtent():
                assert self._recoding is not None
                self._recoding.start(instruction, self.feed)
            case DropRecoded():
                assert self._recoding is not None
                self._recoding.drop(instruction.recoded)
            case WriteRegion():
                self._write_region(instruction)
            case _:
                self._answer(instruction)

    def _answer(self, answer: object) -> None:
        if isinstance(answer, AnswerReserve):
            for grant in answer.grants:
                if grant.status is ReserveStatus.GRANTED:
                    assert grant.extent is not None
                    self.incoming.open(grant.write_token, grant.extent)
        elif isinstance(answer, AnswerRead) and answer.operation:
            self._reads[answer.operation] = OpenRead(answer, partial(self._finish_read, answer.operation))
        waiting = self._waiting.pop(answer.request_id, None)  # type: ignore[attr-defined]
        if waiting is not None:
            kind, answered = waiting
            assert isinstance(answer, kind), f"{answer} where a {kind.__name__} should be"
            answered(answer)

    def _finish_read(self, operation: int, finished: Event) -> None:
        del self._reads[operation]
        self.feed(finished)

    def _verify(self, instruction: VerifyExtents) -> None:
        stored = [Stored(extent, checksum) for extent, checksum in zip(instruction.extents, instruction.checksums, strict=True)]
        if self.source.are_quick(stored):
            self._verified(instruction.operation, self.source.read_each_now(stored))
        else:
            self.spawn(self._verify_in_thread(instruction.operation, stored))

    async def _verify_in_thread(self, operation: OperationId, stored: Sequence[Stored]) -> None:
        found: Sequence[Found]
        try:
            found = await self.source.read_each(stored)
        except TierFailure as stalled:
            found = [stalled] * len(stored)
        self._verified(operation, found)

    def _verified(self, operation: OperationId, found: Sequence[Found]) -> None:
        outcomes = []
        for payload in found:
            if isinstance(payload, TierFailure):
                logger.warning("verify: %s", payload)
                outcomes.append(VerifyOutcome.IO_ERROR)
            else:
                outcomes.append(VerifyOutcome.CORRUPT if isinstance(payload, CorruptPayload) else VerifyOutcome.OK)
        self.feed(ExtentsVerified(operation=operation, outcomes=tuple(outcomes)))

    def _copy(self, instruction: CopyExtent) -> None:
        if instruction.target.tier is Tier.SSD:
            self._copy_to_ssd(instruction)
        else:
            if not self._copies:
                asyncio.get_running_loop().call_soon(self._start_copies)
            self._copies.append(instruction)

    def _start_copies(self) -> None:
        """Of neighbours in an answer one thread reads several."""
        run: list[CopyExtent] = []
        for copy in self._copies:
            if run and (copy.source.tier is not run[0].source.tier or sum(c.source.length for c in [*run, copy]) > RUN_BYTES):
                self.spawn(self._copy_to_memory(run))
                run = []
            run.append(copy)
        if run:
            self.spawn(self._copy_to_memory(run))
        self._copies = []

    def _copy_to_ssd(self, instruction: CopyExtent) -> None:
        assert self._writer is not None
        trouble: list[CopyOutcome] = []
        recoded = None
        if instruction.recoded is not None:
            assert self._recoding is not None
            recoded = self._recoding.take(instruction.recoded)

        def load() -> list[bytes | memoryview] | None:
            if recoded is not None:
                return [instruction.header, recoded]
            try:
                return [instruction.header, self.source.read_now(instruction.source, instruction.checksum)]
            except CorruptPayload:
                trouble.append(CopyOutcome.SOURCE_CORRUPT)
            except TierFailure:
                trouble.append(CopyOutcome.SOURCE_FAILED)
            return None

        def done(outcome: WriteOutcome) -> None:
            copied = {WriteOutcome.OK: CopyOutcome.OK, WriteOutcome.FAILED: CopyOutcome.TARGET_FAILED}.get(outcome) or trouble[0]
            self.feed(ExtentCopied(operation=instruction.operation, outcome=copied))

        offset = instruction.target.offset - len(instruction.header)
        self._writer.submit(region=instruction.target.region, offset=offset, load=load, done=done)

    async def _copy_to_memory(self, run: Sequence[CopyExtent]) -> None:
        found: Sequence[Found]
        try:
            found = await self.source.read_each([Stored(copy.source, copy.checksum) for copy in run])
        except TierFailure as stalled:
            found = [stalled] * len(run)
        for copy, payload in zip(run, found, strict=True):
            assert not copy.header
            outcome = CopyOutcome.OK
            if isinstance(payload, CorruptPayload):
                outcome = CopyOutcome.SOURCE_CORRUPT
            elif isinstance(payload, TierFailure):
                logger.warning("copy to the %s tier: %s", copy.target.tier.name, payload)
                stalled_medium = payload.reason is FailureReason.TIMEOUT  # no reason to condemn the source
                outcome = CopyOutcome.TARGET_FAILED if stalled_medium else CopyOutcome.SOURCE_FAILED
            elif copy.target.tier is Tier.GPU:
                outcome = await self._copy_to_gpu(copy, payload)
            else:
                self._host.view(copy.target.offset, copy.target.length)[:] = payload
            self.feed(ExtentCopied(operation=copy.operation, outcome=outcome))

    async def _copy_to_gpu(self, instruction: CopyExtent, payload: memoryview) -> CopyOutcome:
        assert self._gpu is not None
        target = instruction.target
        try:
            await asyncio.get_running_loop().run_in_executor(self._executor, self._gpu.write, target.region, target.offset, [payload])
        except TierFailure as failure:
            logger.warning("copy to the GPU tier: %s", failure)
            return CopyOutcome.TARGET_FAILED
        return CopyOutcome.OK

    def _write_region(self, instruction: WriteRegion) -> None:
        assert self._writer is not None

        def done(outcome: WriteOutcome) -> None:
            self.feed(RegionWritten(operation=instruction.operation, ok=outcome is WriteOutcome.OK))

        self._writer.submit(region=instruction.region, offset=instruction.offset, load=lambda: [instruction.data], done=done)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(to_seconds(self._config.tick_every))
            self.feed(Tick())

    def spawn(self, coroutine: Coroutine[object, object, None]) -> None:
        """A task that lives until it ends or the node closes; an exception of it is a crash of the node."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.crash(error)

    def crash(self, error: BaseException) -> None:
        """A bug of this process: `until_crash` raises it."""
        if not self._crashed.done():
            logger.critical("the store's state is not to be trusted any more", exc_info=error)
            self._crashed.set_exception(error)

"""A driver that plays the shell of one StoreState: it answers verifications, keeps other I/O back until asked, and finds answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any, TypeVar

import pytest

from kvstore.core.chain import chain_of, root_hash
from kvstore.core.events import Event, Instruction
from kvstore.core.events.gets import (
    AcquireRequested,
    AnswerAcquire,
    AnswerProbe,
    AnswerRead,
    ProbeRequested,
    ReadRequested,
    ReleaseRequested,
)
from kvstore.core.events.moves import CopyExtent, CopyOutcome, ExtentCopied, ExtentRecoded, RecodeExtent, RecodeOutcome
from kvstore.core.events.notes import Note
from kvstore.core.events.puts import (
    AnswerCommit,
    AnswerReserve,
    CommitItem,
    CommitRequested,
    CommitStatus,
    ReserveItem,
    ReserveRequested,
    ReserveStatus,
)
from kvstore.core.events.questions import AnswerList, ListCursor, ListRequested, OwnedBlock
from kvstore.core.events.regions import RecoveredRegion, RegionsRecovered, RegionWritten, WriteRegion
from kvstore.core.events.tick import Tick
from kvstore.core.events.verification import ExtentsVerified, VerifyExtents, VerifyOutcome
from kvstore.core.extent import ALIGNMENT
from kvstore.core.lease import LeaseConfig
from kvstore.core.step_down import StepDownRules
from kvstore.core.store_config import SsdConfig, StoreConfig, WritePolicy
from kvstore.core.store_state import StoreState
from kvstore.ids import BlockRef, BootId, KeySpace, LayoutFingerprint, LeaseId, Namespace, RequestId, WriteToken
from kvstore.units import Bytes, Nanos, seconds

SPACE = KeySpace(Namespace("tenant"), LayoutFingerprint(b"L" * 32))
PAGE = ALIGNMENT
Answer = TypeVar("Answer")
_MOST_IO = 2000


class Driver:
    """Payloads are one page each unless said otherwise; the checksum of a block is a number made of its hash."""

    def __init__(
        self,
        config: StoreConfig,
        *,
        boot: int = 1,
        day_offset: Nanos = Nanos(0),
        recovered: tuple[RecoveredRegion, ...] = (),
    ) -> None:
        self.state = StoreState(config, boot_id=BootId(bytes([boot]) * 16), day_offset=day_offset)
        self.now = Nanos(0)
        self.held: list[Instruction] = []  # I/O given and not yet answered
        self.said: list[Instruction] = []  # everything since the last `send`
        self._request = 0
        if config.ssd is not None:
            self.send(RegionsRecovered(regions=recovered))

    def request(self) -> RequestId:
        self._request += 1
        return RequestId(self._request)

    def send(self, event: Event) -> list[Instruction]:
        self.said = self.state.handle(event, self.now)
        self.held += [i for i in self.said if isinstance(i, VerifyExtents | CopyExtent | RecodeExtent | WriteRegion)]
        return self.said

    def ask(self, event: Event, answer: type[Answer]) -> Answer:
        """The one answer of this type that the event brings at once."""
        return self.only(self.send(event), answer)

    @staticmethod
    def only(instructions: Iterable[Instruction], kind: type[Answer]) -> Answer:
        (found,) = [i for i in instructions if isinstance(i, kind)]
        return found

    def wait(self, by: Nanos) -> list[Instruction]:
        self.now = Nanos(self.now + by)
        return self.send(Tick())

    def notes(self) -> list[str]:
        return [f"{i.kind}:{i.reason}" for i in self.said if isinstance(i, Note)]

    def restart(self, *, boot: int = 2, day_offset: Nanos | None = None) -> Driver:
        """A node with the same configuration that finds what this one has on its SSD. `day_offset` None: no time has passed."""
        config, offset = self.state._stock.config, self.now if day_offset is None else day_offset
        return Driver(config, boot=boot, day_offset=offset, recovered=self.on_ssd())

    def on_ssd(self) -> tuple[RecoveredRegion, ...]:
        """What a restart would find: the live records, as footers list them."""
        regions = self.state._stock.regions
        assert regions is not None
        return tuple(
            RecoveredRegion(region.number, region.header.sequence, region.header.nonce, True, tuple(regions.footer_records(region)))
            for region in regions
            if region.header is not None
        )

    # --- requests -----------------------------------------------------------------------------------------------------------------------

    def reserve(self, *blocks: BlockRef, size: int = PAGE, space: KeySpace = SPACE, ttl: Nanos | None = None) -> AnswerReserve:
        items = tuple(ReserveItem(block, size, ttl) for block in blocks)
        return self.ask(ReserveRequested(request_id=self.request(), key_space=space, items=items), AnswerReserve)

    def commit(self, *tokens: WriteToken, checksum: int = 1, received: int = PAGE) -> list[Instruction]:
        items = tuple(CommitItem(token, checksum, received) for token in tokens)
        return self.send(CommitRequested(request_id=self.request(), items=items))

    def put(
        self, *blocks: BlockRef, size: int = PAGE, space: KeySpace = SPACE, ttl: Nanos | None = None
    ) -> list[ReserveStatus | CommitStatus]:
        """One whole put per block, each after the other."""
        statuses: list[ReserveStatus | CommitStatus] = []
        for block in blocks:
            grant = self.reserve(block, size=size, space=space, ttl=ttl).grants[0]
            if grant.status is not ReserveStatus.GRANTED:
                statuses.append(grant.status)
                continue
            self.commit(grant.write_token, checksum=checksum_of(block), received=size)
            statuses.append(self.only(self.verified(), AnswerCommit).statuses[0])
        return statuses

    def verified(self, outcome: VerifyOutcome = VerifyOutcome.OK) -> list[Instruction]:
        """Answers every verification that is held."""
        said: list[Instruction] = []
        for instruction in [i for i in self.held if isinstance(i, VerifyExtents)]:
            self.held.remove(instruction)
            said += self.send(ExtentsVerified(operation=instruction.operation, outcomes=(outcome,) * len(instruction.extents)))
        return said

    def copied(self, outcome: CopyOutcome = CopyOutcome.OK) -> list[Instruction]:
        """Answers the oldest copy that is held."""
        instruction = next(i for i in self.held if isinstance(i, CopyExtent))
        self.held.remove(instruction)
        return self.send(ExtentCopied(operation=instruction.operation, outcome=outcome))

    def recoded(self, *, length: int = PAGE // 2, checksum: int = 7, reason: str = "") -> list[Instruction]:
        """Answers the oldest step-down that is held; refuses it when a reason is given."""
        instruction = next(i for i in self.held if isinstance(i, RecodeExtent))
        self.held.remove(instruction)
        if reason:
            return self.send(ExtentRecoded(operation=instruction.operation, outcome=RecodeOutcome.REFUSED, reason=reason))
        made = ExtentRecoded(operation=instruction.operation, outcome=RecodeOutcome.OK, length=length, checksum=checksum)
        return self.send(made)

    def written(self, *, ok: bool = True) -> list[Instruction]:
        """Answers the oldest region write that is held."""
        instruction = next(i for i in self.held if isinstance(i, WriteRegion))
        self.held.remove(instruction)
        return self.send(RegionWritten(operation=instruction.operation, ok=ok))

    def finish_io(self) -> None:
        """Everything held ends well, and what follows from it, until nothing is under way."""
        for _ in range(_MOST_IO):
            if not self.held:
                return
            match self.held[0]:
                case VerifyExtents():
                    self.verified()
                case CopyExtent():
                    self.copied()
                case RecodeExtent():
                    self.recoded()
                case _:
                    self.written()
        raise AssertionError("one piece of I/O leads to another, for ever")

    def acquire(self, *blocks: BlockRef, ttl: Nanos | None = None, space: KeySpace = SPACE, as_sealed: bool = False) -> AnswerAcquire:
        request = AcquireRequested(request_id=self.request(), key_space=space, blocks=blocks, ttl=ttl, as_sealed=as_sealed)
        return self.ask(request, AnswerAcquire)

    def read(self, lease: LeaseId, *blocks: BlockRef, space: KeySpace = SPACE) -> AnswerRead:
        hashes = tuple(block.hash for block in blocks)
        return self.ask(ReadRequested(request_id=self.request(), lease_id=lease, key_space=space, hashes=hashes), AnswerRead)

    def release(self, lease: LeaseId, *blocks: BlockRef, corrupt: tuple[BlockRef, ...] = ()) -> None:
        self.send(
            ReleaseRequested(
                request_id=self.request(),
                lease_id=lease,
                key_space=SPACE,
                hashes=tuple(block.hash for block in blocks),
                corrupt_hashes=tuple(block.hash for block in corrupt),
            )
        )

    def listing(self, *, at_most: int = 1024) -> list[tuple[KeySpace, OwnedBlock]]:
        """Every block, by a walk of that step."""
        found: list[tuple[KeySpace, OwnedBlock]] = []
        cursor: ListCursor | None = None
        while True:
            answer = self.ask(ListRequested(request_id=self.request(), cursor=cursor, at_most=at_most), AnswerList)
            found += [(answer.key_space, owned) for owned in answer.blocks if answer.key_space is not None]
            cursor = answer.cursor
            if cursor is None:
                return found

    def present(self, *blocks: BlockRef, space: KeySpace = SPACE) -> tuple[bool, ...]:
        hashes = tuple(block.hash for block in blocks)
        return self.ask(ProbeRequested(request_id=self.request(), key_space=space, hashes=hashes), AnswerProbe).present


def checksum_of(block: BlockRef) -> int:
    return int.from_bytes(block.hash[:8], "little")


@pytest.fixture
def space() -> KeySpace:
    return SPACE


@pytest.fixture
def chain() -> Callable[..., tuple[BlockRef, ...]]:
    """chain(blocks, start=1): a chain of that many blocks; equal `start`, equal chain."""

    def make(blocks: int, *, start: int = 1, space: KeySpace = SPACE) -> tuple[BlockRef, ...]:
        root = root_hash(namespace=space.namespace, model_digest=b"model", layout=space.layout)
        return chain_of(range(start, start + blocks * 4), block_tokens=4, root=root)

    return make


@pytest.fixture
def host_node() -> Callable[..., Driver]:
    """host_node(pages): a node with a host tier of so many pages and no SSD."""

    def make(pages: int, **config: Any) -> Driver:
        lease = LeaseConfig(ttl=seconds(10), max_ttl=seconds(20), max_lifetime=seconds(60), max_read=seconds(5))
        return Driver(StoreConfig(host_capacity=Bytes(pages * PAGE), lease=lease, **config))

    return make


@pytest.fixture
def ssd_node() -> Callable[..., Driver]:
    """ssd_node(pages, regions=..., region_pages=...): with an SSD tier too; demotes at once, and no put waits, unless told so."""

    def make(
        pages: int,
        *,
        regions: int = 4,
        region_pages: int = 16,
        demote_above: float = 0.0,
        write_policy: WritePolicy = WritePolicy.WRITE_BACK,
        min_dead_share: float = 0.25,
        patience: Nanos = Nanos(0),
        boot: int = 1,
        step_down: StepDownRules = MappingProxyType({}),
        **config: Any,
    ) -> Driver:
        ssd = SsdConfig(
            capacity=Bytes(regions * region_pages * PAGE),
            region_bytes=Bytes(region_pages * PAGE),
            demote_above=demote_above,
            write_policy=write_policy,
            min_dead_share=min_dead_share,
            patience=patience,
            step_down=step_down,
        )
        return Driver(StoreConfig(host_capacity=Bytes(pages * PAGE), ssd=ssd, **config), boot=boot)

    return make

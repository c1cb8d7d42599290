"""What goes into `StoreState.handle` (events) and what comes out (instructions): here all of them, each file one subject.

Rules between the core and its shell:

* `handle` is called from one thread; the instructions of one call are carried out, or at least started, in the order given and before
  the next event is handed in.
* A request event has a `request_id` the shell chose; exactly one Answer with that id comes back, at once or after later events.
* Every I/O instruction has an `operation`; the shell hands in exactly one outcome event with that operation, however the I/O ends. Until
  then the core frees nothing that the operation touches. So the shell bounds its I/O; the core does not forget it.
* An outcome that says OK means: the bytes are down (and synced, where the tier promises to survive a crash).
* Instructions without `operation` and without `request_id` (DiscardReservation, CancelRead, DropRecoded, Note) have no outcome.

Enumerations that also travel have the protocol's numbers.
"""

from __future__ import annotations

from kvstore.core.events.gets import (
    AcquireRequested,
    AnswerAcquire,
    AnswerProbe,
    AnswerRead,
    AnswerRelease,
    AnswerRenew,
    CancelRead,
    ProbeRequested,
    ReadFinished,
    ReadRequested,
    ReleaseRequested,
    RenewRequested,
)
from kvstore.core.events.moves import CopyExtent, DropRecoded, ExtentCopied, ExtentRecoded, RecodeExtent
from kvstore.core.events.notes import Note
from kvstore.core.events.puts import (
    AnswerCommit,
    AnswerReserve,
    CommitRequested,
    DiscardReservation,
    ReservationsAbandoned,
    ReserveRequested,
)
from kvstore.core.events.questions import AnswerDescribe, AnswerList, AnswerLocate, DescribeRequested, ListRequested, LocateRequested
from kvstore.core.events.regions import RegionsRecovered, RegionWritten, WriteRegion
from kvstore.core.events.removals import AnswerDelete, AnswerEvict, DeleteRequested, EvictRequested
from kvstore.core.events.stop import AnswerStop, StopRequested
from kvstore.core.events.tick import Tick
from kvstore.core.events.verification import AnswerVerify, ExtentsVerified, VerifyExtents, VerifyRequested
from kvstore.core.events.wishes import AnswerPin, AnswerQuota, AnswerUnpin, PinRequested, QuotaRequested, UnpinRequested

Event = (
    ReserveRequested
    | ReservationsAbandoned
    | CommitRequested
    | ExtentsVerified
    | VerifyRequested
    | ProbeRequested
    | AcquireRequested
    | ReadRequested
    | ReadFinished
    | RenewRequested
    | ReleaseRequested
    | DeleteRequested
    | EvictRequested
    | PinRequested
    | UnpinRequested
    | QuotaRequested
    | LocateRequested
    | DescribeRequested
    | ListRequested
    | ExtentCopied
    | ExtentRecoded
    | RegionWritten
    | RegionsRecovered
    | Tick
    | StopRequested
)

Answer = (
    AnswerReserve
    | AnswerCommit
    | AnswerVerify
    | AnswerProbe
    | AnswerAcquire
    | AnswerRead
    | AnswerRenew
    | AnswerRelease
    | AnswerDelete
    | AnswerEvict
    | AnswerPin
    | AnswerUnpin
    | AnswerQuota
    | AnswerLocate
    | AnswerDescribe
    | AnswerList
    | AnswerStop
)

Instruction = Answer | DiscardReservation | VerifyExtents | CancelRead | CopyExtent | RecodeExtent | DropRecoded | WriteRegion | Note

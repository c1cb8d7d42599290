"""What the processes of a store see of their own store, of the other stores, and of time: their only way to wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from kvstore.core.events.puts import CommitStatus, ReserveItem, ReserveStatus
from kvstore.core.extent import Extent
from kvstore.core.upkeep.open_read import OpenRead
from kvstore.core.view import Member, View
from kvstore.ids import BlockHash, Epoch, KeySpace, LeaseId, NodeId, RequestId, StripeId, WriteToken
from kvstore.units import Nanos

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True)
class PeerProgress:
    settled_epoch: Epoch
    """Nothing is owed for the view of this epoch."""
    blocks: int
    """Readable there."""


class PeerGrant(NamedTuple):
    """An answer to one reserved item."""

    status: ReserveStatus
    write_token: WriteToken
    way: object
    """What a transfer to it needs: the other side's words to whoever moves the bytes, and no business of these processes."""


class PeerWrite(NamedTuple):
    grant: PeerGrant
    payload: bytes | memoryview
    """Must not change until it is written."""


class PeerCalls(Protocol):
    """One other store. Every call has a bound and raises a LarderError when it fails; Unavailable when nobody answers."""

    async def progress(self, *, timeout: Nanos) -> PeerProgress: ...

    async def holds(self, key_space: KeySpace, hashes: Sequence[BlockHash], *, verify: bool, epoch: Epoch, timeout: Nanos) -> list[bool]:
        """One answer per hash, in order. `verify`: a copy that does not read back as stored does not count. Raises StaleView when the peer
        does not know that epoch yet."""
        ...

    async def compare_buckets(
        self, node_id: NodeId, epoch: Epoch, first_bucket: int, digests: Sequence[int], *, timeout: Nanos
    ) -> dict[int, int]:
        """Buckets that differ -> the peer's digest. Raises StaleView when the peer has another view."""
        ...

    async def list_stripes(self, node_id: NodeId, epoch: Epoch, bucket: int, *, timeout: Nanos) -> dict[StripeId, int]:
        """The peer's stripes of a bucket that both own -> which of their blocks it has, as a digest. Raises StaleView likewise."""
        ...

    async def reserve(
        self, key_space: KeySpace, items: Sequence[ReserveItem], *, spare_room_only: bool, timeout: Nanos
    ) -> list[PeerGrant]: ...

    async def write(self, writes: Sequence[PeerWrite], *, timeout: Nanos) -> frozenset[WriteToken]:
        """Returns the tokens that were refused."""
        ...

    async def commit(self, items: Sequence[tuple[WriteToken, int]], *, timeout: Nanos) -> list[CommitStatus]:
        """(token, checksum) each."""
        ...


class Request(Protocol):
    @property
    def request_id(self) -> RequestId: ...


class Surroundings(Protocol):
    @property
    def view(self) -> View:
        """The last one known; its epoch only grows."""
        ...

    def now(self) -> Nanos: ...

    async def pause(self, duration: Nanos) -> None:
        """0: whatever else is ready has its turn."""
        ...

    def next_request_id(self) -> RequestId: ...

    async def ask(self, request: Request, answer: type[AnswerT]) -> AnswerT:
        """Of the own core."""
        ...

    async def open_read(self, lease_id: LeaseId, key_space: KeySpace, hashes: Sequence[BlockHash], *, counts: bool) -> OpenRead:
        """The caller must `finish` it, whatever happens."""
        ...

    async def read_payload(self, extent: Extent, checksum: int) -> bytes | memoryview:
        """Raises CorruptPayload when the bytes are not those; another LarderError when the medium failed, which says nothing of them."""
        ...

    def peer(self, member: Member) -> PeerCalls: ...


class OwnMember(Protocol):
    """This process as a member: what a store itself brings about of its standing."""

    @property
    def member(self) -> Member | None: ...

    async def drain(self) -> None:
        """ACTIVE -> DRAINING. Raises RegistryAway, StaleView."""
        ...

    async def take_over(self, takeover: float) -> None:
        """Raises RegistryAway, StaleView."""
        ...

    async def announce_hot(self, stripes: Mapping[StripeId, int], *, ttl: Nanos) -> None:
        """Stripes of this store -> extra replicas, for so long. In the view soon after. Raises RegistryAway, StaleView."""
        ...

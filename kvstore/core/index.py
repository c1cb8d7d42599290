"""Index: which blocks are readable here. Key space by key space, one entry per block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvstore.core.copies import Copy, CopyState
from kvstore.core.events import OperationId
from kvstore.core.extent import Tier
from kvstore.ids import BlockHash, BlockRef, KeySpace, StripeId

_READABLE = CopyState.READABLE


class Entry:
    """One block of this node. Mutable; owned by the store state. Slots, no dict: there is one per block.

    An entry that was unlisted (deleted, say) lives on while leases refer to it; a new put of its key makes a new entry.
    """

    __slots__ = (
        "checksum",
        "children",
        "expires_at",
        "hash",
        "host",
        "index",
        "key_space",
        "last_used",
        "leases",
        "length",
        "listed",
        "move",
        "parent",
        "queued",
        "segment",
        "ssd",
        "stripe",
        "uses",
    )

    def __init__(self, *, key_space: KeySpace, block: BlockRef, length: int, checksum: int, expires_at: int = 0) -> None:
        self.key_space = key_space
        self.hash: BlockHash = block.hash
        self.parent: BlockHash = block.parent
        self.stripe: StripeId = block.stripe
        self.index = block.index
        self.length = length
        self.checksum = checksum
        self.expires_at = expires_at
        """By the time of day, in nanoseconds since 1970; 0: never."""
        self.host: Copy | None = None
        self.ssd: Copy | None = None
        self.move: OperationId | None = None
        """The one demotion, promotion or relocation under way."""
        self.children = 0
        """Listed blocks that follow this one directly."""
        self.leases = 0
        self.last_used = 0
        """Rank of the last use, from the eviction policy; larger is later."""
        self.uses = 0
        """Leases taken on it, up to what admission looks at."""
        self.queued = 0
        """Bit per eviction queue that it is in."""
        self.segment = 0
        """What the eviction policy remembers of it beside the rank."""
        self.listed = False

    @property
    def block(self) -> BlockRef:
        return BlockRef(hash=self.hash, parent=self.parent, stripe=self.stripe, index=self.index)

    @property
    def readable_host(self) -> bool:
        return self.host is not None and self.host.state is _READABLE

    @property
    def readable_ssd(self) -> bool:
        return self.ssd is not None and self.ssd.state is _READABLE

    @property
    def readable(self) -> bool:
        return self.readable_host or self.readable_ssd

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Of readable copies, fastest first."""
        host = (Tier.HOST,) if self.readable_host else ()
        return (*host, Tier.SSD) if self.readable_ssd else host

    @property
    def copies(self) -> tuple[Copy, ...]:
        """Of any state, fastest tier first."""
        return tuple(copy for copy in (self.host, self.ssd) if copy is not None)


class _Space:
    __slots__ = ("entries", "waiting")

    def __init__(self) -> None:
        self.entries: dict[BlockHash, Entry] = {}
        self.waiting: dict[BlockHash, int] = {}
        """Blocks that are not listed -> how many listed ones follow each directly."""


class Index:
    """Listed entries. Cost of every operation on one key: O(1)."""

    def __init__(self) -> None:
        self._spaces: dict[KeySpace, _Space] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Entry]:
        for space in self._spaces.values():
            yield from space.entries.values()

    def get(self, key_space: KeySpace, block: BlockHash) -> Entry | None:
        space = self._spaces.get(key_space)
        return None if space is None else space.entries.get(block)

    def entries(self, key_space: KeySpace) -> dict[BlockHash, Entry]:
        """Not to be changed by the caller. Empty when nothing of the key space is here."""
        space = self._spaces.get(key_space)
        return {} if space is None else space.entries

    def key_spaces(self) -> tuple[KeySpace, ...]:
        return tuple(self._spaces)

    def leading_runs(self, key_space: KeySpace, blocks: Iterable[BlockRef]) -> list[Entry | None]:
        """One per block: its entry if it is here and so is every asked block before it in its stripe."""
        entries = self.entries(key_space)
        broken: set[StripeId] = set()
        found: list[Entry | None] = []
        for block in blocks:
            entry = entries.get(block.hash)
            if entry is None:
                broken.add(block.stripe)
            elif broken and block.stripe in broken:
                entry = None
            found.append(entry)
        return found

    def add(self, entry: Entry) -> None:
        """Lists the entry. Hashes that its neighbours already hold are shared, not kept twice."""
        space = self._spaces.get(entry.key_space)
        if space is None:
            space = self._spaces[entry.key_space] = _Space()
        assert entry.hash not in space.entries
        if entry.stripe == StripeId(entry.hash):
            entry.stripe = StripeId(entry.hash)
        parent = space.entries.get(entry.parent)
        if parent is None:
            space.waiting[entry.parent] = space.waiting.get(entry.parent, 0) + 1
        else:
            parent.children += 1
            entry.parent = parent.hash
            entry.key_space = parent.key_space
            if entry.stripe == parent.stripe:
                entry.stripe = parent.stripe
        entry.children = space.waiting.pop(entry.hash, 0)
        entry.listed = True
        space.entries[entry.hash] = entry
        self._count += 1

    def remove(self, entry: Entry) -> Entry | None:
        """Unlists the entry. Gives its parent, if that has just lost its last child."""
        space = self._spaces[entry.key_space]
        assert space.entries.pop(entry.hash) is entry
        entry.listed = False
        self._count -= 1
        if entry.children:
            space.waiting[entry.hash] = entry.children
        parent = space.entries.get(entry.parent)
        childless = None
        if parent is not None:
            parent.children -= 1
            childless = parent if parent.children == 0 else None
        else:
            left = space.waiting[entry.parent] - 1
            if left:
                space.waiting[entry.parent] = left
            else:
                del space.waiting[entry.parent]
        if not space.entries:
            del self._spaces[entry.key_space]
        return childless

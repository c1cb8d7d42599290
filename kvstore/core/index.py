"""Index: which blocks are readable here. Key space by key space, one entry per block."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from struct import Struct
from typing import Any

from kvstore.core.copies import Copy, CopyState, HostCopy
from kvstore.core.events.gets import AcquiredBlock
from kvstore.core.events.questions import PlacedCopy
from kvstore.core.extent import ALIGNMENT, Extent, Tier
from kvstore.ids import AS_SEALED, BlockHash, BlockRef, KeySpace, OperationId, RungCode, StripeId

_READABLE = CopyState.READABLE
_FREE = CopyState.FREE

_FACTS = Struct("<IIQQHIB")
"""Of the host copy (see Copy.packed); the index; whether it is far. With one byte more they would take the next size of memory."""
_READ_FACTS = Struct("<IIQQH5x")
"""What a reader is told of them."""
_COPY_BYTES = 26
_INDEX = Struct("<I")

_make_ref: Any = partial(tuple.__new__, BlockRef)
"""From the four fields, in half the time of the constructor."""


class Entry(HostCopy):
    """One block of this node, and in the same object its copy in the host tier: most blocks have one, and an object costs more than
    what is in it. `host` is the entry itself, or None while it has no copy there.

    Mutable; owned by the store state. An entry that was unlisted (deleted, say) lives on while leases refer to it; a new put of its key
    makes a new entry.
    """

    __slots__ = (
        "children",
        "expires_at",
        "gpu",
        "hash",
        "key_space",
        "last_used",
        "leases",
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
        """`length`, `checksum`: of its first copy."""
        self.packed = _FACTS.pack(0, length, 0, checksum, AS_SEALED, block.index, False)
        self.state = _FREE
        self.holds = 0
        self.key_space = key_space
        self.hash: BlockHash = block.hash
        self.parent: BlockHash = block.parent
        self.stripe: StripeId = block.stripe
        self.expires_at = expires_at
        """By the time of day, in nanoseconds since 1970; 0: never."""
        self.gpu: Copy | None = None
        self.ssd: Copy | None = None
        self.move: OperationId | None = None
        """The one demotion, promotion or relocation under way."""
        self.children = 0
        """Listed blocks that follow this one directly."""
        self.leases = 0
        self.last_used = 0
        """Rank of the last use, from the eviction policy; larger is later. The blocks of one use share it."""
        self.uses = 0
        """Leases taken on it, up to what admission looks at."""
        self.queued = 0
        """Bit per eviction queue that it is in."""
        self.segment = 0
        """What the eviction policy remembers of it beside the rank."""
        self.listed = False

    def __lt__(self, other: Entry) -> bool:
        """Of one use, the later in its chain is the colder: it is worthless without what comes before."""
        mine, theirs = self.index, other.index
        return mine > theirs or (mine == theirs and self.hash < other.hash)

    @property
    def index(self) -> int:
        return int(_INDEX.unpack_from(self.packed, _COPY_BYTES)[0])

    @property
    def far(self) -> bool:
        """Its chain has gone on behind it for as long as the step-down rules care (step_down.py)."""
        return bool(self.packed[-1])

    def go_far(self) -> None:
        self.packed = self.packed[:-1] + b"\1"

    @property
    def host(self) -> Copy | None:
        return None if self.state is _FREE else self

    def settle(self, copy: Copy) -> None:
        """The block's copy in the copy's tier is this one from now on. In the host tier the entry itself takes its place."""
        if copy.tier is not Tier.HOST:
            assert self.copy_in(copy.tier) is None
            self._place(copy.tier, copy)
            return
        assert self.state is _FREE
        assert copy.holds == 0
        self.packed = copy.packed[:_COPY_BYTES] + self.packed[_COPY_BYTES:]
        self.state = copy.state

    @property
    def block(self) -> BlockRef:
        block: BlockRef = _make_ref((self.hash, self.parent, self.stripe, self.index))
        return block

    def copy_in(self, tier: Tier) -> Copy | None:
        """Of any state."""
        return self.host if tier is Tier.HOST else self.gpu if tier is Tier.GPU else self.ssd

    def drop(self, copy: Copy) -> None:
        """The copy has come to its end, or another takes its place."""
        if copy.tier is not Tier.HOST:
            self._place(copy.tier, None)

    def _place(self, tier: Tier, copy: Copy | None) -> None:
        if tier is Tier.GPU:
            self.gpu = copy
        else:
            self.ssd = copy

    def readable_beside(self, tier: Tier) -> bool:
        """Another tier has a readable copy too."""
        return (
            (tier is not Tier.HOST and self.state is _READABLE)
            or (tier is not Tier.SSD and self.readable_ssd)
            or (tier is not Tier.GPU and self.readable_gpu)
        )

    @property
    def readable_gpu(self) -> bool:
        return self.gpu is not None and self.gpu.state is _READABLE

    @property
    def readable_host(self) -> bool:
        return self.state is _READABLE

    @property
    def readable_ssd(self) -> bool:
        return self.ssd is not None and self.ssd.state is _READABLE

    @property
    def readable(self) -> bool:
        return self.state is _READABLE or self.readable_ssd or self.readable_gpu

    @property
    def readable_as_sealed(self) -> bool:
        return (self.state is _READABLE and self.rung == AS_SEALED) or self.best.rung == AS_SEALED

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """Of readable copies, fastest first."""
        host = (Tier.HOST,) if self.state is _READABLE else ()
        memory = (Tier.GPU, *host) if self.readable_gpu else host
        return (*memory, Tier.SSD) if self.readable_ssd else memory

    @property
    def placed(self) -> tuple[PlacedCopy, ...]:
        """What an operator is told of the readable copies, fastest tier first."""
        return tuple(PlacedCopy(copy.tier, copy.length, copy.rung) for copy in self.copies if copy.state is _READABLE)

    @property
    def copies(self) -> tuple[Copy, ...]:
        """Of any state, fastest tier first."""
        return tuple(copy for copy in (self.gpu, self.host, self.ssd) if copy is not None)

    @property
    def best(self) -> Copy:
        """The readable copy that a reader is given: as sealed before re-coded, then in the host tier before others, since a transfer needs
        the bytes in host memory. Without any, the facts of the first copy."""
        return self.serving((_READABLE,)) or self

    def serving(self, states: Sequence[CopyState], rung: int | None = None) -> Copy | None:
        """The best copy in one of these states; with `rung`, of that rung alone."""
        found = None
        for copy in (self.host, self.gpu, self.ssd):
            if copy is not None and copy.state in states and (rung is None or copy.rung == rung):
                if copy.rung == AS_SEALED:
                    return copy
                found = found or copy
        return found


def acquired_blocks(entries: Iterable[Entry | None]) -> tuple[list[AcquiredBlock | None], dict[int, RungCode]]:
    """What a reader is told of each, and the rungs of those that are not given as sealed, by their numbers. Thousands at a time: so one
    look into what is packed, and tuples made without their constructors, which halves the time."""
    make, unpack, host = tuple.__new__, _READ_FACTS.unpack, Tier.HOST
    blocks: list[AcquiredBlock | None] = []
    recoded: dict[int, RungCode] = {}
    for entry in entries:
        if entry is None:
            blocks.append(None)
            continue
        page, length, generation, checksum, rung = unpack(entry.packed)
        if entry.state is _READABLE and not rung:
            extent = make(Extent, (host, 0, page * ALIGNMENT, length, generation))
            blocks.append(make(AcquiredBlock, (length, checksum, host, extent)))
            continue
        copy = entry.best
        if copy.rung != AS_SEALED:
            recoded[len(blocks)] = copy.rung
        blocks.append(AcquiredBlock(copy.length, copy.checksum, copy.tier, copy.extent if copy.tier is host else None))
    return blocks, recoded


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

    def leading_runs(self, key_space: KeySpace, blocks: Sequence[BlockRef], *, as_sealed: bool = False) -> list[Entry | None]:
        """One per block: its entry if it is here and so is every asked block before it in its stripe. `as_sealed`: here means so."""
        entries = self.entries(key_space)
        get = entries.get
        found = [get(block[0]) for block in blocks]  # [0]: its hash; by name it takes twice as long
        if as_sealed:
            found = [entry if entry is not None and entry.readable_as_sealed else None for entry in found]
        if None in found:
            broken: set[StripeId] = set()
            for at, block in enumerate(blocks):
                if found[at] is None:
                    broken.add(block.stripe)
                elif block.stripe in broken:
                    found[at] = None
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

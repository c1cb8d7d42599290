"""The media of one simulated node: a memory and a disk of plain bytes that do what the core says, tear, fail and rot."""

from __future__ import annotations

import hashlib
from random import Random

from kvstore.core.copies import Copy
from kvstore.core.events import Event, Instruction
from kvstore.core.events.gets import AnswerRead, ReadFinished, ReadOutcome
from kvstore.core.events.moves import CopyExtent, CopyOutcome, ExtentCopied, ExtentRecoded, RecodeExtent, RecodeOutcome
from kvstore.core.events.regions import RecoveredRecord, RegionsRecovered, RegionWritten, WriteRegion
from kvstore.core.events.verification import ExtentsVerified, VerifyExtents, VerifyOutcome
from kvstore.core.extent import ALIGNMENT, Extent, Tier
from kvstore.core.recovery import recover_region


def checksum_of(data: bytes | memoryview) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


class Media:
    """Outlives the boots of its node. The host tier keeps its old bytes too: a node that served those would serve a valid payload."""

    def __init__(
        self,
        *,
        host_bytes: int,
        regions: int,
        region_bytes: int,
        rng: Random,
        gpu_bytes: int = 0,
        stepped_from: dict[int, int] | None = None,
    ) -> None:
        """`stepped_from`: of all media of a world, since nodes copy from each other."""
        self.host = bytearray(host_bytes)
        self.gpu = bytearray(gpu_bytes)
        self.disk = [bytearray(region_bytes) for _ in range(regions)]
        self._region_bytes = region_bytes
        self._rng = rng
        self._sums: dict[tuple, int] = {}
        self._made: dict[int, bytes] = {}
        """What a step-down has made, by its operation."""
        self.stepped_from: dict[int, int] = {} if stepped_from is None else stepped_from
        """Checksum of everything that was stepped down -> of what was put."""
        self.bad: set[int] = set()
        """Checksums of copies that were found bad, or whose medium failed."""
        self._rotten: set[tuple[Tier, int, int]] = set()
        """Bytes hit by a bit flip since they were written."""

    # --- bytes --------------------------------------------------------------------------------------------------------------------------

    def medium(self, extent: Extent) -> bytearray:
        return self._medium(extent.tier, extent.region)

    def _medium(self, tier: Tier, region: int) -> bytearray:
        return self.disk[region] if tier is Tier.SSD else self.gpu if tier is Tier.GPU else self.host

    def bytes_at(self, extent: Extent) -> bytes:
        return bytes(self.medium(extent)[extent.offset : extent.offset + extent.length])

    def holds(self, copy: Copy, checksum: int) -> bool:
        """The copy's bytes are what they should be, or have rotted since they were written. Computed anew only when they were touched."""
        key = (copy.tier, copy.region, copy.offset, copy.length)
        found = self._sums.get(key)
        if found is None:
            found = self._sums[key] = checksum_of(self.bytes_at(copy.extent))
        return found == checksum or self.is_rotten(copy.extent)

    def write(self, tier: Tier, region: int, offset: int, data: bytes | memoryview) -> None:
        self._touched(tier, region, offset, offset + len(data))
        medium = self._medium(tier, region)
        assert offset + len(data) <= len(medium)
        medium[offset : offset + len(data)] = data
        end = offset + len(data)
        self._rotten -= {spot for spot in self._rotten if spot[:2] == (tier, region) and offset <= spot[2] < end}

    def view(self, offset: int, length: int) -> memoryview:
        """Of the host tier, as a HostArena gives it; to be written at once."""
        self.write(Tier.HOST, 0, offset, self.host[offset : offset + length])
        return memoryview(self.host)[offset : offset + length]

    def _touched(self, tier: Tier, region: int, start: int, end: int) -> None:
        for key in [key for key in self._sums if key[2] < end and start < key[2] + key[3] and key[0] is tier and key[1] == region]:
            del self._sums[key]

    # --- rot ----------------------------------------------------------------------------------------------------------------------------

    def flip_bit(self) -> str:
        """Rot of any byte of a page in use or not: same size, silent. Says where."""
        rng = self._rng
        tier = Tier.HOST if not self.disk or rng.random() < 0.5 else Tier.SSD
        if self.gpu and rng.random() < 0.3:
            tier = Tier.GPU
        region = 0 if tier is not Tier.SSD else rng.randrange(len(self.disk))
        medium = self._medium(tier, region)
        at = rng.randrange(len(medium))
        medium[at] ^= 1 << rng.randrange(8)
        self._touched(tier, region, at, at + 1)
        self._rotten.add((tier, region, at))
        return f"{tier.name} {region} {at}"

    def lost(self, checksum: int) -> bool:
        return checksum in self.bad

    def is_rotten(self, extent: Extent) -> bool:
        if not self._rotten:
            return False
        start = extent.offset - (ALIGNMENT if extent.tier is Tier.SSD else 0)  # of the record's header
        end = extent.offset + extent.length
        return any(spot[:2] == (extent.tier, extent.region) and start <= spot[2] < end for spot in self._rotten)

    @property
    def has_rot_on_disk(self) -> bool:
        return any(tier is Tier.SSD for tier, _, _ in self._rotten)

    # --- doing what the core says -------------------------------------------------------------------------------------------------------

    def carry_out(self, instruction: Instruction, *, fails: bool) -> Event:
        """The outcome of an I/O instruction that ends now; when it `fails` it leaves a tear. Bytes that are neither what the core asked
        for nor rotten are a bug of the core."""
        match instruction:
            case VerifyExtents():
                outcomes = []
                for extent, checksum in zip(instruction.extents, instruction.checksums, strict=True):
                    good = checksum_of(self.bytes_at(extent)) == checksum
                    outcomes.append(VerifyOutcome.OK if good else VerifyOutcome.CORRUPT)
                    if fails and extent.tier is Tier.SSD:
                        outcomes[-1] = VerifyOutcome.IO_ERROR
                    if outcomes[-1] is not VerifyOutcome.OK:
                        self.bad.add(checksum)
                return ExtentsVerified(operation=instruction.operation, outcomes=tuple(outcomes))
            case CopyExtent():
                return self._copy(instruction, fails)
            case RecodeExtent():
                return self._recode(instruction, fails)
            case WriteRegion():
                self.put_down(instruction, torn=fails)
                return RegionWritten(operation=instruction.operation, ok=not fails)
            case AnswerRead():
                return ReadFinished(operation=instruction.operation, outcomes=self._read(instruction, fails))
        raise AssertionError(instruction)

    def _recode(self, instruction: RecodeExtent, fails: bool) -> ExtentRecoded:
        """A function of what is stepped down, as a codec's; some payloads cannot be."""
        operation, source = instruction.operation, instruction.source
        payload = self.bytes_at(source)
        if checksum_of(payload) != instruction.checksum:
            assert self.is_rotten(source), "what is stepped down holds foreign bytes"
            self.bad.add(instruction.checksum)
            return ExtentRecoded(operation=operation, outcome=RecodeOutcome.SOURCE_CORRUPT)
        if fails and source.tier is Tier.SSD:
            self.bad.add(instruction.checksum)
            return ExtentRecoded(operation=operation, outcome=RecodeOutcome.SOURCE_FAILED)
        if fails or len(payload) < 2 or payload[0] % 8 == 0:
            return ExtentRecoded(operation=operation, outcome=RecodeOutcome.REFUSED, reason="no_step_down")
        made = bytes(byte ^ instruction.rung for byte in payload[: (len(payload) + 1) // 2])
        self._made[operation] = made
        self.stepped_from[checksum_of(made)] = self.stepped_from.get(instruction.checksum, instruction.checksum)
        return ExtentRecoded(operation=operation, outcome=RecodeOutcome.OK, length=len(made), checksum=checksum_of(made))

    def drop(self, operation: int) -> None:
        del self._made[operation]

    def forget_made(self) -> None:
        """The process is gone."""
        self._made.clear()

    def _copy(self, instruction: CopyExtent, fails: bool) -> ExtentCopied:
        outcome = CopyOutcome.OK
        if instruction.recoded is not None:
            assert checksum_of(self._made[instruction.recoded]) == instruction.checksum
            outcome = CopyOutcome.TARGET_FAILED if fails else CopyOutcome.OK
        elif checksum_of(self.bytes_at(instruction.source)) != instruction.checksum:
            assert self.is_rotten(instruction.source), "a copy's source holds foreign bytes"
            outcome = CopyOutcome.SOURCE_CORRUPT
        elif fails:
            reads_disk = instruction.source.tier is Tier.SSD and self._rng.random() < 0.5
            outcome = CopyOutcome.SOURCE_FAILED if reads_disk else CopyOutcome.TARGET_FAILED
        if outcome in (CopyOutcome.OK, CopyOutcome.TARGET_FAILED):
            self.put_down(instruction, torn=outcome is CopyOutcome.TARGET_FAILED)
        else:
            self.bad.add(instruction.checksum)
        if instruction.recoded is not None:
            self.drop(instruction.recoded)
        return ExtentCopied(operation=instruction.operation, outcome=outcome)

    def _read(self, instruction: AnswerRead, fails: bool) -> tuple[ReadOutcome, ...]:
        outcomes = []
        for item in instruction.items:
            if item.extent is None:
                outcomes.append(ReadOutcome.UNREAD)
            elif checksum_of(self.bytes_at(item.extent)) != item.checksum:
                assert self.is_rotten(item.extent), "a read got foreign bytes"
                self.bad.add(item.checksum)
                outcomes.append(ReadOutcome.CORRUPT)
            elif fails and item.extent.tier is Tier.SSD:
                self.bad.add(item.checksum)
                outcomes.append(ReadOutcome.IO_ERROR)
            else:
                outcomes.append(ReadOutcome.OK)
        return tuple(outcomes)

    def put_down(self, instruction: CopyExtent | WriteRegion, *, torn: bool) -> None:
        """Of a torn write any part is down."""
        rng = self._rng
        if isinstance(instruction, WriteRegion):
            keep = len(instruction.data) if not torn else rng.choice((0, 512, 1024, len(instruction.data)))
            self.write(Tier.SSD, instruction.region, instruction.offset, instruction.data[:keep])
            return
        target = instruction.target
        payload = self.bytes_at(instruction.source) if instruction.recoded is None else self._made[instruction.recoded]
        header_too = not torn or rng.random() < 0.5
        keep = len(payload) if not torn or rng.random() < 0.3 else rng.randrange(len(payload) + 1)
        if header_too and instruction.header:
            self.write(Tier.SSD, target.region, target.offset - len(instruction.header), instruction.header)
        self.write(target.tier, target.region, target.offset, payload[:keep])

    def recover(self, *, unreadable: float = 0.0) -> RegionsRecovered:
        """What a restart finds on the disk. `unreadable`: chance of each region that its header cannot be read now."""
        found = []
        for number, region in enumerate(self.disk):
            readable = self._rng.random() >= unreadable

            def read(offset: int, length: int, region: bytearray = region, readable: bool = readable) -> bytes:
                return bytes(region[offset : offset + length]) if readable else b""

            def is_intact(record: RecoveredRecord, region: bytearray = region) -> bool:
                return checksum_of(bytes(region[record.offset : record.offset + record.length])) == record.checksum

            recovered = recover_region(read, is_intact, region=number, region_bytes=self._region_bytes)
            if recovered is not None:
                found.append(recovered)
        return RegionsRecovered(regions=tuple(found))

"""The four sections of a payload's body: where they lie, what packs them, and the way back."""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from kvstore.codec import entropy
from kvstore.codec.block_format import DTYPE_BYTES, BlockHeader

Sections = list[np.ndarray]
"""exact, keys, values and side, uint8, 1-D."""


def places(room: np.ndarray, header: BlockHeader) -> Sections:
    """Where in `room` the sections lie when none is packed."""
    sizes = header.unpacked_section_bytes
    starts = [header.header_bytes + sum(sizes[:index]) for index in range(4)]
    return [room[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def write_sections(
    room: np.ndarray, header: BlockHeader, sections: Sections, *, packable: Set[int]
) -> tuple[int, tuple[int, int, int, int]]:
    """Puts the sections (perhaps there already: `places`) behind the header's room, those of `packable` packed where that pays: (bits of
    the packed ones, their lengths), as a header says them."""
    packed = 0
    lengths = []
    end = header.header_bytes
    for index, section in enumerate(sections):
        frame = None
        if index in packable and section.size:
            planes = entropy.to_planes(section.view(f"u{DTYPE_BYTES[header.dtype]}")) if index == 0 else section
            frame = entropy.pack(planes, body_bytes=header.unpacked_bytes)
        packed |= (frame is not None) << index
        stored = section if frame is None else np.frombuffer(frame, np.uint8)
        target = room[end : end + stored.size]
        if stored.size and stored.ctypes.data != target.ctypes.data:
            target[:] = stored
        lengths.append(stored.size)
        end += stored.size
    return packed, (lengths[0], lengths[1], lengths[2], lengths[3])


def read_sections(payload: memoryview, header: BlockHeader) -> Sections:
    """The sections as read-only arrays; no copy of those stored plain. Raises CorruptPayload for one that does not unpack."""
    sections = []
    start = header.header_bytes
    for index, (stored, size) in enumerate(zip(header.section_bytes, header.unpacked_section_bytes, strict=True)):
        data = payload[start : start + stored].toreadonly()
        start += stored
        if not header.packed >> index & 1:
            sections.append(np.frombuffer(data, np.uint8) if size else np.empty(0, np.uint8))
            continue
        section = np.frombuffer(entropy.unpack(data, size=size), np.uint8)
        if index == 0:
            section = entropy.from_planes(section, width=DTYPE_BYTES[header.dtype])
        sections.append(section)
    return sections

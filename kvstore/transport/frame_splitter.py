"""From bytes as they come to whole frames. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from kvstore.transport.frames import HEADER_BYTES, BadFrame, Header


class FrameSplitter:
    """Of one stream. Holds back what is not a whole frame yet, `most_bytes` and a header at most."""

    def __init__(self, *, most_bytes: int) -> None:
        """`most_bytes`: behind a header."""
        self._most_bytes = most_bytes
        self._rest = b""

    @property
    def is_halfway(self) -> bool:
        """A frame has begun and not ended."""
        return bool(self._rest)

    def take(self, data: bytes) -> Iterator[tuple[Header, bytes]]:
        """The frames that end in `data`, each header with its body. To be gone through whole. Raises BadFrame, before the body of a frame
        that is too long has come."""
        if self._rest:
            data = self._rest + data
        at, end = 0, len(data)
        while end - at >= HEADER_BYTES:
            body_at = at + HEADER_BYTES
            header = Header.unpack(data[at:body_at])
            if header.length > self._most_bytes:
                raise BadFrame("bad_length", f"{header.kind.name} of {header.length} bytes; at most {self._most_bytes}")
            if body_at + header.length > end:
                break
            at = body_at + header.length
            yield header, data[body_at:at]
        self._rest = data[at:]

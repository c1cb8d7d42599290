"""Layout: everything that decides what the numbers of a block mean, and its fingerprint."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal, get_args

from kvstore.errors import ConfigError
from kvstore.ids import LayoutFingerprint

KvDtype = Literal["bfloat16", "float16", "float32"]

_DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
_FINGERPRINT_TAG = b"larder.layout.1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Two blocks of equal layout can be read by the same code; of unequal layout, never. Raises ConfigError on impossible numbers."""

    layers: int
    kv_heads: int
    """All heads of the model, before a parallel split."""
    head_dim: int
    dtype: KvDtype
    block_tokens: int = 32
    rope: tuple[tuple[str, str], ...] = ()
    """Parameters of the position encoding as text, sorted by name: keys are stored after it was applied."""
    tensor_parallel: int = 1
    """How many ways the heads are split; a block holds kv_heads / tensor_parallel of them."""
    precision: str = ""
    """What the codec makes of a block's numbers, as text (codec/precision.py); empty: not said."""

    def __post_init__(self) -> None:
        numbers = (self.layers, self.kv_heads, self.head_dim, self.block_tokens, self.tensor_parallel)
        if any(not 0 < number < 1 << 20 for number in numbers):
            raise ConfigError(f"layout: every count must be at least 1 and below 2^20: {self}")
        if self.kv_heads % self.tensor_parallel:
            raise ConfigError(f"layout: tensor_parallel must divide kv_heads: {self}")
        if self.dtype not in get_args(KvDtype):
            raise ConfigError(f"layout: dtype must be one of {', '.join(get_args(KvDtype))}, not {self.dtype!r}")
        if list(self.rope) != sorted(self.rope):
            raise ConfigError("layout: rope parameters must be sorted by name")

    @property
    def fingerprint(self) -> LayoutFingerprint:
        """32 bytes; the same in every process and version. Cost: one SHA-256 over some 200 bytes."""
        fields = [str(n) for n in (self.layers, self.kv_heads, self.head_dim, self.block_tokens, self.tensor_parallel)]
        fields.append(self.dtype)
        fields += [part for pair in self.rope for part in pair]
        fields += [self.precision] if self.precision else []  # rope makes an even number of fields, so one more is no rope
        digest = hashlib.sha256(_FINGERPRINT_TAG)
        for field in fields:
            raw = field.encode()
            digest.update(len(raw).to_bytes(4, "little"))
            digest.update(raw)
        return LayoutFingerprint(digest.digest())

    @property
    def block_elements(self) -> int:
        return self.layers * 2 * (self.kv_heads // self.tensor_parallel) * self.block_tokens * self.head_dim

    @property
    def block_bytes(self) -> int:
        """Unencoded."""
        return self.block_elements * _DTYPE_BYTES[self.dtype]

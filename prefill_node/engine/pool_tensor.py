"""The memory of the block pool: one tensor on the device, each block of it one KV block as the codec wants it."""

from __future__ import annotations

import math
import os

import numpy as np
import torch

from kvstore.core.layout import Layout
from kvstore.errors import ConfigError
from kvstore.units import GIB

_TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class PoolTensor:
    """`kv`: [blocks, layers, 2, kv_heads, block_tokens, head_dim] in the layout's dtype; index 2 is 0 = K after RoPE, 1 = V.

    Raises ConfigError when the device has no such memory.
    """

    def __init__(self, layout: Layout, *, blocks: int, device: torch.device) -> None:
        self.layout = layout
        shape = (blocks, layout.layers, 2, layout.kv_heads, layout.block_tokens, layout.head_dim)
        self.kv = _zeros(shape, _TORCH[layout.dtype], device)
        self.on_host = self.kv.device.type == "cpu"
        self._array = self._as_numpy(self.kv) if self.on_host else None
        self._staged: dict[int, np.ndarray] = {}

    @property
    def array(self) -> np.ndarray:
        """The whole pool as numpy (bf16 as uint16 bits), sharing memory. Host pools only."""
        assert self._array is not None
        return self._array

    def block(self, block_id: int) -> np.ndarray:
        """[layers, 2, kv_heads, block_tokens, head_dim], bf16 as uint16 bits. On the host it is the pool's own memory; otherwise a copy,
        which `write_back` brings to the device."""
        if self._array is not None:
            view: np.ndarray = self._array[block_id]
            return view
        staged = self._as_numpy(self.kv[block_id].cpu())
        self._staged[block_id] = staged
        return staged

    def write_back(self, block_id: int) -> None:
        """What was written to `block(block_id)` is in the pool after this. Free on the host."""
        staged = self._staged.pop(block_id, None)
        if staged is not None:
            bits = torch.from_numpy(staged.view(np.int16) if staged.dtype == np.uint16 else staged)
            self.kv[block_id].copy_(bits.view(self.kv.dtype))

    @staticmethod
    def _as_numpy(tensor: torch.Tensor) -> np.ndarray:
        if tensor.dtype == torch.bfloat16:
            bits: np.ndarray = tensor.view(torch.int16).numpy().view(np.uint16)
            return bits
        plain: np.ndarray = tensor.numpy()
        return plain


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    wanted = math.prod(shape) * dtype.itemsize
    refusal = f"a pool of {shape[0]} blocks takes {wanted / GIB:.1f} GiB, more than {device} has; set pool_blocks lower"
    # Linux hands out more than it has, and ends the process when that is touched.
    if device.type == "cpu" and wanted > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
        raise ConfigError(refusal)
    try:
        return torch.zeros(shape, dtype=dtype, device=device)
    except RuntimeError as error:
        raise ConfigError(f"{refusal}: {str(error).splitlines()[0]}") from None

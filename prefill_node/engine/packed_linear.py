"""The weights of a linear layer as the CPU kernel wants them: in the model's dtype, in panels.

Each output is one chain of fused multiply-adds in the order of the inputs, whatever the number of rows: so a row's bits depend on the
row alone, and a small batch costs what it reads (a padded tile costs what it computes). Measured on 2 AVX2 cores without bf16
instructions, SmolLM2-135M: torch's bf16 product of more than one row runs at 8 GFLOP/s a core, this one at 60 to 90 (MKL fp32: 75).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from prefill_node.engine.product_ir import PANEL, TILE_ROWS

_CACHE_BYTES = 220_000
"""Of activations that one row block may hold: they should stay in half a 512 KiB L2 cache while all weights pass by."""


_ALIGNED = 64
"""Elements: whole cache lines."""


class WeightRoom:
    """One piece of memory for all packed weights, in huge pages where the system gives them (`model/offline.py`): small tensors would lie
    in small pages that others left behind, and a step at batch 1 would cost a sixth more."""

    def __init__(self, linears: Sequence[Sequence[nn.Linear]]) -> None:
        """For what `PackedLinear.of` will make of each of these. All have one dtype."""
        sizes = [_panels(sum(part.out_features for part in parts)) * PANEL * parts[0].in_features for parts in linears]
        self._memory = torch.empty(sum(size + _ALIGNED for size in sizes), dtype=linears[0][0].weight.dtype)
        self._used = 0

    def take(self, *shape: int) -> torch.Tensor:
        """Not filled."""
        begin, size = self._used, math.prod(shape)
        self._used += -(-size // _ALIGNED) * _ALIGNED
        return self._memory[begin : begin + size].view(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLinear:
    inputs: int
    outputs: int
    weight: torch.Tensor
    """[panels, inputs, PANEL], zeros behind the last output"""
    bias: torch.Tensor | None
    """float32 [panels * PANEL]"""

    @classmethod
    def of(cls, linears: Sequence[nn.Linear], room: WeightRoom) -> PackedLinear:
        """One layer from one or more of the same input, their outputs side by side."""
        weight = torch.cat([linear.weight.detach() for linear in linears])
        outputs, inputs = weight.shape
        full = torch.zeros(_panels(outputs) * PANEL, inputs, dtype=weight.dtype)
        full[:outputs] = weight
        bias = None
        if any(linear.bias is not None for linear in linears):
            bias = torch.zeros(len(full))
            bias[:outputs] = torch.cat(
                [linear.bias.detach().float() if linear.bias is not None else torch.zeros(linear.out_features) for linear in linears]
            )
        packed = room.take(_panels(outputs), inputs, PANEL)
        packed.copy_(full.view(-1, PANEL, inputs).transpose(1, 2))
        return cls(inputs=inputs, outputs=outputs, weight=packed, bias=bias)

    @property
    def panels(self) -> int:
        return self.weight.shape[0]

    @property
    def width(self) -> int:
        """Of a row of the output, in elements."""
        return self.panels * PANEL

    @property
    def row_block(self) -> int:
        """Rows that go through all panels before the next ones."""
        return max(TILE_ROWS, _CACHE_BYTES // (self.inputs * 4) // TILE_ROWS * TILE_ROWS)

    def panels_of_item(self, threads: int) -> int:
        """Enough items for every thread to have several, few enough that claiming them is nothing."""
        return max(1, self.panels // (8 * threads))


def _panels(outputs: int) -> int:
    return -(-outputs // PANEL)

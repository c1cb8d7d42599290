"""Linear layers on the CPU kernels: weights stay in the model's dtype, activations are float32.

Each output is one chain of fused multiply-adds in the order of the inputs, whatever the number of rows: so a row's bits depend on the
row alone, and a small batch costs what it reads (a padded tile costs what it computes). Measured on 2 AVX2 cores without bf16
instructions, SmolLM2-135M: torch's bf16 product of more than one row runs at 8 GFLOP/s a core, this one at 60 to 90 (MKL fp32: 75).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from prefill_node.engine.kernels import LINEAR, PANEL
from prefill_node.engine.team import Team

_CACHE_BYTES = 220_000
"""Of activations that one row block may hold: they should stay in half a 512 KiB L2 cache while all weights pass by."""
_TILE_ROWS = 6


class PackedLinear(nn.Module):
    """Stands in for an nn.Linear. float32 [..., in] -> float32 [..., out]; any leading shape, contiguous or not."""

    def __init__(self, linears: Sequence[nn.Linear], team: Team) -> None:
        """One layer from one or more of the same input, their outputs side by side."""
        super().__init__()
        weight = torch.cat([linear.weight.detach() for linear in linears])
        biases = [linear.bias.detach() if linear.bias is not None else torch.zeros(linear.out_features) for linear in linears]
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        self._team = team
        self._panels = -(-self.out_features // PANEL)
        full = torch.zeros(self._panels * PANEL, self.in_features, dtype=weight.dtype)
        full[: self.out_features] = weight
        self._packed = full.view(self._panels, PANEL, self.in_features).transpose(1, 2).contiguous()
        self._bias = torch.cat(biases).float() if any(linear.bias is not None for linear in linears) else None
        self._row_block = max(_TILE_ROWS, _CACHE_BYTES // (self.in_features * 4) // _TILE_ROWS * _TILE_ROWS)
        self._width = self._panels * PANEL
        self._is_bf16 = int(weight.dtype == torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        count = rows.shape[0]
        out = torch.empty(count, self._width)
        # Enough items for every thread to have several, few enough that claiming them is nothing.
        group = max(1, self._panels // (8 * self._team.threads)) if count <= self._row_block else max(1, self._panels // 4)
        items = -(-count // self._row_block) * -(-self._panels // group)
        self._team.run(
            LINEAR,
            (
                rows.data_ptr(),
                self.in_features,
                self._packed.data_ptr(),
                self._panels,
                out.data_ptr(),
                self._width,
                count,
                self._is_bf16,
                self._row_block,
                group,
            ),
            items=items,
        )
        if self._width != self.out_features:
            out = out[:, : self.out_features]
        if self._bias is not None:
            out = out + self._bias
        return out.reshape(*x.shape[:-1], self.out_features)

"""The kernel of linear layers. numba caches it by this file's time stamp: when an _ir.py under it changes, touch this one too."""

from __future__ import annotations

from prefill_node.engine.product_ir import PANEL, make_panel
from prefill_node.engine.record import ARGUMENT, ROWS
from prefill_node.engine.row_ir import add_to
from prefill_node.engine.scalar_ir import field

_panel_bf16, _panel_f32 = make_panel(bf16=True), make_panel(bf16=False)


def linear_item(op: int, item: int) -> None:
    """A block of rows through a group of neighbouring panels.

    Fields: x, x stride, k, weight panels, their number, out, out stride, is_bf16, rows of a block, panels of a group, bias (0: none).
    """
    rows = field(op, ROWS)
    x, x_stride, k, w, panels = (
        field(op, ARGUMENT),
        field(op, ARGUMENT + 1),
        field(op, ARGUMENT + 2),
        field(op, ARGUMENT + 3),
        field(op, ARGUMENT + 4),
    )
    out, out_stride, is_bf16 = field(op, ARGUMENT + 5), field(op, ARGUMENT + 6), field(op, ARGUMENT + 7)
    block, group, bias = field(op, ARGUMENT + 8), field(op, ARGUMENT + 9), field(op, ARGUMENT + 10)
    groups = (panels + group - 1) // group
    first_row, first_panel = item // groups * block, item % groups * group
    count = min(block, rows - first_row)
    x, out = x + first_row * x_stride * 4, out + first_row * out_stride * 4
    for panel in range(first_panel, min(panels, first_panel + group)):
        to = out + panel * PANEL * 4
        if is_bf16:
            _panel_bf16(x, x_stride, w + panel * k * PANEL * 2, k, to, out_stride, count)
        else:
            _panel_f32(x, x_stride, w + panel * k * PANEL * 4, k, to, out_stride, count)
        if bias:
            for row in range(count):
                add_to(to + row * out_stride * 4, bias + panel * PANEL * 4, PANEL)

"""The record of one kernel operation: int64 fields that its kernel reads by address, so a whole forward pass is one array of them."""

from __future__ import annotations

from typing import Any

import numpy as np

RECORD = 24
"""Fields of a record."""
FUNCTION, ITEMS, ROWS = 0, 1, 2
"""The address of its kernel, void(record, item); how often that is to be called, with items from 0; rows of the batch it works on."""
ARGUMENT = 3
"""The first of the kernel's own fields; their order is in the kernel's docstring."""

ROWS_OF_ITEM = 16
"""Of the kernels that work row by row."""


def record(function: int, *arguments: int) -> np.ndarray:
    """int64 [RECORD]; ITEMS and ROWS are filled in for each pass."""
    fields = np.zeros(RECORD, np.int64)
    fields[FUNCTION] = function
    fields[ARGUMENT : ARGUMENT + len(arguments)] = arguments
    return fields


def float_bits(value: float) -> int:
    """A float32 as a field; kernels read it by `load_f32` at the field's address."""
    return int(np.float32(value).view(np.int32))


def address(array: Any) -> int:
    """Of the memory of a numpy array or a torch tensor, or 0 for none; whoever keeps the record keeps that too."""
    if array is None:
        return 0
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr())

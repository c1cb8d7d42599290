"""How a function becomes machine code: compiled on its own, or as a part of what calls it."""

# mypy: disallow-untyped-defs=False

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

Kernel = Callable[..., Any]


def compiled(function: Kernel) -> Kernel:
    """`function` as a GIL-free kernel, cached on disk beside this file or in the user's cache folder.

    Where neither can be written (a read-only installation without a home) it is compiled anew in each process.
    """
    try:
        return numba.njit(nogil=True, cache=True)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # numba: "no locator available"
        return numba.njit(nogil=True)(function)  # type: ignore[no-any-return]


def inlined(function: Kernel) -> Kernel:
    """A part of a kernel. Without forced inlining its calls, some thirty arguments each, cost ten times its work."""
    return numba.njit(forceinline=True)(function)  # type: ignore[no-any-return]

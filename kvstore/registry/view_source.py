"""Where a view comes from, for everyone who only reads it."""

from __future__ import annotations

from typing import Protocol

from kvstore.core.view import View


class ViewSource(Protocol):
    @property
    def view(self) -> View:
        """The last view known; its epoch only grows. Reading it costs nothing and never waits."""
        ...


class StaticViews:
    """A view that changes only when told to: tests, and clusters without a registry."""

    def __init__(self, view: View) -> None:
        self._view = view

    @property
    def view(self) -> View:
        return self._view

    def replace(self, view: View) -> None:
        assert view.epoch > self._view.epoch, "an epoch only grows"
        self._view = view

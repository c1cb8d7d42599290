"""Where a view comes from, for everyone who only reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvstore.core.view import Member, View
from kvstore.ids import StripeId
from kvstore.units import Nanos


class ViewSource(Protocol):
    @property
    def view(self) -> View:
        """The last view known; its epoch only grows. Reading it costs nothing and never waits."""
        ...


class OwnMember(Protocol):
    """This process as a member: what a store itself brings about of its standing."""

    @property
    def member(self) -> Member | None: ...

    async def drain(self) -> None:
        """ACTIVE -> DRAINING. Raises RegistryAway, StaleView."""
        ...

    async def take_over(self, takeover: float) -> None:
        """Raises RegistryAway, StaleView."""
        ...

    async def announce_hot(self, stripes: Mapping[StripeId, int], *, ttl: Nanos) -> None:
        """In the view when this returns, or soon after. Raises RegistryAway, StaleView."""
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

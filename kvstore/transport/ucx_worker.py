"""UCX on one event loop: tagged messages straight from and into memory, whatever wire UCX finds.

The only file that knows ucxx. Which wires there are is UCX's own choice (UCX_TLS, UCX_NET_DEVICES). Memory of a CUDA device is as good as
the host's: UCX registers what it is given at its first use, keeps the registration, and moves it without a copy in the host where the
network card can.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

from kvstore.errors import Unavailable
from kvstore.transport.stream import StoodStill, Stream, StreamCut
from kvstore.units import Nanos, to_milliseconds, to_seconds

_STEPS_OF_A_TURN = 64
"""Of progress, without a pause: then others on the loop have their turn."""
_SETTINGS = {"TCP_TX_SEG_SIZE": "256k", "TCP_RX_SEG_SIZE": "256k"}
"""Where the environment does not say otherwise. UCX's own 8 KiB a segment costs half as much CPU again (LOG.md)."""
_FORMAT_BITS = 0x0F
"""Of the first byte of an address: the number of its format. UCX ends the process over one that it does not know."""
_END_MARKS = b"\xff" * 4096
"""Put behind an address, whose length UCX is not told: where it reads past the end of a bent one, it finds marks of an end."""
_CLOSE_NS = 1_000_000_000


def ucx_obstacle() -> str | None:
    """Why UCX cannot be used in this process; None: it can. Imports nothing."""
    return None if importlib.util.find_spec("ucxx") is not None else "ucxx is not installed (extra ucx)"


class UcxFailed(StreamCut):
    """A transfer ended with an error of UCX."""


class UcxEndpoint:
    """One way to one other worker. Every buffer is kept until UCX has let go of it, whatever becomes of its owner."""

    def __init__(self, worker: UcxWorker, endpoint: Any) -> None:
        self._worker = worker
        self._endpoint = endpoint

    def send(self, payload: Any, tag: int) -> asyncio.Future[None]:
        """`payload`: a buffer, or an array on a CUDA device; it must not change before the future is done. Raises UcxFailed, as the future
        does."""
        ucx = self._worker.ucx
        return self._worker.follow(lambda: self._open().tag_send(ucx.Array(payload), ucx.Tag(tag)), payload)

    def receive(self, into: Any, tag: int) -> asyncio.Future[None]:
        """Done when a message of at most this length has come with this tag."""
        ucx = self._worker.ucx
        return self._worker.follow(lambda: self._open().tag_recv(ucx.Array(into), ucx.Tag(tag), ucx.TagMaskFull), into)

    def close(self) -> None:
        """What is under way ends with UcxFailed; the memory is left alone after that."""
        if self._endpoint is not None:
            endpoint, self._endpoint = self._endpoint, None
            endpoint.close_blocking(period=_CLOSE_NS, max_attempts=1)
            self._worker.closed(self)

    def _open(self) -> Any:
        if self._endpoint is None:
            raise UcxFailed("the endpoint was closed")
        return self._endpoint


class UcxWorker:
    """Belongs to one event loop, which moves its messages: no thread, no polling."""

    def __init__(self, ucx: _Ucx, *, net_devices: str | None) -> None:
        self.ucx = ucx
        settings = dict(_SETTINGS) if net_devices is None else _SETTINGS | {"NET_DEVICES": net_devices}
        settings = {key: value for key, value in settings.items() if f"UCX_{key}" not in os.environ}
        self._loop = asyncio.get_running_loop()
        self._pending: list[tuple[Any, asyncio.Future[None], object]] = []
        self._look_is_due = False
        self._endpoints: set[UcxEndpoint] = set()
        self._is_closed = False
        try:
            context = ucx.libucxx.UCXContext(settings, feature_flags=(ucx.libucxx.Feature.TAG, ucx.libucxx.Feature.WAKEUP))
            self._worker = ucx.libucxx.UCXWorker(context, enable_delayed_submission=False, enable_python_future=False)
            self._worker.init_blocking_progress_mode()
        except ucx.UCXError as error:
            raise Unavailable(f"UCX does not start: {error}") from None
        self.address = bytes(self._worker.address)
        self._wakes = self._worker.epoll_file_descriptor
        self._loop.add_reader(self._wakes, self._turn)
        self._turn()

    def connect(self, address: bytes) -> UcxEndpoint:
        """Raises UcxFailed, also for an address that is none: what of it would end the process is looked at before UCX sees it (LOG.md)."""
        if self._is_closed:
            raise UcxFailed("the worker was closed")
        if not address or (address[0] ^ self.address[0]) & _FORMAT_BITS:
            raise UcxFailed("an address of another format than this UCX has")
        libucxx = self.ucx.libucxx
        try:
            there = libucxx.UCXAddress.create_from_buffer(address + _END_MARKS)
            endpoint = libucxx.UCXEndpoint.create_from_worker_address(self._worker, there, True)
        except self.ucx.UCXError as error:
            raise UcxFailed(f"no way by UCX: {error}") from None
        made = UcxEndpoint(self, endpoint)
        self._endpoints.add(made)
        return made

    def closed(self, endpoint: UcxEndpoint) -> None:
        self._endpoints.discard(endpoint)
        self.look()

    def follow(self, start: Any, memory: object) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self._loop.create_future()
        try:
            request = start()
        except self.ucx.UCXError as error:
            raise UcxFailed(str(error)) from None
        self._pending.append((request, future, memory))
        self.look()
        return future

    def look(self) -> None:
        """At what has moved, in the next turn of the loop."""
        if not self._look_is_due:
            self._look_is_due = True
            self._loop.call_soon(self._turn)

    def close(self) -> None:
        if self._is_closed:
            return
        for endpoint in list(self._endpoints):
            endpoint.close()
        self._turn()
        self._is_closed = True
        self._loop.remove_reader(self._wakes)
        # ucxx receives what nobody asked for before it lets a worker go, and would wait for ever for a sender that is gone.
        while self._worker.tag_probe(self.ucx.Tag(0), self.ucx.AnyTag, remove=True).matched:
            pass
        del self._worker

    def _turn(self) -> None:
        self._look_is_due = False
        if self._is_closed:
            return
        for _ in range(_STEPS_OF_A_TURN):
            # Armed, it wakes the loop for what comes next; it refuses while something waits.
            if not self._worker.progress_once() and self._worker.arm():
                break
        else:
            self.look()
        if self._pending:
            self._settle()

    def _settle(self) -> None:
        waiting = []
        for request, future, memory in self._pending:
            if not request.completed:
                waiting.append((request, future, memory))
            elif not future.done():
                try:
                    request.check_error()
                except self.ucx.UCXError as error:
                    future.set_exception(UcxFailed(str(error)))
                    future.exception()  # whoever started it may have gone
                else:
                    future.set_result(None)
        self._pending = waiting


class _Ucx:
    """ucxx, imported: 0.8 s of CPU, and only in a process that uses it."""

    def __init__(self) -> None:
        # Set before UCX reads its environment: other UCX_ variables there are no business of ours.
        os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
        try:
            ucxx = importlib.import_module("ucxx")
            self.Array = importlib.import_module("ucxx._lib.arr").Array
        except (ImportError, OSError, RuntimeError) as error:
            raise Unavailable(f"ucxx cannot be loaded: {error}") from None
        self.libucxx = ucxx.libucxx
        self.UCXError = ucxx.exceptions.UCXError
        self.Tag = ucxx.types.Tag
        self.TagMaskFull = ucxx.types.TagMaskFull
        self.AnyTag = ucxx.types.TagMask(0)


async def open_worker(*, net_devices: str | None = None) -> UcxWorker:
    """`net_devices`: as UCX_NET_DEVICES, which goes before it; None: all. Raises Unavailable."""
    ucx = await asyncio.to_thread(_Ucx)
    return UcxWorker(ucx, net_devices=net_devices)


async def moved(transfers: Sequence[asyncio.Future[None]], *, stream: Stream, idle: Nanos) -> None:
    """Returns when all are done. Raises UcxFailed; StoodStill when none became done for so long; StreamCut when the other side closed
    the stream that goes with them, which UCX would notice late."""
    end: asyncio.Future[None] | None = None
    try:
        for transfer in transfers:
            if not transfer.done():
                if end is None:
                    end = asyncio.ensure_future(stream.until_end())
                await asyncio.wait((transfer, end), timeout=to_seconds(idle), return_when=asyncio.FIRST_COMPLETED)
                if not transfer.done():
                    if end.done():
                        raise StreamCut("the other side closed the connection")
                    raise StoodStill(f"nothing moved for {to_milliseconds(idle):.0f} ms")
            transfer.result()
    finally:
        if end is not None:
            end.cancel()
            await asyncio.gather(end, return_exceptions=True)

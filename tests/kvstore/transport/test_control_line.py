"""The line to a node: questions overtake each other, what nobody waits for goes along, and nothing waits for ever."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from kvstore.errors import LarderError, Unavailable
from kvstore.rpc.store_stub import DeadlinePassed
from kvstore.transport.control_line import ControlLine
from kvstore.transport.frame_splitter import FrameSplitter
from kvstore.transport.frames import BadFrame, FrameKind, Header
from kvstore.transport.stream import Stream
from kvstore.transport.stream_pool import MOST_REQUESTS, Connection
from kvstore.units import Nanos, milliseconds, seconds

LONG = seconds(60)


class Node:
    """The other end, under a test's hand."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._frames = FrameSplitter(most_bytes=100)
        self.heard: list[tuple[FrameKind, int, bytes]] = []

    async def hear(self, count: int) -> list[tuple[FrameKind, int, bytes]]:
        """All that came so far, when it is `count` frames."""
        while len(self.heard) < count:
            data = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.sock, 1000), 30)
            assert data
            self.heard += [(header.kind, header.number, body) for header, body in self._frames.take(data)]
        return self.heard

    async def answer(self, number: int, body: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, Header(FrameKind.ANSWER, number, len(body)).pack() + body)


Answers = asyncio.Queue[bytes | LarderError]


def on_a_line(test: Callable[[ControlLine, Node, Callable[[FrameKind, bytes, Nanos], None], Answers], Awaitable[None]]) -> None:
    async def run() -> None:
        here, there = socket.socketpair()
        there.setblocking(False)
        with there:
            line = ControlLine(Connection(Stream(here), b"n" * 16))
            answers: Answers = asyncio.Queue()

            def ask(kind: FrameKind, body: bytes, timeout: Nanos) -> None:
                line.ask(kind, body, timeout=timeout, answered=answers.put_nowait)

            try:
                await test(line, Node(there), ask, answers)
            finally:
                line.close()

    asyncio.run(run())


def test_a_later_question_may_be_answered_first() -> None:
    async def test(line: ControlLine, node: Node, ask: Callable[[FrameKind, bytes, Nanos], None], answers: Answers) -> None:
        ask(FrameKind.RESERVE, b"waits for room", LONG)
        ask(FrameKind.ACQUIRE, b"is known at once", LONG)
        heard = await node.hear(3)
        assert heard == [
            (FrameKind.CONTROL, 0, b""),
            (FrameKind.RESERVE, 1, b"waits for room"),
            (FrameKind.ACQUIRE, 2, b"is known at once"),
        ]
        await node.answer(2, b"second")
        assert await answers.get() == b"second"
        await node.answer(1, b"first")
        assert await answers.get() == b"first"

    on_a_line(test)


def test_a_post_goes_behind_the_next_question_and_without_one_alone_and_with_the_end_of_the_line() -> None:
    async def test(line: ControlLine, node: Node, ask: Callable[[FrameKind, bytes, Nanos], None], answers: Answers) -> None:
        line.post(FrameKind.RELEASE, b"one")
        ask(FrameKind.ACQUIRE, b"", LONG)
        assert (await node.hear(3))[1:] == [(FrameKind.ACQUIRE, 1, b""), (FrameKind.RELEASE, 2, b"one")]
        line.post(FrameKind.RELEASE, b"two")
        assert (await node.hear(4))[3] == (FrameKind.RELEASE, 3, b"two")
        line.post(FrameKind.RELEASE, b"three")
        line.close()
        assert (await node.hear(5))[4] == (FrameKind.RELEASE, 4, b"three")

    on_a_line(test)


def test_after_a_deadline_the_line_takes_nothing_new_and_the_others_are_still_answered() -> None:
    async def test(line: ControlLine, node: Node, ask: Callable[[FrameKind, bytes, Nanos], None], answers: Answers) -> None:
        ask(FrameKind.COMMIT, b"", LONG)
        ask(FrameKind.ACQUIRE, b"", milliseconds(5))
        assert isinstance(await answers.get(), DeadlinePassed)
        assert not line.usable
        await node.hear(3)
        await node.answer(2, b"too late")
        await node.answer(1, b"in time")
        assert await answers.get() == b"in time"
        with pytest.raises(AssertionError):
            await node.hear(4)  # the end: nothing more is under way

    on_a_line(test)


def test_a_bug_behind_one_answer_is_an_error_to_its_caller_and_costs_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def test(line: ControlLine, node: Node, ask: Callable[[FrameKind, bytes, Nanos], None], answers: Answers) -> None:
        def trips(found: bytes | LarderError) -> None:
            if isinstance(found, bytes):
                raise KeyError(found)
            answers.put_nowait(found)

        line.ask(FrameKind.ACQUIRE, b"", timeout=LONG, answered=trips)
        ask(FrameKind.ACQUIRE, b"", LONG)
        await node.hear(3)
        both = b"".join(Header(FrameKind.ANSWER, number, 3).pack() + b"yes" for number in (1, 2))
        await asyncio.get_running_loop().sock_sendall(node.sock, both)
        assert isinstance(await answers.get(), Unavailable)
        assert await answers.get() == b"yes"
        assert line.usable

    on_a_line(test)
    assert "KeyError" in caplog.text


def test_a_line_whose_numbers_run_out_takes_nothing_new_and_the_others_are_still_answered() -> None:
    async def test(line: ControlLine, node: Node, ask: Callable[[FrameKind, bytes, Nanos], None], answers: Answers) -> None:
        line._connection.number = MOST_REQUESTS - 1
        assert line.usable
        ask(FrameKind.ACQUIRE, b"", LONG)
        assert not line.usable
        line.retire()
        assert not line.closed
        await node.hear(2)
        await node.answer(MOST_REQUESTS - 1, b"last")
        assert await answers.get() == b"last"
        assert line.closed

    on_a_line(test)


@pytest.mark.parametrize("garbage", [b"", bytes(100), Header(FrameKind.PAYLOAD, 1, 0).pack()])
def test_an_end_or_garbage_answers_all_that_are_under_way(garbage: bytes) -> None:
    async def test(line: ControlLine, node: Node, ask: Callable[[FrameKind, bytes, Nanos], None], answers: Answers) -> None:
        ask(FrameKind.ACQUIRE, b"", LONG)
        ask(FrameKind.COMMIT, b"", LONG)
        await node.hear(3)
        node.sock.send(garbage) if garbage else node.sock.shutdown(socket.SHUT_RDWR)
        for _ in range(2):
            answer = await answers.get()
            assert isinstance(answer, Unavailable)
            assert not isinstance(answer, DeadlinePassed)
        assert line.closed
        ask(FrameKind.ACQUIRE, b"", LONG)
        assert isinstance(answers.get_nowait(), Unavailable)

    on_a_line(test)


def test_frames_are_whole_however_the_bytes_come() -> None:
    sent = [(Header(FrameKind.ANSWER, number, number * 7), bytes(number * 7)) for number in range(5)]
    data = b"".join(header.pack() + body for header, body in sent)
    for step in (1, 3, 40, len(data)):
        splitter = FrameSplitter(most_bytes=28)
        assert [frame for at in range(0, len(data), step) for frame in splitter.take(data[at : at + step])] == sent
        assert not splitter.is_halfway
    with pytest.raises(BadFrame):
        list(FrameSplitter(most_bytes=27).take(data))

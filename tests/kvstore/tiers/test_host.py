import os
import subprocess
import sys

import pytest

from kvstore.errors import ConfigError
from kvstore.tiers.host import HostArena, memory_of_this_machine
from kvstore.tiers.tier import TierFailure
from kvstore.units import MIB, Bytes


@pytest.fixture
def arena():
    arena = HostArena(Bytes(MIB))
    yield arena
    arena.close()


def test_what_is_written_is_read_back_and_seen_through_a_view(arena):
    arena.write(0, 4096, [b"head", memoryview(b"payload")])
    out = bytearray(11)
    arena.read_into(0, 4096, memoryview(out))
    assert bytes(out) == b"headpayload"
    assert bytes(arena.view(4100, 7)) == b"payload"


def test_a_view_is_the_memory_itself_and_not_a_copy(arena):
    arena.view(0, 3)[:] = b"abc"
    assert bytes(arena.view(0, 3)) == b"abc"


@pytest.mark.parametrize(("offset", "size"), [(MIB - 1, 2), (-1, 1), (MIB, 1), (0, MIB + 1)])
def test_a_span_outside_the_arena_is_refused(arena, offset, size):
    with pytest.raises(TierFailure):
        arena.view(offset, size)


def test_a_capacity_above_the_memory_of_the_machine_is_a_config_error():
    with pytest.raises(ConfigError, match="host_capacity"):
        HostArena(Bytes(memory_of_this_machine() + 1))


def test_closing_while_a_reader_holds_a_view_does_not_fail():
    arena = HostArena(Bytes(MIB))
    view = arena.view(0, 10)
    arena.close()
    assert bytes(view) == bytes(10)


def test_nothing_is_left_of_the_arena_after_a_kill_9():
    script = (
        "import sys, time; from kvstore.tiers.host import HostArena\n"
        "arena = HostArena(1 << 24); arena.view(0, 1 << 24)[:] = bytes(1 << 24)\n"
        "print('ready', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()
    assert [name for name in os.listdir("/dev/shm") if "larder" in name] == []

"""For all tests: the seed is printed and can be given again, and nothing that a test starts may outlive the session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

DEFAULT_SEED = 20260101

settings.register_profile("larder", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("larder")

# Small tests on few cores: one thread a process, or the pools of several processes fight for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# UCX would open ports on every interface.
os.environ.setdefault("UCX_NET_DEVICES", "lo")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=DEFAULT_SEED, help="seed of the random tests")


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.getoption('--seed')}"


@pytest.fixture(scope="session")
def seed(request: pytest.FixtureRequest) -> int:
    value = request.config.getoption("--seed")
    assert isinstance(value, int)
    return value


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report: pytest.TestReport = yield
    if report.failed:
        report.sections.append(("seed", f"run again with --seed={item.config.getoption('--seed')}"))
    return report  # type: ignore[return-value]


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails the session when child processes or shared-memory files are left that were not there before."""
    shared_before = _shared_memory()
    yield
    children = _living_children()
    shared = _shared_memory() - shared_before
    assert not children, f"processes left behind: {children}"
    assert not shared, f"left behind in /dev/shm: {sorted(shared)}"


def _living_children() -> dict[int, str]:
    """Direct children of this process, and those that a killed child left to it, that are no zombies. Linux only; else none."""
    found = {}
    for task in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        for pid in map(int, task.read_text().split()):
            try:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            except OSError:
                continue
            if state != "Z" and "resource_tracker" not in command:
                found[pid] = command
    return found


def _shared_memory() -> set[str]:
    """Ours and those of multiprocessing; other programs of this machine use /dev/shm too."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir() if path.name.startswith(("larder", "psm_"))} if folder.is_dir() else set()

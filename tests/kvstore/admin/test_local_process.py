from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.admin import saved_cluster
from kvstore.admin.local_process import LocalProcess, ProcessFailed, wait_until_ready
from kvstore.units import milliseconds, seconds

TOYS = {
    "toy_serves": "print('READY toy toy rpc=127.0.0.1:1 metrics=127.0.0.1:2', flush=True)\nimport signal; signal.pause()\n",
    "toy_fails": "import sys; print('toy: the disk is full', file=sys.stderr); sys.exit(2)\n",
    "toy_hangs": "import signal; signal.pause()\n",
    "toy_ignores": (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('READY toy toy rpc=127.0.0.1:1', flush=True)\nwhile True: signal.pause()\n"
    ),
    "toy_env": (
        "import os, signal\nprint('READY toy toy', *(f'{k}=x' for k in sorted(os.environ) if k.startswith('LARDER_')), flush=True)\n"
        "signal.pause()\n"
    ),
}


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in TOYS.items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@pytest.fixture
def started(toys: Path) -> Iterator[dict[str, LocalProcess]]:
    """Processes by name; all are ended afterwards."""
    processes: dict[str, LocalProcess] = {}
    yield processes
    for process in processes.values():
        process.kill()


def start(processes: dict[str, LocalProcess], folder: Path, module: str) -> LocalProcess:
    process = processes[module] = LocalProcess(name=module, role="toy", module=module, settings={"port": 0}, folder=folder)
    process.start()
    return process


def test_a_process_is_ready_when_it_says_so(started: dict[str, LocalProcess], toys: Path) -> None:
    process = start(started, toys, "toy_serves")
    seen: list[str] = []
    wait_until_ready([process], timeout=seconds(20), on_ready=lambda ready: seen.append(ready.name))
    assert seen == ["toy_serves"]
    assert process.addresses == {"rpc": "127.0.0.1:1", "metrics": "127.0.0.1:2"}
    process.terminate()
    assert process.wait(seconds(10))


def test_one_that_ends_is_named_with_the_end_of_its_log(started: dict[str, LocalProcess], toys: Path) -> None:
    both = [start(started, toys, "toy_serves"), start(started, toys, "toy_fails")]
    with pytest.raises(
        ProcessFailed, match=r"(?s)toy_fails ended with exit code 2; its log .*toy_fails.log ends with:\n    toy: the disk is full"
    ):
        wait_until_ready(both, timeout=seconds(20), on_ready=lambda _: None)


def test_one_that_says_nothing_is_given_up_in_time(started: dict[str, LocalProcess], toys: Path) -> None:
    process = start(started, toys, "toy_hangs")
    with pytest.raises(ProcessFailed, match="toy_hangs was not ready within"):
        wait_until_ready([process], timeout=milliseconds(200), on_ready=lambda _: None)


def test_one_that_ignores_the_request_to_end_is_killed(started: dict[str, LocalProcess], toys: Path) -> None:
    process = start(started, toys, "toy_ignores")
    wait_until_ready([process], timeout=seconds(20), on_ready=lambda _: None)
    process.terminate()
    assert not process.wait(milliseconds(200))
    assert process.exit_code == -9


def test_the_environment_of_the_caller_does_not_win_over_the_config(
    started: dict[str, LocalProcess], toys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LARDER_PORT", "1")
    process = start(started, toys, "toy_env")
    wait_until_ready([process], timeout=seconds(20), on_ready=lambda _: None)
    assert list(process.addresses) == ["LARDER_PARENT_PID"]


def test_a_saved_cluster_is_alive_only_while_its_very_supervisor_is(tmp_path: Path) -> None:
    assert saved_cluster.load(tmp_path) is None
    saved_cluster.save(tmp_path, redis_url="redis://r", gateway_url="http://g", processes=[])
    saved = saved_cluster.load(tmp_path)
    assert saved is not None
    assert saved.is_alive
    text = (tmp_path / "cluster.json").read_text()
    (tmp_path / "cluster.json").write_text(text.replace(str(saved.supervisor_started), "1"))
    reused = saved_cluster.load(tmp_path)
    assert reused is not None
    assert not reused.is_alive

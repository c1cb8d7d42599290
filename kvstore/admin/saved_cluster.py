"""The state file of a local cluster: what `local up` leaves for `local down` and for every other command to find."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import ConfigError

_FILE = "cluster.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedProcess:
    name: str
    role: str
    pid: int
    addresses: dict[str, str]
    """"rpc", "http", "metrics" -> host:port."""
    log: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCluster:
    supervisor_pid: int
    supervisor_started: int
    """Start time of that pid in clock ticks since boot: a pid that was given to another process has another one."""
    redis_url: str
    gateway_url: str
    processes: tuple[SavedProcess, ...]

    @property
    def is_alive(self) -> bool:
        return started_at(self.supervisor_pid) == self.supervisor_started


def default_state_folder() -> Path:
    """LARDER_STATE_DIR, else under XDG_STATE_HOME, else under the home folder."""
    named = os.environ.get("LARDER_STATE_DIR")
    if named:
        return Path(named).expanduser()
    state_home = os.environ.get("XDG_STATE_HOME")
    return (Path(state_home) if state_home else Path.home() / ".local" / "state") / "larder"


def save(folder: Path, *, redis_url: str, gateway_url: str, processes: Iterable[SavedProcess]) -> None:
    """Replace the state file at once, under this process as the supervisor."""
    saved = SavedCluster(
        supervisor_pid=os.getpid(),
        supervisor_started=started_at(os.getpid()) or 0,
        redis_url=redis_url,
        gateway_url=gateway_url,
        processes=tuple(processes),
    )
    fresh = folder / f"{_FILE}.new"
    fresh.write_text(json.dumps(dataclasses.asdict(saved), indent=2))
    fresh.replace(folder / _FILE)


def load(folder: Path) -> SavedCluster | None:
    """None when no cluster was saved there. Raises ConfigError when the file is not ours to read."""
    file = folder / _FILE
    try:
        record = json.loads(file.read_text())
        processes = tuple(SavedProcess(**process) for process in record.pop("processes"))
        return SavedCluster(**record, processes=processes)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"cannot read the state file {file}: {error}; remove it if no local cluster runs") from None


def forget(folder: Path) -> None:
    (folder / _FILE).unlink(missing_ok=True)


def started_at(pid: int) -> int | None:
    """Start time of a living process in clock ticks since boot; None when there is none (a zombie counts as none)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])

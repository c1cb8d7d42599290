"""How a process starts and ends: flags, config, logging, signals, and one line on stderr when the operator must act.

`run_process` is the last line of every `__main__.py`. Nothing here knows what the process does.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from kvstore.config import config_keys, load_config, unknown_key
from kvstore.config_help import example_toml, help_text
from kvstore.errors import ConfigError, LarderError

Cfg = TypeVar("Cfg")

EXIT_OPERATOR = 2
STOP_GRACE_S = 15.0
PARENT_VARIABLE = "LARDER_PARENT_PID"
"""Set by a supervisor to its own pid: the process then ends when that parent does, however it ends."""

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def run_process(main: Callable[[Cfg], Awaitable[None]], cls: type[Cfg], name: str) -> NoReturn:
    """Load the config from argv and the environment, run `main(config)` until it returns or a signal comes, exit.

    SIGTERM and SIGINT cancel `main` (its `finally` and `async with` blocks are the graceful stop) and exit with 0; a second
    signal, or a stop longer than STOP_GRACE_S, ends the process at once. A wrong config, a port in use, an absent Redis and every
    other LarderError become one line on stderr and exit 2. Anything else is a bug: traceback, exit 1.
    """
    end_with_parent()
    keep_freed_memory()
    try:
        file, flags = parse_flags(cls, sys.argv[1:], program=name)
        config = load_config(cls, file=file, flags=flags, env=os.environ)
        _set_up_logging(str(getattr(config, "log_level", "info")))
        code = asyncio.run(_run(main, config))
    except Exception as error:
        line = operator_line(error)
        if line is None:
            logging.getLogger(name).exception("a bug: this must not happen")
            code = 1
        else:
            print(f"{name}: {line}", file=sys.stderr, flush=True)
            code = EXIT_OPERATOR
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # a worker thread in native code must not hold up the exit; everything of ours is closed by now


def keep_freed_memory() -> None:
    """Tell glibc to keep what was freed, up to 256 MiB, instead of handing it back to the system. Elsewhere: nothing.

    Payloads, messages and tensors of 0.1 to 10 MB come and go all the time, and each return costs page faults at the next use:
    encoding one message of 368 KiB 800 us instead of 45 us, reading 46 of them 40 ms of CPU instead of 30 ms.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 256 << 20)


def announce_ready(name: str, role: str, **addresses: str) -> None:
    """The one line on stdout that tells a supervisor that the process serves: `READY <name> <role> rpc=<host:port> ...`."""
    print("READY", name, role, *(f"{kind}={address}" for kind, address in addresses.items()), flush=True)


def listening_socket(host: str, port: int, *, key: str = "port") -> socket.socket:
    """A bound and listening TCP socket; port 0 picks a free one. Raises ConfigError that names the config key."""
    try:
        return socket.create_server((host, port), backlog=512)
    except OSError as error:
        raise ConfigError(cannot_listen(host, port, error, key=key)) from None


def cannot_listen(host: str, port: int, error: OSError, *, key: str = "port") -> str:
    known = error.errno in errno.errorcode
    reason = os.strerror(error.errno).lower() if known and error.errno is not None else error.strerror or str(error)
    return f"cannot listen on {host}:{port}: {reason}; choose another --{key}, or 0 for any free one"


def parse_flags(cls: type[Any], argv: Sequence[str], *, program: str) -> tuple[Path | None, dict[str, str]]:
    """`--config FILE`, `--key=value`, `--section.key value`, `--switch`. `--help` prints every key and exits, `--example`
    prints a config file with every key and exits.

    Dashes in a key count as underscores. Raises ConfigError for what is not a flag, is unknown, or has no value.
    """
    keys = {key.name: key for key in config_keys(cls)}
    file: Path | None = None
    flags: dict[str, str] = {}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word in ("--help", "-h"):
            print(help_text(cls, program=program))
            sys.exit(0)
        if word == "--example":
            print(example_toml(cls, program=program), end="")
            sys.exit(0)
        if not word.startswith("--"):
            raise ConfigError(f"{word!r} is not a flag; write --key=value, or --help for all keys")
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if name != "config" and name not in keys:
            raise unknown_key("flag --", name, {**keys, "config": None})
        if not equals:
            if rest and not rest[0].startswith("--"):
                value = rest.pop(0)
            elif name != "config" and keys[name].is_switch:
                value = "true"
            else:
                raise ConfigError(f"--{name} needs a value: --{name}=...")
        if name == "config":
            file = Path(value)
        else:
            flags[name] = value
    return file, flags


def operator_line(error: BaseException) -> str | None:
    """One line for an error that the operator can act on; None for a bug. A group counts as its first such member."""
    if isinstance(error, BaseExceptionGroup):
        return next((line for line in map(operator_line, error.exceptions) if line is not None), None)
    if isinstance(error, LarderError):
        return " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno in (
        errno.EADDRINUSE,
        errno.EADDRNOTAVAIL,
        errno.EACCES,
        errno.ENOSPC,
        errno.ENOENT,
        errno.EPIPE,
    ):
        return " ".join(str(error).split())
    if type(error).__module__ == "redis.exceptions":  # by name: a process without a registry does not import redis
        return f"cannot use Redis: {' '.join(str(error).split())}"
    return None


def end_with_parent() -> None:
    """Ask the kernel for a SIGTERM when the parent named in PARENT_VARIABLE ends; exit at once if it has already."""
    parent = os.environ.get(PARENT_VARIABLE)
    if not parent or not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit(0)


async def _run(main: Callable[[Cfg], Awaitable[None]], config: Cfg) -> int:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(main(config))
    stopping = False

    def stop(signum: int) -> None:
        nonlocal stopping
        if stopping:
            os._exit(128 + signum)
        stopping = True
        task.cancel()
        loop.call_later(STOP_GRACE_S, _give_up)

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop, signum)
    try:
        await task
    except asyncio.CancelledError:
        if not stopping:
            raise
    return 0


def _give_up() -> None:
    print(f"the stop took longer than {STOP_GRACE_S:.0f} s; ending at once", file=sys.stderr, flush=True)
    os._exit(1)


def _set_up_logging(level: str) -> None:
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        raise ConfigError(f"log_level: {level!r} is not one of debug, info, warning, error")
    logging.basicConfig(stream=sys.stderr, level=number, format=_LOG_FORMAT)
    for chatty in ("httpx", "httpcore", "asyncio", "filelock", "transformers", "numba"):
        logging.getLogger(chatty).setLevel(logging.WARNING)

"""PYTHONPATH=tests python -m chaos.run: stores of a real cluster are struck in every way there is, under load that knows every byte.

Progress on stderr; the last line on stdout is one JSON object. Exit code 0 only if no read failed, no byte was wrong, nothing acknowledged
was lost and nothing leaked.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from chaos.cluster import Cluster
from chaos.hand import WHOLE_WITHIN_S, Hand
from chaos.hosts import Hosts, open_hosts
from chaos.ledger import REPLICAS, Ledger
from chaos.load import Load
from chaos.standing import Standing
from chaos.verdict import Tally

from kvstore.client import Acknowledge, ClientConfig, StoreClient
from kvstore.core.view import MemberState, View
from kvstore.units import seconds

LIVE_CHAINS = 48
_LEAKS_WITHIN_S = 60.0
_GONE = (MemberState.LEFT, MemberState.DEAD)
_CLIENT = ClientConfig(put_timeout=seconds(10), read_timeout=seconds(8), lease_ttl=seconds(5), transports=("tcp", "grpc"))
_CLIENTS = (_CLIENT, ClientConfig(put_timeout=seconds(10), read_timeout=seconds(8), lease_ttl=seconds(5)))


async def run(
    tally: Tally, hosts: Hosts, folder: Path, *, minutes: float, stores: int, kinds: tuple[str, ...], tell: Callable[[str], None]
) -> None:
    """Faults start until `minutes` are over, or with `kinds` one of each; then everything is looked at."""
    shared_before = _shared_memory()
    started = time.monotonic()
    cluster = Cluster(hosts, folder, first=stores, most=stores + 1)
    try:
        await cluster.open()
        ledger = Ledger(seed=tally.seed, most=LIVE_CHAINS)
        clients = [StoreClient(cluster.registry, replicas=REPLICAS, config=config) for config in _CLIENTS]
        standing = Standing(cluster, ledger, clients, tally)
        watch = asyncio.ensure_future(standing.watch())
        try:
            load = Load(cluster, ledger, standing, clients, tally)
            hand = Hand(cluster, ledger, standing, tally, draw=random.Random(tally.seed), tell=tell)
            _complain(tally, "at the start", await cluster.until_whole(ledger, within_s=WHOLE_WITHIN_S))
            for number in range(6):
                await load.put(clients[number % 2], ledger.make(16), Acknowledge.ALL)
            standing.settle()
            workers = [
                asyncio.ensure_future(work(client, random.Random(tally.seed + number)))
                for number, (work, client) in enumerate((work, client) for work in (load.writer, load.reader) for client in clients)
            ]
            try:
                await _strike(hand, load, workers, tally.seed, until=started + minutes * 60, kinds=kinds)
            finally:
                load.over.set()
                await asyncio.gather(*workers)
            tell("the load is over; looking at what is left")
            await _look(cluster, ledger, load, clients[0], tally)
        finally:
            watch.cancel()
            for client in clients:
                await client.close()
                tally.leaks += client.held_leases
        await _look_for_leaks(cluster, tally, folder)
    finally:
        await cluster.close()
    if left := _shared_memory() - shared_before:
        tally.leaks += len(left)
        tally.complaints.append(f"left in /dev/shm: {sorted(left)}")
    tally.minutes = (time.monotonic() - started) / 60


async def _strike(hand: Hand, load: Load, workers: list[asyncio.Future[None]], seed: int, *, until: float, kinds: tuple[str, ...]) -> None:
    draw = random.Random(f"{seed}/pauses")
    waiting = list(kinds)
    while waiting or (not kinds and time.monotonic() < until):
        kind = waiting.pop(0) if kinds else hand.draw_kind()
        await asyncio.sleep(draw.uniform(0.1, 1.5))
        await hand.strike(kind)
        await load.forget_retired()
        for worker in workers:
            if worker.done():
                worker.result()  # a bug in a client, or in here


async def _look(cluster: Cluster, ledger: Ledger, load: Load, client: StoreClient, tally: Tally) -> None:
    """Whole by our own look and by kvctl's, and every promised block as it was put."""
    _complain(tally, "at the end", await cluster.until_whole(ledger, within_s=WHOLE_WITHIN_S))
    owed = -1
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WHOLE_WITHIN_S):
            while owed := await asyncio.to_thread(_under_replicated, cluster.redis.url):  # noqa: ASYNC110
                await asyncio.sleep(0.5)
    if owed:
        tally.complaints.append(f"kvctl status: {owed} under-replicated stripes at the end")
    for number, chain in ledger.chains.items():
        found, why = await load.read(client, chain)
        for _ in range(20):
            if found >= chain.run:
                break
            await asyncio.sleep(0.5)
            found, why = await load.read(client, chain)
        if found < chain.run:
            tally.acknowledged_lost += chain.run - found
            tally.complaints.append(f"chain {number}: {found} of {chain.run} acknowledged blocks are left ({why})")


def _complain(tally: Tally, when: str, missing: str) -> None:
    if missing:
        tally.complaints.append(f"{when}: {missing}")


def _under_replicated(redis_url: str) -> int:
    command = [sys.executable, "-m", "kvstore.admin.kvctl", "status", "--redis", redis_url, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return int(json.loads(done.stdout)["repair"]["under_replicated_stripes"])


async def _look_for_leaks(cluster: Cluster, tally: Tally, folder: Path) -> None:
    """No lease, reservation or operation after the last client, no member after the last node, no file but those of the SSD tiers."""
    held: dict[str, int] = {}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LEAKS_WITHIN_S):
            while held := await _held(cluster):  # noqa: ASYNC110
                await asyncio.sleep(0.2)
    tally.leaks += sum(held.values())
    tally.complaints += [f"leaked: {count} {what}" for what, count in held.items()]
    for store in cluster.wanted():
        code = await store.let_go(30)
        if code != 0:
            tally.complaints.append(f"{store.node_id} was told to stop and ended with {code}")
    members = [member.node_id for member in (await _last_view(cluster)).stores if member.state not in _GONE]
    ssds = [store.host.ssd for store in cluster.stores.values()]
    regions = {path.name for ssd in ssds if ssd.is_dir() for path in ssd.iterdir()}
    odd = {name for name in regions if "tmp" in name or "new" in name}
    tally.leaks += len(members) + len(odd)
    tally.complaints += [f"still a member: {name}" for name in members] + [f"left on the SSD: {name}" for name in sorted(odd)]
    for store in cluster.stores.values():
        if store.log.exists() and "a bug" in (said := store.log.read_text(errors="replace")):
            tally.complaints.append(f"{store.node_id} has met a bug:\n{said[said.index('a bug') :][:3000]}")


async def _held(cluster: Cluster) -> dict[str, int]:
    held: dict[str, int] = {}
    for store in cluster.wanted():
        report = await store.status()
        if report is None:
            held[f"answer of {store.node_id}"] = 1
            continue
        for what in ("leases", "reservations", "operations"):
            if count := getattr(report, what):
                held[f"{what} at {store.node_id}"] = count
    return held


async def _last_view(cluster: Cluster) -> View:
    """Once nobody is a member any more, or in ten seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(10):
            while any(member.state not in _GONE for member in cluster.registry.view.stores):
                await cluster.registry.next_view(after=cluster.registry.view.epoch)
    return cluster.registry.view


def _shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("larder*")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--stores", type=int, default=4, help="at the start; one more may join")
    parser.add_argument("--seed", type=int, default=20260101)
    parser.add_argument("--kinds", default="", help="instead of minutes: these faults, one after another, by commas; kill+freeze: at once")
    parser.add_argument(
        "--hosts", choices=("auto", "netns", "loopback"), default="auto", help="network namespaces need root; auto: where they can be had"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what goes to the background with Ctrl-C ignored
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    logging.getLogger("kvstore").setLevel(logging.ERROR)  # clients have a line for each circuit
    tally = Tally(options.seed)
    started = time.monotonic()

    def tell(line: str) -> None:
        so_far = f"{tally.reads} reads, {tally.failed_reads} failed, {tally.wrong_bytes} wrong, {len(tally.complaints)} complaints"
        print(f"{time.monotonic() - started:6.1f} s  {line:32} {so_far}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="larder-chaos-") as folder:
        kinds = tuple(filter(None, options.kinds.split(",")))
        with open_hosts(options.hosts, Path(folder)) as (hosts, what_they_are):
            tell(what_they_are)
            try:
                asyncio.run(run(tally, hosts, Path(folder), minutes=options.minutes, stores=options.stores, kinds=kinds, tell=tell))
            except KeyboardInterrupt:
                print("chaos: interrupted", file=sys.stderr)
                return 130
    for complaint in tally.complaints:
        print(complaint)
    print(f"{tally.puts} puts, {tally.acknowledged} blocks acknowledged, {tally.blocks_read} read")
    print(f"both replicas struck: {tally.excused_reads} reads and {tally.excused_blocks} blocks are excused")
    print(", ".join(f"{kind} {count}" for kind, count in sorted(tally.faults.items())))
    print(tally.line())
    return 0 if tally.clean else 1


if __name__ == "__main__":
    sys.exit(main())

"""A simulated cluster: stores with their upkeep, clients and a registry under one seeded clock, network and set of disks.

A run is a storm (random puts, reads and deletes while nodes crash, freeze, stop, drain, join, rot and run full, and links are cut, slow
and lossy), then calm, in which the cluster must converge (`sim.convergence`) and every acknowledged block of which a good copy lives be
readable, then silence, after which nothing may be left over. `StoreNode` checks what an event has changed after every event, and all that
its node holds after some of them, at random, and at the end. A run that fails is run again with all checks after every event, so that it
fails where it went wrong. An operation of a client that does not end within its bounds is found in the calm.

What a storm may bring is in `sim.faults`; `Storm` sizes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from random import Random
from typing import Any, NamedTuple

from sim import convergence
from sim.client import Held, Lease, SimulatedClient
from sim.describe import describe
from sim.faults import Faults
from sim.media import Media
from sim.messages import TIMEOUT, WriteBytes
from sim.network import Network
from sim.node_invariants import check_quiet
from sim.oracle import ByteOracle
from sim.registry import SimulatedRegistry
from sim.store_node import StoreNode
from sim.timeline import Reply, Timeline
from sim.upkeep import upkeep_config

from kvstore.client.answers import Acknowledge, PutOutcome
from kvstore.core.admission import AdmissionConfig
from kvstore.core.chain import chain_of, root_hash
from kvstore.core.extent import ALIGNMENT
from kvstore.core.lease import LeaseConfig
from kvstore.core.placement import place
from kvstore.core.policies import PolicyName
from kvstore.core.step_down import EVERYBODY, StepDownRule, StepDownRules
from kvstore.core.store_config import SsdConfig, StoreConfig, WritePolicy
from kvstore.core.view import View
from kvstore.ids import BlockHash, BlockRef, BootId, KeySpace, LayoutFingerprint, Namespace, NodeId, RungCode
from kvstore.units import Bytes, Nanos, milliseconds, seconds

REGION_BYTES = 16 * ALIGNMENT
KEY_SPACES = tuple(KeySpace(Namespace(name), LayoutFingerprint(bytes(32))) for name in ("a", "b"))
LONGER_THAN_AN_OPERATION = seconds(25)
LONGER_THAN_A_LEASE = seconds(10)
LONGER_THAN_A_VERIFY = seconds(65)


class Storm(NamedTuple):
    """How long, how much, how bad."""

    nodes: int
    clients: int = 2
    replicas: int = 2
    newcomers: int = 2
    """May join, at most."""
    lasts: Nanos = seconds(15)
    pause_between_operations: Nanos = milliseconds(500)
    """Of one client, on average."""
    pause_between_faults: Nanos = milliseconds(1400)
    faults: bool = True
    step_down: bool = False
    whole_checks: float = 0.25
    """Of the events of a node: after so many, all that it holds is checked."""


class Cluster:
    def __init__(self, seed: int, storm: Storm) -> None:
        self.rng = Random(seed)
        self.storm = storm
        self.timeline = Timeline()
        self.network = Network(self.timeline, self.rng)
        self.oracle = ByteOracle()
        self.history: deque[tuple[Nanos, str, object]] = deque(maxlen=150)
        self.outcomes: dict[PutOutcome, int] = dict.fromkeys(PutOutcome, 0)
        self.reasons: dict[str, int] = {}
        """Why replicas do not hold a block that was put, and why a block that was leased could not be read."""
        self.reads = 0
        self.nodes: dict[NodeId, StoreNode] = {}
        self.registry = SimulatedRegistry(self.timeline, self.network)
        self._looks = Random(seed)
        """Not the one that decides what happens: a run is the same run however often it is looked at."""
        self._zones = self.rng.choice((1, 2, storm.nodes))
        self._roomy = self.rng.random() < 0.5
        self._client_names = 0
        self.clients: dict[str, SimulatedClient] = {}
        self.stormy = True
        self.chains = [(key_space, chain) for key_space in KEY_SPACES for chain in _chains_of(key_space, branches=3 + storm.nodes // 8)]
        self.blocks = {(key_space, block.hash): block for key_space, chain in self.chains for block in chain}
        self._given_up: dict[tuple[NodeId, tuple[KeySpace, BlockHash]], Nanos] = {}
        """When a store last dropped a block that is not its own."""
        self.faults = Faults(self)
        for _ in range(storm.nodes):
            self.new_node()
        self.wait(seconds(2))  # all of them are in
        for _ in range(storm.clients):
            self.new_client()

    def new_node(self) -> StoreNode:
        number = len(self.nodes)
        node_id = NodeId(f"n{number}")
        upkeep = upkeep_config(self.rng, nodes=self.storm.nodes, replicas=self.storm.replicas, zone=str(number % self._zones))
        node = self.nodes[node_id] = StoreNode(node_id, world=self, config=self._node_config(), upkeep=upkeep, rng=self.rng)
        self.registry.followers[node_id] = node
        node.boot()
        return node

    def _node_config(self) -> StoreConfig:
        rng = self.rng
        ssd = SsdConfig(
            capacity=Bytes(rng.choice((4, 6)) * REGION_BYTES),
            region_bytes=Bytes(REGION_BYTES),
            write_policy=rng.choice(tuple(WritePolicy)),
            durable_within=milliseconds(300),  # and a tick of a second more at most: sooner than the clients give up
            demote_above=rng.choice((0.0, 0.3, 0.7)),
            max_moves=rng.choice((1, 3, 8)),
            min_dead_share=rng.choice((0.1, 0.25, 0.6)),
            retry_after=milliseconds(500),
            step_down=_step_down_rules(rng) if self.storm.step_down else {},
        )
        return StoreConfig(
            host_capacity=Bytes((400 if self._roomy else rng.choice((12, 24, 60))) * ALIGNMENT),
            ssd=ssd if rng.random() < 0.8 else None,
            lease=LeaseConfig(ttl=seconds(4), max_ttl=seconds(6), max_lifetime=seconds(20), max_read=seconds(4)),
            admission=AdmissionConfig(promote_after_uses=rng.choice((1, 2))),
            policy=rng.choice(tuple(PolicyName)),
            reservation_timeout=seconds(5),
            quotas={Namespace("b"): Bytes(20 * ALIGNMENT)} if rng.random() < 0.2 else {},
        )

    # --- what nodes and clients see of the world ------------------------------------------------------------------------------------------

    def log(self, who: str, what: object) -> None:
        self.history.append((self.timeline.now, who, what))

    def beliefs(self, node_id: NodeId, boot_id: BootId) -> Iterable[Held]:
        now = self.timeline.now
        for client in self.clients.values():
            for held in client.held:
                if held.boot_id == boot_id and held.lease.node_id == node_id and held.lease.lasts(now):
                    yield held

    def wants_whole_check(self) -> bool:
        return self._looks.random() < self.storm.whole_checks

    def story(self) -> list[str]:
        """The last events, one a line."""
        return [f"{at / 1e9:.3f} {who} {what if isinstance(what, str) else describe(what)}" for at, who, what in self.history]

    def exits(self, node: StoreNode) -> None:
        """Whoever watches its process starts another one."""
        self.log(node.node_id, "EXIT")
        node.crash()
        self.timeline.after(seconds(1), lambda: self.start(node))

    def start(self, node: StoreNode) -> None:
        if not node.is_up:
            node.restart()

    def drops(self, node: StoreNode, key_space: KeySpace, hashes: tuple[BlockHash, ...], view: View) -> None:
        """No copy goes before each owner had one of its own, a moment ago at the earliest. It may have lost that since, but not given it up
        in turn: what it gave up before, got again and lost is lost."""
        since = self.timeline.now - LONGER_THAN_A_VERIFY
        for block in hashes:
            key = (key_space, block)
            for owner in place(self.blocks[key].stripe, view, replicas=self.storm.replicas):
                other = self.nodes[owner]
                lost = other.lost_at.get(key, -1) >= max(since, self._given_up.get((owner, key), -1) + 1)
                assert other.holds(key_space, block) or lost, f"{node.node_id} gives up what {owner} lacks"
            self._given_up[node.node_id, key] = self.timeline.now

    def call(self, client: str, node_id: NodeId, message: Any, *, timeout: Nanos) -> Reply:
        reply = Reply()
        node = self.nodes[node_id]

        def answer(value: Any) -> None:
            if isinstance(value, tuple) and value and hasattr(value[0], "payload"):
                value = tuple(item._replace(payload=self.network.spoil(item.payload)) for item in value)
            self.network.send(node_id, client, lambda: reply.set(value))

        if isinstance(message, WriteBytes):
            message = WriteBytes(tuple((token, self.network.spoil(data)) for token, data in message.writes))
        self.network.send_request(client, node_id, lambda: node.serve(message, answer))
        self.timeline.after(timeout, lambda: reply.set(TIMEOUT))
        return reply

    def mapped(self, node_id: NodeId, boot_id: BootId) -> Media | None:
        node = self.nodes[node_id]
        return node.media if node.is_up and node.boot_id == boot_id else None

    def acknowledged(self, key_space: KeySpace, block: BlockRef, holders: frozenset[NodeId], *, needed: int) -> None:
        assert len(holders) >= needed, "acknowledged with fewer replicas than asked"
        self.oracle.acknowledged[key_space, block.hash] = holders

    # --- the storm ------------------------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        if self.storm.faults:
            self.timeline.after(0, self.faults.next)
        self.wait(self.storm.lasts)
        self.calm_down()

    def new_client(self) -> None:
        self._client_names += 1
        client = SimulatedClient(f"c{self._client_names}", self, replicas=self.storm.replicas, rng=self.rng)
        self.clients[client.name] = self.registry.followers[client.name] = client
        client.see(self.registry.view)
        self.timeline.after(self.rng.randrange(milliseconds(500)), lambda: self._work(client))

    def _work(self, client: SimulatedClient) -> None:
        """One operation after another, several at a time; a client that is killed leaves everything as it is."""
        if client.processes.killed or not self.stormy:
            return
        operations = (self._put, self._put, self._get, self._get, self._delete)
        weights = (4, 4, 4, 4, self.faults.mood[0] / 2)
        client.processes.spawn(self.rng.choices(operations, weights)[0](client))
        pause = self.rng.randrange(2 * self.storm.pause_between_operations)
        self.timeline.after(pause, lambda: self._work(client))

    def _some_run(self) -> tuple[KeySpace, tuple[BlockRef, ...]]:
        key_space, chain = self.rng.choice(self.chains)
        start = self.rng.choice((0, 0, 0, self.rng.randrange(len(chain))))
        return key_space, chain[start : start + self.rng.randint(1, 10)]

    def _put(self, client: SimulatedClient) -> Any:
        key_space, blocks = self._some_run()
        variant = self.rng.randrange(self.oracle.VARIANTS)
        puts = [(block, self.oracle.payload(key_space, block, variant)) for block in blocks]
        outcomes, reasons = yield from client.put(key_space, puts, self.rng.choice(tuple(Acknowledge)))
        for outcome in outcomes:
            self.outcomes[outcome] += 1
        for reason, count in reasons.items():
            self.reasons[reason] = self.reasons.get(reason, 0) + count

    def _get(self, client: SimulatedClient) -> Any:
        key_space, blocks = self._some_run()
        lease: Lease = yield from client.acquire(key_space, blocks, as_sealed=self.storm.step_down and self.rng.random() < 0.5)
        for _ in range(self.rng.choice((1, 1, 2))):
            found = yield from client.read(lease)
            for payload in found.values():
                self.reads += 1
                if payload is None:
                    self.reasons["read"] = self.reasons.get("read", 0) + 1
            yield self.rng.choice((0, milliseconds(100), seconds(6)))
        client.release(lease)

    def _delete(self, client: SimulatedClient) -> Any:
        key_space, blocks = self._some_run()
        for block in blocks[:3]:
            self.oracle.acknowledged.pop((key_space, block.hash), None)
        yield from client.delete(key_space, blocks[:3])

    # --- calm, silence --------------------------------------------------------------------------------------------------------------------

    def calm_down(self) -> None:
        self.stormy = False
        self.log("cluster", "CALM")
        self.faults.end()
        # Whoever stops or sleeps still is back by then, and every operation has ended, one way or the other.
        self.wait(LONGER_THAN_AN_OPERATION)
        for node in self.nodes.values():
            self.start(node)
        self.wait(LONGER_THAN_A_LEASE)
        for client in self.clients.values():
            assert len(client.processes) == 0, f"{client.name}: an operation outlived its bounds"
            assert not client.held, f"{client.name}: a lease was never given back"
        convergence.until_converged(self)
        self._read_what_was_promised()
        if self.storm.nodes > self.storm.replicas:
            convergence.drain_one(self)
            self._read_what_was_promised()
        for node in self.nodes.values():
            node.upkeep.processes.kill()  # it would go on comparing for ever
        self.wait(LONGER_THAN_A_LEASE)
        for node in self.nodes.values():
            if node.state is not None:
                node.check_whole()
                check_quiet(node.state)
                assert len(node.incoming) == 0, "a write token is open for ever"

    def wait(self, duration: Nanos) -> None:
        self.timeline.run_until(Nanos(self.timeline.now + duration))

    def _read_what_was_promised(self) -> None:
        """Of acknowledged blocks, each that lives somewhere, unspoiled, in one of its present owners."""
        client = next(iter(self.clients.values()))
        assert all(client.router.usable(node_id) for node_id in client.router.stores()), "a circuit stays open although its node is back"
        promised: dict[tuple[KeySpace, bytes], list[BlockRef]] = {}
        for key_space, chain in self.chains:
            for block in chain:
                if (key_space, block.hash) in self.oracle.acknowledged and self._lives(key_space, block):
                    blocks = promised.setdefault((key_space, block.stripe), [])
                    if block not in blocks:
                        blocks.append(block)
        for (key_space, _), blocks in promised.items():
            missing = self._read_now(client, key_space, blocks)
            for block in missing:  # behind a hole of the replica that was asked first, maybe: asked for alone, it must come
                if self._read_now(client, key_space, [block]):
                    lives = self._lives(key_space, block)  # a demotion may cost one its room, in the calm too
                    assert not lives, f"block {describe(block)} was acknowledged, lives, and is not found"

    def _lives(self, key_space: KeySpace, block: BlockRef) -> bool:
        return any(self.nodes[owner].holds_good(key_space, block.hash) for owner in self.owners(block))

    def owners(self, block: BlockRef) -> tuple[NodeId, ...]:
        return place(block.stripe, self.registry.view, replicas=self.storm.replicas)

    def _read_now(self, client: SimulatedClient, key_space: KeySpace, blocks: list[BlockRef]) -> list[BlockRef]:
        """Those that did not come."""

        def steps() -> Any:
            lease = yield from client.acquire(key_space, blocks)
            found = yield from client.read(lease)
            client.release(lease)
            return found

        reading = client.processes.spawn(steps())
        end = self.timeline.now + seconds(20)
        while not reading.done and self.timeline.now < end:
            self.wait(milliseconds(5))
        assert reading.done, "a read of a healthy cluster does not end"
        return [block for block in blocks if reading.value.get(block.hash) is None]


def _step_down_rules(rng: Random) -> StepDownRules:
    finer = StepDownRule(rung=RungCode(7), keep_last=rng.choice((0, 2)))
    return {EVERYBODY: (finer, StepDownRule(rung=RungCode(4), after=rng.choice((Nanos(0), seconds(2)))))}


def _chains_of(key_space: KeySpace, *, branches: int) -> list[tuple[BlockRef, ...]]:
    """A small tree: some conversations that share their first four blocks, and one of its own."""
    root = root_hash(namespace=key_space.namespace, model_digest=b"m", layout=key_space.layout)
    shared = [1] * 8
    chains = [chain_of(shared + [branch] * 16, block_tokens=2, root=root) for branch in range(branches)]
    return [*chains, chain_of([9] * 30, block_tokens=2, root=root)]


def run_cluster(seed: int, storm: Storm) -> Cluster:
    """The finished run, or AssertionError with the seed and the last events."""
    cluster: Cluster | None = None
    try:
        cluster = Cluster(seed, storm)
        cluster.run()
    except Exception as error:
        if storm.whole_checks < 1:
            return run_cluster(seed, storm._replace(whole_checks=1.0))
        last = "\n".join(cluster.story()) if cluster is not None else ""
        raise AssertionError(f"seed {seed}, {storm}: {error!r}\n{last}") from error
    finally:
        for node in cluster.nodes.values() if cluster is not None else ():
            if node.boots:
                node.upkeep.processes.kill()
    return cluster

"""A simulated cluster: several stores, clients and a registry under one seeded clock, network and set of disks.

A run is a storm (random puts, reads and deletes while nodes crash, freeze, stop, rot and run full, and links are cut, slow and lossy), then
calm, in which every acknowledged block of which a good copy lives must be readable, then silence, after which nothing may be left over.
`StoreNode` checks the invariants of its node after every event; an operation of a client that does not end within its bounds is found
in the calm.

To grow it: a node that joins, drains or is declared dead is one more change of the registry (`SimulatedRegistry.change`), which every
client and node learns late; what nodes do after one (repair, rebalance) is a process of `sim.timeline` that belongs to the node, as
`SimulatedClient`'s belong to a client, and talks to the others by `Cluster.call`, so that the network delays, drops and cuts it too.
`FAULTS` names what a storm may bring; `Storm` sizes it. Convergence once faults stop is one more check in `Cluster.calm_down`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from random import Random
from typing import Any, NamedTuple

from sim import registry
from sim.client import Held, Lease, SimulatedClient
from sim.describe import describe
from sim.media import Media
from sim.messages import TIMEOUT, WriteBytes
from sim.network import CALM, Network, Weather
from sim.node_invariants import check_quiet
from sim.oracle import ByteOracle
from sim.registry import SimulatedRegistry
from sim.store_node import StoreNode
from sim.timeline import Reply, Timeline

from kvstore.client.answers import Acknowledge, PutOutcome
from kvstore.core.admission import AdmissionConfig
from kvstore.core.chain import chain_of, root_hash
from kvstore.core.extent import ALIGNMENT
from kvstore.core.lease import LeaseConfig
from kvstore.core.policies import PolicyName
from kvstore.core.store_config import SsdConfig, StoreConfig, WritePolicy
from kvstore.ids import BlockRef, BootId, KeySpace, LayoutFingerprint, Namespace, NodeId
from kvstore.units import Bytes, Nanos, milliseconds, seconds

REGION_BYTES = 16 * ALIGNMENT
KEY_SPACES = tuple(KeySpace(Namespace(name), LayoutFingerprint(bytes(32))) for name in ("a", "b"))
LONGER_THAN_AN_OPERATION = seconds(25)
LONGER_THAN_A_LEASE = seconds(10)


class Storm(NamedTuple):
    """How long, how much, how bad."""

    nodes: int
    clients: int = 2
    replicas: int = 2
    lasts: Nanos = seconds(8)
    pause_between_operations: Nanos = milliseconds(500)
    """Of one client, on average."""
    pause_between_faults: Nanos = milliseconds(1400)
    faults: bool = True


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
        self.nodes = {}
        for number in range(storm.nodes):
            node_id = NodeId(f"n{number}")
            self.nodes[node_id] = StoreNode(node_id, world=self, config=self._node_config(), rng=self.rng)
        zones = self.rng.choice((1, 2, storm.nodes))
        self.registry = SimulatedRegistry(
            self.timeline, self.network, zones={node_id: str(number % zones) for number, node_id in enumerate(self.nodes)}
        )
        self._client_names = 0
        self.clients: dict[str, SimulatedClient] = self.registry.clients
        self._stormy = True
        self._mended: list[Callable[[], None]] = []
        """What puts right each fault that is in force."""
        self.chains = [(key_space, chain) for key_space in KEY_SPACES for chain in _chains_of(key_space)]
        # Each run has its own mood: some faults often, some never. Runs that do a bit of everything all look alike.
        self.mood = [self.rng.choice((0.0, 1.0, 1.0, 4.0)) for _ in FAULTS]
        if not any(self.mood):
            self.mood[0] = 1.0
        for node in self.nodes.values():
            node.boot()
            self.registry.renew(node.node_id, node.boot_id)
        for _ in range(storm.clients):
            self._new_client()

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
        )
        return StoreConfig(
            host_capacity=Bytes(rng.choice((12, 24, 60)) * ALIGNMENT),
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

    def story(self) -> list[str]:
        """The last events, one a line."""
        return [f"{at / 1e9:.3f} {who} {what if isinstance(what, str) else describe(what)}" for at, who, what in self.history]

    def heartbeat(self, node: StoreNode) -> None:
        boot_id = node.boot_id
        self.network.send(node.node_id, registry.NAME, lambda: self.registry.renew(node.node_id, boot_id))

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
        self.timeline.after(0, self._next_fault)
        self.timeline.run_until(self.storm.lasts)
        self.calm_down()

    def _new_client(self) -> None:
        self._client_names += 1
        client = SimulatedClient(f"c{self._client_names}", self, replicas=self.storm.replicas, rng=self.rng)
        self.clients[client.name] = client
        client.see(self.registry.view)
        self.timeline.after(self.rng.randrange(milliseconds(500)), lambda: self._work(client))

    def _work(self, client: SimulatedClient) -> None:
        """One operation after another, several at a time; a client that is killed leaves everything as it is."""
        if client.processes.killed or not self._stormy:
            return
        operations = (self._put, self._put, self._get, self._get, self._delete)
        weights = (4, 4, 4, 4, self.mood[0] / 2)
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
        lease: Lease = yield from client.acquire(key_space, blocks)
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

    # --- faults ---------------------------------------------------------------------------------------------------------------------------

    def _next_fault(self) -> None:
        if self._stormy and self.storm.faults:
            self.rng.choices(FAULTS, self.mood)[0](self)
            self.timeline.after(self.rng.randrange(2 * self.storm.pause_between_faults), self._next_fault)

    def _for_a_while(self, longest: Nanos, mend: Callable[[], None]) -> None:
        """`mend` once, after a while or at the end of the storm."""
        self._mended.append(mend)

        def end() -> None:
            if mend in self._mended:
                self._mended.remove(mend)
                mend()

        self.timeline.after(self.rng.randrange(milliseconds(200), longest), end)

    def _some_node(self) -> StoreNode | None:
        awake = [node for node in self.nodes.values() if node.is_up and not node.is_frozen and not node.stopping]
        return self.rng.choice(awake) if awake else None

    def _crash(self) -> None:
        node = self._some_node()
        if node is None:
            return
        if self.rng.random() < 0.5:
            node.crash_soon = True  # between two instructions of one event
        else:
            node.crash(silent=self.rng.random() < 0.3)

        def back() -> None:
            node.crash_soon = False
            self._start(node)

        self._for_a_while(self.rng.choice((milliseconds(300), seconds(12))), back)  # faster than a heartbeat, or slower

    def _start(self, node: StoreNode) -> None:
        if not node.is_up:
            node.restart()

    def _stop(self) -> None:
        node = self._some_node()
        if node is not None:
            node.stop()
            self._for_a_while(seconds(15), lambda: self._start(node))

    def _freeze(self) -> None:
        node = self._some_node()
        if node is not None:
            node.freeze(self.rng.randrange(milliseconds(100), seconds(10)))

    def _cut(self) -> None:
        """Clients, or the registry, from one node: both ways, or one."""
        node_id = self.rng.choice(tuple(self.nodes))
        others = [*self.clients, registry.NAME] if self.rng.random() < 0.5 else [self.rng.choice([*self.clients, registry.NAME])]
        ways = self.rng.choice(((True, True), (True, False), (False, True)))
        links = [(other, node_id) for other in others if ways[0]] + [(node_id, other) for other in others if ways[1]]
        for link in links:
            self.network.cut(*link)

        def heal() -> None:
            for link in links:
                self.network.heal(*link)

        self._for_a_while(seconds(8), heal)

    def _bad_weather(self) -> None:
        rng = self.rng
        self.network.weather = Weather(
            lost=rng.choice((0.0, 0.05, 0.2)),
            repeated=rng.choice((0.0, 0.1, 0.3)),
            spoiled=rng.choice((0.0, 0.05)),
            slow=rng.choice((0.0, 0.1, 0.3)),
        )

        def clear_up() -> None:
            self.network.weather = CALM

        self._for_a_while(seconds(8), clear_up)

    def _bad_disk(self) -> None:
        node = self.rng.choice(tuple(self.nodes.values()))
        node.fault_rate = self.rng.choice((0.0, 0.05, 0.3))
        node.slow_disk = self.rng.random() < 0.5
        node.disk_full = self.rng.random() < 0.3

        def repair() -> None:
            node.fault_rate, node.slow_disk, node.disk_full = 0.0, False, False

        self._for_a_while(seconds(8), repair)

    def _rot(self) -> None:
        node = self.rng.choice(tuple(self.nodes.values()))
        for _ in range(self.rng.choice((1, 3, 10))):
            self.log(node.node_id, f"FLIP {node.media.flip_bit()}")

    def _lose_client(self) -> None:
        name = self.rng.choice(tuple(self.clients))
        self.log(name, "KILLED")
        self.clients.pop(name).kill()
        self._new_client()

    # --- calm, silence --------------------------------------------------------------------------------------------------------------------

    def calm_down(self) -> None:
        self._stormy = False
        self.log("cluster", "CALM")
        mended, self._mended = self._mended, []
        for mend in mended:
            mend()
        # Whoever stops or sleeps still is back by then, and every operation has ended, one way or the other.
        self._wait(LONGER_THAN_AN_OPERATION)
        for node in self.nodes.values():
            self._start(node)
        self._wait(LONGER_THAN_A_LEASE)
        for client in self.clients.values():
            assert len(client.processes) == 0, f"{client.name}: an operation outlived its bounds"
            assert not client.held, f"{client.name}: a lease was never given back"
        self._read_what_was_promised()
        self._wait(LONGER_THAN_A_LEASE)
        for node in self.nodes.values():
            assert node.state is not None
            check_quiet(node.state)
            assert len(node.incoming) == 0, "a write token is open for ever"

    def _wait(self, duration: Nanos) -> None:
        self.timeline.run_until(Nanos(self.timeline.now + duration))

    def _read_what_was_promised(self) -> None:
        """Of acknowledged blocks, each that lives somewhere, unspoiled, in one of its replicas."""
        client = next(iter(self.clients.values()))
        assert set(client.router.stores()) == set(self.nodes), "a node that is back is not in the view"
        assert all(client.router.usable(node_id) for node_id in self.nodes), "a circuit stays open although its node is back"
        promised: dict[tuple[KeySpace, bytes], list[BlockRef]] = {}
        for key_space, chain in self.chains:
            for block in chain:
                if self._lives(key_space, block, self.oracle.acknowledged.get((key_space, block.hash), ())):
                    blocks = promised.setdefault((key_space, block.stripe), [])
                    if block not in blocks:
                        blocks.append(block)
        for (key_space, _), blocks in promised.items():
            missing = self._read_now(client, key_space, blocks)
            for block in missing:  # behind a hole of the replica that was asked first, maybe: asked for alone, it must come
                if self._read_now(client, key_space, [block]):
                    holders = self.oracle.acknowledged[key_space, block.hash]
                    lives = self._lives(key_space, block, holders)  # a demotion may cost one its room, in the calm too
                    assert not lives, f"block {describe(block)} was acknowledged, lives, and is not found"

    def _lives(self, key_space: KeySpace, block: BlockRef, holders: Iterable[NodeId]) -> bool:
        for node_id in holders:
            state, media = self.nodes[node_id].state, self.nodes[node_id].media
            assert state is not None
            entry = state._stock.index.get(key_space, block.hash)
            if entry is not None and not any(media.is_rotten(copy.extent) for copy in entry.copies):
                return True
        return False

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
            self._wait(milliseconds(5))
        assert reading.done, "a read of a healthy cluster does not end"
        return [block for block in blocks if reading.value.get(block.hash) is None]


FAULTS: tuple[Callable[[Cluster], None], ...] = (
    Cluster._crash,
    Cluster._stop,
    Cluster._freeze,
    Cluster._cut,
    Cluster._bad_weather,
    Cluster._bad_disk,
    Cluster._rot,
    Cluster._lose_client,
)


def _chains_of(key_space: KeySpace) -> list[tuple[BlockRef, ...]]:
    """A small tree: three conversations that share their first four blocks, and one of its own."""
    root = root_hash(namespace=key_space.namespace, model_digest=b"m", layout=key_space.layout)
    shared = [1] * 8
    chains = [chain_of(shared + [branch] * 16, block_tokens=2, root=root) for branch in range(3)]
    return [*chains, chain_of([9] * 30, block_tokens=2, root=root)]


def run_cluster(seed: int, storm: Storm) -> Cluster:
    """The finished run, or AssertionError with the seed and the last events."""
    cluster: Cluster | None = None
    try:
        cluster = Cluster(seed, storm)
        cluster.run()
    except Exception as error:
        last = "\n".join(cluster.story()) if cluster is not None else ""
        raise AssertionError(f"seed {seed}, {storm}: {error!r}\n{last}") from error
    return cluster

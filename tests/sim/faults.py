"""What a storm brings over a simulated cluster, and what puts it right again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sim import registry
from sim.network import CALM, Weather
from sim.store_node import StoreNode

from kvstore.units import Nanos, milliseconds, seconds

if TYPE_CHECKING:
    from sim.cluster import Cluster


class Faults:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._rng = cluster.rng
        self._mended: list[Callable[[], None]] = []
        """What puts right each fault that is in force."""
        # Each run has its own mood: some faults often, some never. Runs that do a bit of everything all look alike.
        self.mood = [self._rng.choice((0.0, 1.0, 1.0, 4.0)) for _ in FAULTS]
        if not any(self.mood):
            self.mood[0] = 1.0

    def end(self) -> None:
        mended, self._mended = self._mended, []
        for mend in mended:
            mend()

    def next(self) -> None:
        """And so on, as long as the storm lasts."""
        if self._cluster.stormy:
            self._rng.choices(FAULTS, self.mood)[0](self)
            self._cluster.timeline.after(self._rng.randrange(2 * self._cluster.storm.pause_between_faults), self.next)

    def _for_a_while(self, longest: Nanos, mend: Callable[[], None]) -> None:
        """`mend` once, after a while or at the end of the storm."""
        self._mended.append(mend)

        def end() -> None:
            if mend in self._mended:
                self._mended.remove(mend)
                mend()

        self._cluster.timeline.after(self._rng.randrange(milliseconds(200), longest), end)

    def _some_node(self) -> StoreNode | None:
        awake = [node for node in self._cluster.nodes.values() if node.is_up and not node.is_frozen and not node.stopping]
        return self._rng.choice(awake) if awake else None

    def _crash(self) -> None:
        node = self._some_node()
        if node is None:
            return
        if self._rng.random() < 0.5:
            node.crash_soon = True  # between two instructions of one event
        else:
            node.crash(silent=self._rng.random() < 0.3)

        def back() -> None:
            node.crash_soon = False
            self._cluster.start(node)

        longest = self._rng.choice((milliseconds(300), seconds(4), seconds(12)))  # faster than a heartbeat, than a death, or slower
        self._for_a_while(longest, back)

    def _stop(self) -> None:
        node = self._some_node()
        if node is not None:
            node.stop()
            self._for_a_while(seconds(15), lambda: self._cluster.start(node))

    def _freeze(self) -> None:
        node = self._some_node()
        if node is not None:
            node.freeze(self._rng.randrange(milliseconds(100), seconds(10)))

    def _cut(self) -> None:
        """Everybody, or one, from one node: both ways, or one."""
        node_id = self._rng.choice(tuple(self._cluster.nodes))
        all_others = [name for name in (*self._cluster.clients, *self._cluster.nodes, registry.NAME) if name != node_id]
        others = all_others if self._rng.random() < 0.5 else [self._rng.choice(all_others)]
        ways = self._rng.choice(((True, True), (True, False), (False, True)))
        links = [(other, node_id) for other in others if ways[0]] + [(node_id, other) for other in others if ways[1]]
        for link in links:
            self._cluster.network.cut(*link)

        def heal() -> None:
            for link in links:
                self._cluster.network.heal(*link)

        self._for_a_while(seconds(8), heal)

    def _bad_weather(self) -> None:
        rng = self._rng
        self._cluster.network.weather = Weather(
            lost=rng.choice((0.0, 0.05, 0.2)),
            repeated=rng.choice((0.0, 0.1, 0.3)),
            spoiled=rng.choice((0.0, 0.05)),
            slow=rng.choice((0.0, 0.1, 0.3)),
        )

        def clear_up() -> None:
            self._cluster.network.weather = CALM

        self._for_a_while(seconds(8), clear_up)

    def _bad_disk(self) -> None:
        node = self._rng.choice(tuple(self._cluster.nodes.values()))
        node.fault_rate = self._rng.choice((0.0, 0.05, 0.3))
        node.slow_disk = self._rng.random() < 0.5
        node.disk_full = self._rng.random() < 0.3

        def repair() -> None:
            node.fault_rate, node.slow_disk, node.disk_full = 0.0, False, False

        self._for_a_while(seconds(8), repair)

    def _rot(self) -> None:
        node = self._rng.choice(tuple(self._cluster.nodes.values()))
        for _ in range(self._rng.choice((1, 3, 10))):
            self._cluster.log(node.node_id, f"FLIP {node.media.flip_bit()}")

    def _lose_client(self) -> None:
        name = self._rng.choice(tuple(self._cluster.clients))
        self._cluster.log(name, "KILLED")
        self._cluster.registry.followers.pop(name)
        self._cluster.clients.pop(name).kill()
        self._cluster.new_client()

    def _join(self) -> None:
        if len(self._cluster.nodes) < self._cluster.storm.nodes + self._cluster.storm.newcomers:
            self._cluster.new_node()

    def _drain(self) -> None:
        """Until it says that it is safe to stop, and then it is stopped; an operator who loses patience starts it anew."""
        node = self._some_node()
        if node is None or sum(each.is_up for each in self._cluster.nodes.values()) <= self._cluster.storm.replicas + 1:
            return
        boots, impatient = node.boots, self._cluster.timeline.now + self._rng.randrange(seconds(4), seconds(15))
        self._cluster.log(node.node_id, "DRAIN")
        node.upkeep.processes.spawn(node.upkeep.drain())

        def look() -> None:
            if not node.is_up or node.boots != boots or node.stopping:
                return
            progress = node.upkeep.handover.drain_progress()
            if progress is not None and progress.safe_to_stop:
                self._cluster.log(node.node_id, "SAFE TO STOP")
                node.stop()
                self._for_a_while(seconds(15), lambda: self._cluster.start(node))
            elif self._cluster.timeline.now > impatient or not self._cluster.stormy:
                node.crash()
                self._cluster.start(node)
            else:
                self._cluster.timeline.after(milliseconds(250), look)

        look()

    def _empty_registry(self) -> None:
        """Now, or as soon as a member has taken a step that the others then never see."""
        which = self._cluster.registry
        self._cluster.log(registry.NAME, "EMPTIED")
        if self._rng.random() < 0.5:
            which.lose_everything()
        else:
            which.ends_after_a_step = True

            def not_any_more() -> None:
                which.ends_after_a_step = False

            self._for_a_while(seconds(8), not_any_more)


FAULTS: tuple[Callable[[Faults], None], ...] = (
    Faults._crash,
    Faults._stop,
    Faults._freeze,
    Faults._cut,
    Faults._bad_weather,
    Faults._bad_disk,
    Faults._rot,
    Faults._lose_client,
    Faults._join,
    Faults._drain,
    Faults._empty_registry,
)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstore.core.copies import CopyState, copy_at
from kvstore.core.events.gets import AcquiredBlock, ReadStatus
from kvstore.core.events.moves import CopyExtent, CopyOutcome, DropRecoded, RecodeExtent
from kvstore.core.events.puts import AnswerReserve, CommitStatus, ReserveItem, ReserveRequested, ReserveStatus
from kvstore.core.events.removals import DeleteRequested
from kvstore.core.events.stop import StopRequested
from kvstore.core.events.verification import AnswerVerify, CopyVerdict, ExtentsVerified, VerifyExtents, VerifyOutcome, VerifyRequested
from kvstore.core.events.wishes import AnswerPin, PinKind, PinRequested
from kvstore.core.extent import ALIGNMENT as PAGE
from kvstore.core.extent import Extent, Tier
from kvstore.core.index import Entry, Index
from kvstore.core.step_down import EVERYBODY, StepDownPolicy, StepDownRule
from kvstore.errors import ConfigError
from kvstore.ids import AS_SEALED, BEHIND_RECODED, Generation, KeySpace, Namespace, RungCode
from kvstore.units import Nanos, seconds

INT5, INT4 = RungCode(7), RungCode(4)
EVERY_BLOCK = {EVERYBODY: (StepDownRule(rung=INT4),)}
SIZE = 3 * PAGE


def only(said: list, kind: type) -> Any:
    (found,) = [one for one in said if isinstance(one, kind)]
    return found


def without_host_copy(node: Any, block: Any) -> None:
    """The host tier's room goes to others until this block is on the SSD alone."""
    entry = node.state._stock.index.get(node_space(node), block.hash)
    node.state._stock.evict(entry, Tier.HOST, "room")
    node.state._stock.out.clear()


def node_space(node: Any) -> KeySpace:
    return next(iter(node.state._stock.index.key_spaces()))


def stepped_node(ssd_node: Callable, block: Any, **config: Any) -> Any:
    node = ssd_node(16, step_down=EVERY_BLOCK, **config)
    node.put(block, size=SIZE)
    while any(isinstance(one, RecodeExtent) for one in node.held) is False:
        node.written()
    node.recoded(length=PAGE, checksum=99)
    node.finish_io()
    return node


def test_a_demotion_writes_what_the_step_down_made_in_the_room_that_this_takes(ssd_node: Callable, chain: Callable) -> None:
    (block,) = chain(1)
    node = ssd_node(16, step_down=EVERY_BLOCK)
    node.put(block, size=SIZE)
    node.written()
    recode = only(node.held, RecodeExtent)
    assert (recode.rung, recode.source.length) == (INT4, SIZE)
    copy = only(node.recoded(length=PAGE, checksum=99), CopyExtent)
    assert (copy.recoded, copy.checksum, copy.target.length) == (recode.operation, 99, PAGE)
    node.copied()
    assert [note for note in node.notes() if "step" in note] == ["stepped_down:demote"]
    entry = node.state._stock.index.get(node_space(node), block.hash)
    assert [(one.tier, one.payload_bytes, one.rung) for one in entry.placed] == [
        (Tier.HOST, SIZE, AS_SEALED),
        (Tier.SSD, PAGE, INT4),
    ]


def test_a_reader_gets_the_copy_as_sealed_while_there_is_one_and_then_is_told_the_rung(ssd_node: Callable, chain: Callable) -> None:
    (block,) = chain(1)
    node = stepped_node(ssd_node, block)
    assert not node.acquire(block).recoded
    node.wait(seconds(60))
    without_host_copy(node, block)
    found = node.acquire(block)
    assert (found.blocks[0].payload_bytes, found.blocks[0].checksum, found.recoded) == (PAGE, 99, {0: INT4})
    item = node.read(found.lease_id, block).items[0]
    assert (item.status, item.extent.length, item.checksum) == (ReadStatus.OK, PAGE, 99)


def test_to_a_reader_of_blocks_as_sealed_a_re_coded_one_is_missing(ssd_node: Callable, chain: Callable) -> None:
    (block,) = chain(1)
    node = stepped_node(ssd_node, block)
    assert node.acquire(block, as_sealed=True).lease_id
    node.wait(seconds(60))
    without_host_copy(node, block)
    assert not node.acquire(block, as_sealed=True).lease_id


def test_a_lease_on_a_copy_as_sealed_never_reads_the_re_coded_one(ssd_node: Callable, chain: Callable) -> None:
    (block,) = chain(1)
    node = stepped_node(ssd_node, block)
    lease = node.acquire(block).lease_id
    node.release(lease, corrupt=(block,))
    lease = node.acquire(block).lease_id
    bad = next(one for one in node.held if isinstance(one, VerifyExtents) and one.extents[0].tier is Tier.HOST)
    node.held.remove(bad)
    node.send(ExtentsVerified(operation=bad.operation, outcomes=(VerifyOutcome.CORRUPT,)))
    assert node.read(lease, block).items[0].status is ReadStatus.IO_ERROR, "it was promised other bytes"
    assert node.acquire(block).recoded == {0: INT4}


def test_a_restart_finds_length_checksum_and_rung_of_the_copy(ssd_node: Callable, chain: Callable) -> None:
    (block,) = chain(1)
    again = stepped_node(ssd_node, block).restart()
    found = again.acquire(block)
    assert (found.blocks, found.recoded) == ((AcquiredBlock(PAGE, 99, Tier.SSD),), {0: INT4})


def test_a_promoted_copy_stays_what_it_is_and_a_scrub_knows_it(ssd_node: Callable, chain: Callable) -> None:
    (block,) = chain(1)
    node = stepped_node(ssd_node, block).restart()
    for _ in range(2):
        node.read(node.acquire(block).lease_id, block)
    node.copied()
    entry = node.state._stock.index.get(node_space(node), block.hash)
    assert [(one.tier, one.rung) for one in entry.placed] == [(Tier.HOST, INT4), (Tier.SSD, INT4)]
    for tier in (Tier.HOST, Tier.SSD):
        said = node.send(VerifyRequested(request_id=node.request(), key_space=node_space(node), hash=block.hash, tier=tier))
        assert only(said, VerifyExtents).checksums == (99,)
        assert only(node.verified(), AnswerVerify).verdict is CopyVerdict.GOOD


def test_what_cannot_be_stepped_down_is_written_as_it_is(ssd_node: Callable, chain: Callable) -> None:
    (block,) = chain(1)
    node = ssd_node(16, step_down=EVERY_BLOCK)
    node.put(block, size=SIZE)
    node.written()
    copy = only(node.recoded(reason="no_tables"), CopyExtent)
    assert "not_stepped_down:no_tables" in node.notes()
    assert (copy.recoded, copy.target.length) == (None, SIZE)
    node.copied()
    assert node.state._stock.index.get(node_space(node), block.hash).ssd.rung == AS_SEALED


def test_what_was_made_of_a_block_that_is_deleted_meanwhile_is_given_up(ssd_node: Callable, chain: Callable) -> None:
    (block,) = chain(1)
    node = ssd_node(16, step_down=EVERY_BLOCK)
    node.put(block, size=SIZE)
    node.written()
    space = node_space(node)
    recode = only(node.held, RecodeExtent)
    node.send(DeleteRequested(request_id=node.request(), key_space=space, hashes=(block.hash,)))
    said = node.recoded()
    assert only(said, DropRecoded).recoded == recode.operation
    assert not [one for one in said if isinstance(one, CopyExtent)]
    assert node.state.status().tiers[0].used == 0


def test_a_failed_write_of_what_was_made_is_tried_again_from_the_start(ssd_node: Callable, chain: Callable) -> None:
    (block,) = chain(1)
    node = ssd_node(16, step_down=EVERY_BLOCK)
    node.put(block, size=SIZE)
    node.written()
    node.recoded()
    node.copied(CopyOutcome.TARGET_FAILED)
    assert not node.held
    node.wait(seconds(11))
    assert [type(one) for one in node.held] == [RecodeExtent]


def test_a_stop_saves_blocks_as_they_are(ssd_node: Callable, chain: Callable) -> None:
    (block,) = chain(1)
    node = ssd_node(16, step_down=EVERY_BLOCK, demote_above=1.0)
    node.put(block, size=SIZE)
    node.send(StopRequested(request_id=node.request()))
    node.written()
    assert [(one.recoded, one.target.length) for one in node.held if isinstance(one, CopyExtent)] == [(None, SIZE)]


def on_ssd_alone(ssd_node: Callable, block: Any, **config: Any) -> Any:
    """A node that has the block re-coded and not as sealed."""
    node = stepped_node(ssd_node, block, **config)
    node.wait(seconds(60))
    without_host_copy(node, block)
    return node


def test_a_put_of_what_is_here_re_coded_alone_brings_it_back_as_sealed(ssd_node: Callable, chain: Callable) -> None:
    (block,) = chain(1)
    node = on_ssd_alone(ssd_node, block)
    assert node.put(block, size=SIZE) == [CommitStatus.STORED]
    found = node.acquire(block, as_sealed=True)
    assert (found.blocks[0].payload_bytes, found.blocks[0].tier, found.recoded) == (SIZE, Tier.HOST, {})
    assert node.put(block, size=SIZE) == [ReserveStatus.EXISTS]
    node.finish_io()
    entry = node.state._stock.index.get(node_space(node), block.hash)
    assert [(one.tier, one.rung) for one in entry.placed] == [(Tier.HOST, AS_SEALED), (Tier.SSD, INT4)]


def test_who_leases_the_re_coded_copy_reads_on_when_a_better_one_comes(ssd_node: Callable, chain: Callable) -> None:
    (block,) = chain(1)
    node = on_ssd_alone(ssd_node, block)
    old = node.acquire(block)
    assert node.put(block, size=SIZE) == [CommitStatus.STORED]
    new = node.acquire(block)
    assert [(read.items[0].extent.length, read.items[0].checksum) for read in (node.read(old.lease_id, block),)] == [(PAGE, 99)]
    assert node.read(new.lease_id, block).items[0].extent.length == SIZE


def test_a_better_copy_keeps_pin_and_end_of_life_of_the_block(ssd_node: Callable, chain: Callable) -> None:
    first, second = chain(2)
    node = ssd_node(16, step_down=EVERY_BLOCK)
    node.put(first, size=SIZE, ttl=seconds(1000))
    node.put(second, size=SIZE)
    node.finish_io()
    space = node_space(node)
    pin = PinRequested(request_id=node.request(), key_space=space, hashes=(first.hash,), kind=PinKind.SOFT, ttl=seconds(500))
    node.ask(pin, AnswerPin)
    for block in (first, second):
        without_host_copy(node, block)
    assert node.put(first, second, size=SIZE, ttl=seconds(10)) == [CommitStatus.STORED] * 2
    assert [pinned.hash for pinned in node.state.pins()] == [first.hash]
    left = [owned.ttl for _, owned in node.listing()]
    assert sorted(left) == [0, seconds(1000)]


def test_a_re_coded_put_never_takes_the_place_of_what_is_here(ssd_node: Callable, chain: Callable) -> None:
    (block,) = chain(1)
    node = on_ssd_alone(ssd_node, block)
    for rung in (BEHIND_RECODED, INT4, INT5):
        items = (ReserveItem(block, PAGE, None, rung),)
        answer = node.ask(ReserveRequested(request_id=node.request(), key_space=node_space(node), items=items), AnswerReserve)
        assert answer.grants[0].status is ReserveStatus.EXISTS


def test_a_re_coded_copy_that_a_better_one_replaced_does_not_outlive_a_delete(ssd_node: Callable, chain: Callable) -> None:
    (block,) = chain(1)
    node = on_ssd_alone(ssd_node, block)
    space = node_space(node)
    node.put(block, size=SIZE)
    node.send(DeleteRequested(request_id=node.request(), key_space=space, hashes=(block.hash,)))
    node.finish_io()
    assert not node.restart().acquire(block).lease_id


def test_a_put_may_say_that_it_was_computed_behind_re_coded_blocks(host_node: Callable, chain: Callable, space: KeySpace) -> None:
    (block,) = chain(1)
    node = host_node(4)
    reserve = ReserveRequested(request_id=node.request(), key_space=space, items=(ReserveItem(block, PAGE, None, BEHIND_RECODED),))
    node.commit(node.ask(reserve, AnswerReserve).grants[0].write_token)
    node.verified()
    assert node.acquire(block).recoded == {0: BEHIND_RECODED}
    assert not node.acquire(block, as_sealed=True).lease_id
    assert node.listing()[0][1].rung == BEHIND_RECODED


class Policy:
    def __init__(self, space: KeySpace, rules: dict[Namespace, tuple[StepDownRule, ...]]) -> None:
        self.index = Index()
        self.policy = StepDownPolicy(rules, self.index)
        self.space = space
        self.rank = 0

    def list(self, block: Any, now: int) -> Entry:
        entry = Entry(key_space=self.space, block=block, length=1, checksum=1)
        self.rank += 1
        entry.last_used = self.rank
        self.index.add(entry)
        self.policy.listed(entry, Nanos(now))
        return entry

    def rung(self, entry: Entry, now: int, *, at: RungCode = AS_SEALED) -> RungCode | None:
        copy = copy_at(Extent(Tier.HOST, 0, 0, 1, Generation(1)), CopyState.READABLE, rung=at)
        return self.policy.rung_for(entry, copy, Nanos(now))


def test_the_recent_end_of_a_chain_keeps_its_bits(chain: Callable, space: KeySpace) -> None:
    rules = {EVERYBODY: (StepDownRule(rung=INT5), StepDownRule(rung=INT4, keep_last=3))}
    policy = Policy(space, rules)
    entries = [policy.list(block, 0) for block in chain(8)]
    assert [policy.rung(entry, 0) for entry in entries] == [INT4] * 5 + [INT5] * 3
    assert policy.rung(entries[0], 0, at=INT4) is None, "it is there already"


def test_a_block_is_old_when_it_was_not_used_for_so_long(chain: Callable, space: KeySpace) -> None:
    policy = Policy(space, {EVERYBODY: (StepDownRule(rung=INT4, after=seconds(10)),)})
    first, second = (policy.list(block, at) for block, at in zip(chain(2), (0, seconds(5)), strict=True))
    assert [policy.rung(entry, seconds(9)) for entry in (first, second)] == [None, None]
    assert [policy.rung(entry, seconds(11)) for entry in (first, second)] == [INT4, None]
    policy.rank += 1
    first.last_used = policy.rank
    policy.policy.used(first, Nanos(seconds(12)))
    assert [policy.rung(entry, seconds(16)) for entry in (first, second)] == [None, INT4]


def test_a_namespace_has_rules_of_its_own(chain: Callable, space: KeySpace) -> None:
    for rules, expected in (
        (EVERY_BLOCK, INT4),
        (EVERY_BLOCK | {space.namespace: ()}, None),
        ({Namespace("other"): EVERY_BLOCK[EVERYBODY]}, None),
    ):
        policy = Policy(space, rules)
        assert policy.rung(policy.list(chain(1)[0], 0), 0) == expected


def test_a_rule_that_says_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="nothing can be re-coded"):
        StepDownRule(rung=AS_SEALED)
    with pytest.raises(ConfigError, match="keep_last"):
        StepDownRule(rung=INT4, keep_last=-1)

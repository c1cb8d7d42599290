import dataclasses
from random import Random

from kvstore.core.events.notes import NoteKind
from kvstore.core.journal import Journal
from kvstore.core.picture import BlockEvent, BlockEventKind, Picture
from kvstore.ids import BlockHash, BlockRef, BootId, Epoch, KeySpace, LayoutFingerprint, Namespace, NodeId, StripeId

SPACE = KeySpace(Namespace("n"), LayoutFingerprint(bytes(32)))
BLOCK = BlockRef(BlockHash(bytes(32)), BlockHash(bytes(32)), StripeId(bytes(32)), 0)


def test_a_journal_gives_what_came_after_and_says_when_it_has_forgotten_some() -> None:
    journal = Journal(most=4)
    assert journal.after(0, most=10) == []
    for _ in range(6):
        journal.add(NoteKind.STORED, "", SPACE, BLOCK)
    assert journal.after(1, most=10) is None
    assert [entry.sequence for entry in journal.after(2, most=10) or ()] == [3, 4, 5, 6]
    assert [entry.sequence for entry in journal.after(3, most=2) or ()] == [4, 5]
    assert journal.after(6, most=10) == []
    assert journal.after(7, most=10) is None


def event(kind: BlockEventKind, sequence: int, *, boot: int = 1) -> BlockEvent:
    named = kind in (BlockEventKind.HELD, BlockEventKind.STORED, BlockEventKind.EVICTED)
    return BlockEvent(
        kind=kind,
        node_id=NodeId("s1"),
        boot_id=BootId(bytes([boot] * 16)),
        epoch=Epoch(1),
        sequence=sequence,
        key_space=SPACE if named else None,
        block=BLOCK if named else None,
    )


def test_a_picture_is_exact_from_the_snapshot_on_until_something_was_missed() -> None:
    picture = Picture()
    for kind, sequence in ((BlockEventKind.HELD, 3), (BlockEventKind.EVICTED, 4)):
        picture.see(event(kind, sequence))
        assert not picture.exact
    picture.see(event(BlockEventKind.SNAPSHOT, 4))
    assert (picture.exact, picture.blocks) == (True, set())
    picture.see(event(BlockEventKind.STORED, 5))
    assert (picture.exact, picture.blocks) == (True, {(SPACE, BLOCK.hash)})
    picture.see(event(BlockEventKind.STORED, 7))
    assert not picture.exact
    picture.see(event(BlockEventKind.SNAPSHOT, 7))
    picture.see(event(BlockEventKind.STORED, 1, boot=2))
    assert not picture.exact
    picture.see(event(BlockEventKind.SNAPSHOT, 1, boot=2))
    picture.see(event(BlockEventKind.GAP, 1, boot=2))
    assert (picture.exact, picture.blocks) == (False, set())


def test_a_picture_is_what_the_node_holds_or_says_that_it_is_not_whatever_is_lost_repeated_or_comes_too_early(seed: int) -> None:
    rng = Random(seed)
    exact = inexact = 0
    for _ in range(200):
        held: set[BlockHash] = set()
        truth, sent = [frozenset(held)], []
        for sequence in range(1, 30):
            digest = BlockHash(bytes([rng.randrange(4)] * 32))
            kind = BlockEventKind.EVICTED if digest in held else BlockEventKind.STORED
            held ^= {digest}
            truth.append(frozenset(held))
            sent.append(dataclasses.replace(event(kind, sequence), block=BLOCK._replace(hash=digest)))
        at = rng.randrange(28)
        match rng.randrange(4):
            case 0:
                del sent[at]
            case 1:
                sent.insert(at + rng.randint(1, 5), sent[at])
            case 2:
                sent[at], sent[at + 1] = sent[at + 1], sent[at]
            case _:
                pass
        picture = Picture()
        picture.see(event(BlockEventKind.GAP, 0))
        picture.see(event(BlockEventKind.SNAPSHOT, 0))
        for each in sent:
            picture.see(each)
            if picture.exact:
                assert {digest for _, digest in picture.blocks} == truth[picture.sequence]
        exact, inexact = exact + picture.exact, inexact + (not picture.exact)
        picture.see(event(BlockEventKind.GAP, 29))
        for digest in held:
            picture.see(dataclasses.replace(event(BlockEventKind.HELD, 29), block=BLOCK._replace(hash=digest)))
        picture.see(event(BlockEventKind.SNAPSHOT, 29))
        assert picture.exact
        assert {digest for _, digest in picture.blocks} == held
    assert exact > 20
    assert inexact > 80

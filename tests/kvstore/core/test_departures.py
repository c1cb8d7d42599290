from kvstore.core.departures import Departures
from kvstore.ids import BlockHash, KeySpace, LayoutFingerprint, Namespace
from kvstore.units import Nanos

SPACE = KeySpace(Namespace("n"), LayoutFingerprint(bytes(32)))


def block(number: int) -> BlockHash:
    return BlockHash(bytes([number] * 32))


def test_the_latest_departures_are_remembered_and_the_others_counted() -> None:
    departures = Departures(most=2)
    for number in range(3):
        departures.gone(SPACE, block(number), "room", Nanos(number))
    assert departures.find(SPACE, block(0)) is None
    assert departures.forgotten == 1
    departures.gone(SPACE, block(1), "operator", Nanos(9))
    assert departures.find(SPACE, block(1)) == ("operator", 9)
    departures.gone(SPACE, block(4), "room", Nanos(10))
    assert departures.find(SPACE, block(2)) is None, "that of block 1 was renewed"
    departures.back(SPACE, block(1))
    assert departures.find(SPACE, block(1)) is None
    assert departures.find(KeySpace(Namespace("m"), SPACE.layout), block(4)) is None

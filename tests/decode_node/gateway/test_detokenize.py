from __future__ import annotations

import random
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from decode_node.gateway.detokenize import Detokenizer, StopScanner

TEXTS = (
    "plain text",
    "你好，世界！储藏室里放着厨房做好的东西。",
    "Привет, мир 🙂🚀 こんにちは",
    "a\u0301 e\u0301 👩‍👩‍👧‍👦 \ufffd kept",
    "é" * 100,
)


def bytewise(token_ids: Sequence[int]) -> str:
    """A byte-level decoder: token id = byte."""
    return bytes(token_ids).decode("utf-8", errors="replace")


def grouped(ends: Sequence[bytes]) -> tuple[list[bytes], list[int]]:
    pieces = sorted(set(ends))
    return pieces, [pieces.index(end) for end in ends]


def shown(token_ids: Sequence[int], decode=bytewise) -> list[str]:
    detokenizer = Detokenizer(decode)
    return [*map(detokenizer.push, token_ids), detokenizer.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_single_bytes_come_out_as_whole_characters(text: str) -> None:
    pieces = shown(list(text.encode()))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)


@pytest.mark.parametrize("text", TEXTS)
def test_every_split_into_two_tokens_gives_the_same_text(text: str) -> None:
    data = text.encode()
    for border in range(len(data) + 1):
        pieces, ids = grouped([data[:border], data[border:]])
        got = shown(ids, lambda token_ids, pieces=pieces: b"".join(pieces[i] for i in token_ids).decode("utf-8", errors="replace"))
        assert "".join(got) == text
        if "\ufffd" not in text:
            assert all("\ufffd" not in piece for piece in got), f"broken at byte {border}"


@given(st.lists(st.integers(0, 255), max_size=300))
def test_any_bytes_come_out_as_the_decoder_shows_them_whole(data: list[int]) -> None:
    assert "".join(shown(data)) == bytewise(data)


@given(st.text(max_size=60), st.data())
def test_any_split_of_any_text_gives_the_text(text: str, data: st.DataObject) -> None:
    raw = text.encode()
    borders = sorted(data.draw(st.sets(st.integers(0, len(raw)), max_size=12)))
    parts = [raw[start:end] for start, end in zip([0, *borders], [*borders, len(raw)], strict=True)]
    pieces, ids = grouped(parts)
    got = shown(ids, lambda token_ids: b"".join(pieces[i] for i in token_ids).decode("utf-8", errors="replace"))
    assert "".join(got) == text


def test_half_a_character_before_the_text_costs_it_nothing() -> None:
    """A decoder with byte fallback shows two bytes of three as two signs, and all three as one: where the text begins would move."""

    def decode(token_ids: Sequence[int]) -> str:
        return re.sub("[\udc80-\udcff]", "\ufffd", bytes(token_ids).decode("utf-8", errors="surrogateescape"))

    data = "你好 and more".encode()
    detokenizer = Detokenizer(decode, context=data[:5])
    assert "".join([*map(detokenizer.push, data[5:]), detokenizer.flush()]) == "\ufffd and more"


def test_an_unfinished_character_is_held_until_the_end_of_the_answer() -> None:
    detokenizer = Detokenizer(bytewise)
    first, second, _ = "你".encode()
    assert detokenizer.push(first) == ""
    assert detokenizer.push(second) == ""
    assert detokenizer.flush() == "\ufffd"


def test_a_long_answer_is_not_decoded_again_from_its_start() -> None:
    longest = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return bytewise(token_ids)

    text = "长文本🙂" * 400
    assert "".join(shown(list(text.encode()), decode)) == text
    assert longest <= 64


def test_a_real_byte_level_tokenizer_streams_every_script(seed: int) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    for text in TEXTS:
        pieces = shown(tokenizer.encode(text).ids, tokenizer.decode)
        assert "".join(pieces) == text
    rng = random.Random(seed)
    noise = [rng.randrange(len(alphabet)) for _ in range(2000)]
    assert "".join(shown(noise, tokenizer.decode)) == tokenizer.decode(noise), f"seed {seed}"


def scanned(pieces: Sequence[str], stops: Sequence[str]) -> tuple[list[str], bool]:
    scanner = StopScanner(stops)
    out = [scanner.push(piece) for piece in pieces]
    return [*out, scanner.flush()], scanner.stopped


@pytest.mark.parametrize(
    ("text", "stops", "before"),
    [
        ("one two three", [" two"], "one"),
        ("你好，世界！再见", ["世界"], "你好，"),
        ("aaab", ["aab"], "a"),
        ("abcabd", ["abd"], "abc"),
        ("x\n\nUser: y", ["\n\nUser", "User"], "x"),
        ("🙂🚀🙂", ["🚀"], "🙂"),
        ("nothing here", ["zzz"], "nothing here"),
    ],
)
def test_a_stop_string_is_found_across_every_border(text: str, stops: list[str], before: str) -> None:
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            out, stopped = scanned([text[:first], text[first:second], text[second:]], stops)
            assert "".join(out) == before
            assert stopped == (before != text)


@given(st.text(alphabet="abc", max_size=30), st.lists(st.text(alphabet="abc", min_size=1, max_size=4), min_size=1, max_size=4), st.data())
def test_where_the_text_is_cut_does_not_change_what_is_shown(text: str, stops: list[str], data: st.DataObject) -> None:
    borders = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    parts = [text[start:end] for start, end in zip([0, *borders], [*borders, len(text)], strict=True)]
    whole, stopped = scanned([text], stops)
    cut, stopped_cut = scanned(parts, stops)
    assert ("".join(cut), stopped_cut) == ("".join(whole), stopped)
    assert stopped == any(stop in text for stop in stops)
    if stopped:
        assert not any(stop in "".join(cut) for stop in stops)
    # Nothing that was shown early may turn out to lie behind the stop.
    assert text.startswith("".join(cut))


def test_text_after_the_stop_never_leaks() -> None:
    scanner = StopScanner(["END"])
    assert scanner.push("before EN") == "before "
    assert scanner.push("D after") == ""
    assert scanner.push("more") == ""
    assert scanner.flush() == ""


def test_a_beginning_of_a_stop_that_was_none_is_shown() -> None:
    scanner = StopScanner(["END"])
    assert scanner.push("E") == ""
    assert scanner.push("N") == ""
    assert scanner.push("X") == "ENX"
    assert scanner.push("E") == ""
    assert scanner.flush() == "E"

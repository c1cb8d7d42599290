from __future__ import annotations

import pytest

from decode_node.gateway.tokenization import TextTooLong, encode_within


class CountingTokenizer:
    """A token for every `width` characters; counts what it is given."""

    vocab_size = 1 << 21

    def __init__(self, width: int) -> None:
        self.width = width
        self.encoded_characters = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.encoded_characters += len(text)
        ids = [ord(text[start]) for start in range(0, len(text), self.width)]
        return [0, *ids] if add_special_tokens else ids

    def decode(self, token_ids):
        raise AssertionError("not asked for here")

    def render_chat(self, messages):
        raise AssertionError("not asked for here")


@pytest.mark.parametrize("width", [1, 4, 100])
@pytest.mark.parametrize("tokens", [0, 1, 99, 100, 150, 199])
def test_a_text_that_fits_or_nearly_fits_is_encoded_as_ever(width: int, tokens: int) -> None:
    text = "".join(chr(97 + index % 26) for index in range(tokens * width))
    assert encode_within(CountingTokenizer(width), text, limit=100) == CountingTokenizer(width).encode(text)
    plain = CountingTokenizer(width).encode(text, add_special_tokens=False)
    assert encode_within(CountingTokenizer(width), text, limit=100, add_special_tokens=False) == plain


@pytest.mark.parametrize("width", [1, 4, 16, 100])
def test_a_text_far_too_long_costs_no_more_than_one_of_a_few_times_the_limit(width: int) -> None:
    tokenizer = CountingTokenizer(width)
    with pytest.raises(TextTooLong):
        encode_within(tokenizer, "x" * 10_000_000, limit=100)
    assert tokenizer.encoded_characters <= 100 * max(16, 8 * width)

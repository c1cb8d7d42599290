from __future__ import annotations

import pytest

from decode_node.gateway.transcript import PositionFault, Transcript


def test_tokens_are_taken_once_and_in_order() -> None:
    transcript = Transcript([1, 2], max_tokens=10)
    transcript.take(token_id=7, position=0)
    transcript.take(token_id=8, position=1)
    assert list(transcript.generated_token_ids) == [7, 8]
    assert len(transcript) == 4


@pytest.mark.parametrize("position", [0, 1, 3, 99])
def test_a_doubled_or_skipped_position_is_refused_and_changes_nothing(position: int) -> None:
    transcript = Transcript([1], max_tokens=10)
    transcript.take(token_id=7, position=0)
    transcript.take(token_id=8, position=1)
    with pytest.raises(PositionFault):
        transcript.take(token_id=9, position=position)
    assert list(transcript.generated_token_ids) == [7, 8]
    transcript.take(token_id=9, position=2)


def test_a_token_beyond_the_longest_answer_is_refused() -> None:
    transcript = Transcript([1], max_tokens=1)
    transcript.take(token_id=7, position=0)
    with pytest.raises(PositionFault, match="at most 1"):
        transcript.take(token_id=8, position=1)

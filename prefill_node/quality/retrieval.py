"""A key-value retrieval set: numbers stated in a long list, asked for behind it. Damage that averages hide shows up here."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from kvstore.codec import BlockCodec
from prefill_node.model.tokenizer import Tokenizer
from prefill_node.quality.judge import through_payloads
from prefill_node.quality.probe import Probe

_NAMES = [
    "apple",
    "bridge",
    "candle",
    "dragon",
    "engine",
    "forest",
    "garden",
    "harbor",
    "island",
    "jacket",
    "kettle",
    "ladder",
    "market",
    "needle",
    "orange",
    "pencil",
    "quarry",
    "ribbon",
    "saddle",
    "temple",
    "umbrella",
    "valley",
    "window",
    "yellow",
    "anchor",
    "basket",
    "copper",
    "desert",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalSet:
    prefix: torch.Tensor
    """KV of the list, [layers, 2, kv_heads, length, head_dim] bfloat16."""
    questions: list[int]
    """Questions with their answers, one after the other."""
    answers: list[tuple[int, int]]
    """For each question (first, end): the rows of `questions` that predict its answer."""


def make_set(probe: Probe, tokenizer: Tokenizer, *, seed: int = 0, questions: int = 12) -> RetrievalSet:
    """The same list and questions for a seed. Cost: a prefill of some 500 tokens."""
    rng = random.Random(seed)
    numbers = {name: str(rng.randrange(1000, 10000)) for name in _NAMES}
    text = "Here is a list of codes.\n" + "".join(f"The code of the {name} is {number}.\n" for name, number in numbers.items())
    asked = rng.sample(_NAMES, questions)
    rows: list[int] = []
    answers = []
    for name in asked:
        rows += tokenizer.encode(f"The code of the {name} is", add_special_tokens=False)
        answer = tokenizer.encode(f" {numbers[name]}", add_special_tokens=False)
        answers.append((len(rows) - 1, len(rows) + len(answer) - 1))
        rows += [*answer, *tokenizer.encode(".\n", add_special_tokens=False)]
    prefix = probe.observe(tokenizer.encode(text)).kv.bfloat16()
    return RetrievalSet(prefix=prefix, questions=rows, answers=answers)


def share_found(probe: Probe, items: RetrievalSet, codec: BlockCodec | None) -> float:
    """Share of the questions whose answer is the model's first choice, token for token; None: with unencoded KV."""
    prefix = items.prefix if codec is None else through_payloads(codec, items.prefix)[0]
    said = probe.observe(items.questions, prefix=prefix.float(), score=True).log_probabilities
    assert said is not None
    choice = said.argmax(-1).tolist()
    found = [choice[first:end] == items.questions[first + 1 : end + 1] for first, end in items.answers]
    return sum(found) / len(found)

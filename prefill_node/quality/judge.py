"""How much a rung costs: KV of a prefix through real payloads and back, and what the model then makes of the text behind it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvstore.codec import BlockCodec
from prefill_node.quality.probe import Probe


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A stretch of text with the numbers of the model on unencoded KV (rounded to the blocks' dtype, as an engine holds it)."""

    prefix: torch.Tensor
    """[layers, 2, kv_heads, length, head_dim] bfloat16."""
    token_ids: list[int]
    """Behind the prefix."""
    log_probabilities: torch.Tensor
    """[tokens, vocabulary] float32."""
    continuation: list[int]
    """What the model says greedily behind the prefix and its last token; empty where that was not asked for."""
    last_token: int
    """The token that `continuation` follows."""
    prefill_s: float
    """CPU seconds a token, of all threads, in which the model made the prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """One rung on one window."""

    payload_bytes: int
    elements: int
    divergences: np.ndarray
    """float64 [tokens]: KL divergence from the unencoded model, in nats."""
    losses: np.ndarray
    """float64 [tokens - 1]: nats by which the true next token became less likely."""
    agreements: np.ndarray
    """bool [tokens]: the most likely token stayed the same."""
    first_divergence: int | None
    """How many greedy tokens stay the same; None when all that were tried did, or none was tried."""


@dataclass(slots=True)
class Speed:
    """Seconds of this thread's CPU time on a block; the fastest one counts, the machine being shared."""

    encode: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


def open_window(probe: Probe, token_ids: Sequence[int], *, prefix_tokens: int, greedy_tokens: int = 0) -> Window:
    """Cost: a prefill of the window, and `greedy_tokens` steps of one token."""
    ids = list(token_ids)
    began = time.process_time()
    prefix = probe.observe(ids[:prefix_tokens]).kv.bfloat16()
    prefill_s = (time.process_time() - began) / prefix_tokens
    scored = probe.observe(ids[prefix_tokens:], prefix=prefix.float(), score=True).log_probabilities
    assert scored is not None
    continuation: list[int] = []
    grown, last = prefix.float(), ids[prefix_tokens]
    for _ in range(greedy_tokens):
        step = probe.observe([last], prefix=grown, score=True)
        assert step.log_probabilities is not None
        last = int(step.log_probabilities[-1].argmax())
        continuation.append(last)
        grown = torch.cat([grown, step.kv], dim=3)
    return Window(
        prefix=prefix,
        token_ids=ids[prefix_tokens:],
        log_probabilities=scored,
        continuation=continuation,
        last_token=ids[prefix_tokens],
        prefill_s=prefill_s,
    )


def through_payloads(codec: BlockCodec, prefix: torch.Tensor, speed: Speed | None = None) -> tuple[torch.Tensor, int, int]:
    """(what the prefix's full blocks decode to, bytes of their payloads, elements in them); a tail that fills no block stays."""
    bits = prefix.contiguous().view(torch.int16).numpy().copy()
    size = codec.layout.block_tokens
    total = elements = 0
    for start in range(0, bits.shape[3] // size * size, size):
        block = np.ascontiguousarray(bits[..., start : start + size, :]).view(np.uint16)
        began = time.thread_time()
        payload = codec.encode(block, start_position=start)
        encoded = time.thread_time()
        codec.decode_into(payload, block, start_position=start)
        if speed is not None:
            speed.encode.append(encoded - began)
            speed.decode.append(time.thread_time() - encoded)
        bits[..., start : start + size, :] = block.view(np.int16)
        total += len(payload)
        elements += block.size
    return torch.from_numpy(bits).view(torch.bfloat16), total, elements


def score(probe: Probe, window: Window, codec: BlockCodec, speed: Speed | None = None) -> Scores:
    """Cost: the codec on the prefix, and a prefill of the tokens behind it (and of the greedy ones)."""
    decoded, payload_bytes, elements = through_payloads(codec, window.prefix, speed)
    prefix = decoded.float()
    got = probe.observe(window.token_ids, prefix=prefix, score=True).log_probabilities
    assert got is not None
    base = window.log_probabilities
    truth = torch.tensor(window.token_ids[1:])[:, None]
    first: int | None = None
    if window.continuation:
        said = probe.observe([window.last_token, *window.continuation[:-1]], prefix=prefix, score=True).log_probabilities
        assert said is not None
        differs = (said.argmax(-1) != torch.tensor(window.continuation)).nonzero()
        first = int(differs[0]) if len(differs) else None
    return Scores(
        payload_bytes=payload_bytes,
        elements=elements,
        divergences=(base.exp() * (base - got)).sum(-1).double().numpy(),
        losses=(base[:-1] - got[:-1]).gather(1, truth)[:, 0].double().numpy(),
        agreements=(base.argmax(-1) == got.argmax(-1)).numpy(),
        first_divergence=first,
    )

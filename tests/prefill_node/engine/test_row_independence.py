"""A row's bits depend on its own sequence alone: not on the rows beside it, its place among them, their number or the threads."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kvstore.ids import BlockHash
from prefill_node.engine.pool_tensor import PoolTensor
from prefill_node.engine.request import EngineRequest
from prefill_node.engine.runner import Runner
from prefill_node.engine.scheduler import Span
from prefill_node.engine.sequence import Sequence

BLOCK = 8


def _sequence(name, tokens, blocks):
    request = EngineRequest(request_id=name, token_ids=tokens, first_output=len(tokens), chain_root=BlockHash(b"r" * 32), max_new_tokens=1)
    sequence = Sequence.of(request, lambda event: None, block_tokens=BLOCK, arrival=0)
    sequence.blocks = blocks
    return sequence


def _bench(model, *, threads=1, tile_path=False):
    pool = PoolTensor(model.layout, blocks=64, device=torch.device("cpu"))
    runner = Runner(model, pool, threads=threads)
    assert (runner.uses_kernels is False) == tile_path
    return pool, runner


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_rows_logits_are_bit_equal_alone_and_in_any_company(dtype, threads, tiny):
    generator = random.Random(5)
    _, runner = _bench(tiny(dtype=dtype), threads=threads)
    tokens = [[generator.randrange(3, 512) for _ in range(length)] for length in (30, 5, 17, 41, 9, 33, 2, 26, 19, 38, 12)]
    sequences = [_sequence(str(i), t, list(range(i * 6, i * 6 + 6)) if i < 10 else [60, 61]) for i, t in enumerate(tokens)]
    with runner.in_thread():
        for sequence in sequences:
            runner.run_chunks([Span(sequence, 0, len(sequence.tokens) - 1)])

        def last(sequence):
            return Span(sequence, len(sequence.tokens) - 1, 1)

        alone = runner.run_rows([last(sequences[0])])[0]
        for size in range(2, len(sequences) + 1):
            for _ in range(4):
                company = generator.sample(sequences[1:], size - 1)
                place = generator.randrange(size)
                company.insert(place, sequences[0])
                together = runner.run_rows([last(s) for s in company])[place]
                assert np.array_equal(alone.view(np.uint32), together.view(np.uint32)), (size, place)
    runner.close()


def test_a_rows_logits_are_bit_equal_in_any_company_on_the_torch_path_too(tiny):
    """float16 has no kernels: rows are padded to a tile."""
    generator = random.Random(6)
    _, runner = _bench(tiny(dtype="float16"), tile_path=True)
    sequences = [_sequence(str(i), [generator.randrange(3, 512) for _ in range(20 + i)], list(range(i * 5, i * 5 + 5))) for i in range(12)]
    with runner.in_thread():
        for sequence in sequences:
            runner.run_chunks([Span(sequence, 0, len(sequence.tokens) - 1)])
        alone = runner.run_rows([Span(sequences[0], 19, 1)])[0]
        for size in (2, 7, 12):
            company = [*sequences[1:size], sequences[0]]
            together = runner.run_rows([Span(s, len(s.tokens) - 1, 1) for s in company])[size - 1]
            assert np.array_equal(alone.view(np.uint32), together.view(np.uint32)), size


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_tail_computed_in_one_step_has_the_bits_of_one_token_a_step(dtype, tiny):
    generator = random.Random(7)
    pool, runner = _bench(tiny(dtype=dtype))
    tokens = [generator.randrange(3, 512) for _ in range(24)]
    slow, fast = _sequence("slow", tokens, [0, 1, 2]), _sequence("fast", tokens, [3, 4, 5])
    with runner.in_thread():
        for sequence in (slow, fast):
            runner.run_chunks([Span(sequence, 0, 16)])
        for position in range(16, 24):
            one_by_one = runner.run_rows([Span(slow, position, 1)])
        at_once = runner.run_rows([Span(fast, 16, 8)])
    assert np.array_equal(pool.array[2], pool.array[5])
    assert np.array_equal(one_by_one[0].view(np.uint32), at_once[0].view(np.uint32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_on_the_kernels_prefill_chunks_have_the_bits_of_decode_rows(dtype, tiny):
    """So on a CPU even a recompute of everything, in whatever chunks, continues a stream bit for bit."""
    generator = random.Random(8)
    pool, runner = _bench(tiny(dtype=dtype))
    tokens = [generator.randrange(3, 512) for _ in range(40)]
    rows, chunks, whole = (_sequence(str(i), tokens, list(range(i * 5, i * 5 + 5))) for i in range(3))
    with runner.in_thread():
        for block in range(5):
            runner.run_rows([Span(rows, block * BLOCK, BLOCK)])
        runner.run_chunks([Span(chunks, 0, 16)])
        runner.run_chunks([Span(chunks, 16, 24)])
        runner.run_chunks([Span(whole, 0, 40)])
    assert np.array_equal(pool.array[0:5], pool.array[5:10])
    assert np.array_equal(pool.array[0:5], pool.array[10:15])

"""The engine's behaviour at its door: events, prefixes, resuming, cancelling, failing."""

from __future__ import annotations

import gc
import random
import threading

import numpy as np
import pytest
import torch

from kvstore.core.chain import chain_of
from kvstore.errors import InvalidRequest, Overloaded, Unavailable
from kvstore.ids import BlockHash
from prefill_node.engine.config import EngineConfig
from prefill_node.engine.loop import Engine
from prefill_node.engine.request import FailedOut, FinishedOut, FinishReason, SamplingParams, SealedOut, TokenOut

ROOT = BlockHash(b"r" * 32)
BLOCK = 8


def _prompt(seed, length):
    generator = random.Random(seed)
    return [generator.randrange(3, 512) for _ in range(length)]


class LossySealer:
    """Rounds every number to 4 bits of mantissa, as a strong quantizer would, and keeps what a store would keep."""

    def __init__(self) -> None:
        self.stored: dict[bytes, np.ndarray] = {}
        self.starts: list[int] = []

    def seal(self, ref, block, start_position, request_id, *, behind_recoded):
        if block.dtype == np.uint16:
            block &= 0xFFF8
        else:
            block.view(np.uint32)[...] &= 0xFFF80000
        self.stored.setdefault(ref.hash, block.copy())
        self.starts.append(start_position)


def _loaded(driver, tokens, stored):
    """What a decode node's loader does: the longest run from the store, into the pool."""
    engine = driver.engine
    chain = chain_of(tokens, block_tokens=BLOCK, root=ROOT)
    pinned = engine.pin_local(chain)
    run = []
    for ref in chain[len(pinned.refs) :]:
        if ref.hash not in stored:
            break
        run.append(ref)
    blocks = engine.allocate(pinned, len(run))
    assert blocks is not None
    for ref, block in zip(run, blocks, strict=True):
        engine.block_array(block)[...] = stored[ref.hash]
    engine.adopt(pinned, run, blocks)
    return pinned


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
def test_killed_at_every_token_and_resumed_elsewhere_the_tokens_are_equal(dtype, sampling, tiny, running, sampled):
    params = SamplingParams() if sampling == "greedy" else sampled
    prompt, count = _prompt(1, 29), 22
    sealer = LossySealer()
    with running(tiny(dtype=dtype), sealer=sealer) as first:
        undisturbed = first.tokens(prompt, max_new_tokens=count, sampling=params)
    with running(tiny(dtype=dtype), sealer=LossySealer()) as second:
        for killed_at in range(1, count):
            second.engine.forget_local()
            tokens = prompt + undisturbed[:killed_at]
            # Write-behind: the newest sealed blocks may not have reached the store when the node died.
            lag = killed_at % 3
            chain = chain_of(tokens, block_tokens=BLOCK, root=ROOT)
            stored = {ref.hash: sealer.stored[ref.hash] for ref in chain[: len(chain) - lag]}
            rest = second.tokens(
                tokens,
                max_new_tokens=count - killed_at,
                first_output=len(prompt),
                sampling=params,
                prefix=_loaded(second, tokens, stored),
            )
            assert rest == undisturbed[killed_at:], killed_at


def test_a_stream_in_changing_company_equals_the_same_stream_alone(tiny, running, sampled):
    prompts = [_prompt(seed, length) for seed, length in ((1, 40), (2, 3), (3, 61), (4, 17), (5, 8), (6, 90))]
    with running(tiny(dtype="bfloat16"), sealer=LossySealer()) as driver:
        alone = []
        for prompt in prompts:
            alone.append(driver.tokens(prompt, max_new_tokens=12, sampling=sampled))
            driver.engine.forget_local()
    with running(tiny(dtype="bfloat16"), sealer=LossySealer(), threads=2) as driver:
        events = [driver.submit(prompt, max_new_tokens=12, sampling=sampled) for prompt in prompts]
        together = [[e.token_id for e in driver.collect(queue) if isinstance(e, TokenOut)] for queue in events]
    assert together == alone


def test_positions_count_the_answer_and_sealed_blocks_are_announced(tiny, running):
    sealer = LossySealer()
    prompt = _prompt(1, 30)
    with running(tiny(), sealer=sealer) as driver:
        events = driver.collect(driver.submit(prompt, max_new_tokens=12, first_output=25))
    tokens = [event for event in events if isinstance(event, TokenOut)]
    assert [event.position for event in tokens] == list(range(5, 17))
    assert events[-1] == FinishedOut(FinishReason.LENGTH)
    whole = prompt + [event.token_id for event in tokens]
    chain = chain_of(whole, block_tokens=BLOCK, root=ROOT)
    # The KV of the last token was never computed, so a block that it fills is not sealed.
    assert [event.ref for event in events if isinstance(event, SealedOut)] == list(chain[: (len(whole) - 1) // BLOCK])
    assert sealer.starts == [BLOCK * i for i in range((len(whole) - 1) // BLOCK)]


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it(tiny, running):
    prompt = _prompt(3, 20)
    with running(tiny()) as driver:
        free = driver.tokens(prompt, max_new_tokens=10)
        events = driver.collect(driver.submit(prompt, max_new_tokens=10, stop_token_ids=frozenset([free[4]])))
    stopped = [event.token_id for event in events if isinstance(event, TokenOut)]
    assert stopped == free[: free.index(free[4])]
    assert events[-1] == FinishedOut(FinishReason.STOP)


def test_prefill_only_seals_the_full_blocks_and_a_second_time_finds_them(tiny, running):
    prompt = _prompt(4, 45)
    with running(tiny()) as driver:
        first = driver.collect(driver.submit(prompt))
        second = driver.collect(driver.submit(prompt))
        short = driver.collect(driver.submit(prompt[:3]))
        assert len(driver.engine.pin_local(chain_of(prompt, block_tokens=BLOCK, root=ROOT)).refs) == 5
    assert len(first) == 6
    assert first[-1] == second[-1] == short[-1] == FinishedOut(FinishReason.PREFILLED)
    assert len(second) == len(short) == 1


def test_all_blocks_come_back_and_pinned_ones_stay(tiny, running):
    prompt = _prompt(5, 40)
    with running(tiny()) as driver:
        driver.tokens(prompt, max_new_tokens=4)
        assert driver.engine.load().free_blocks == 64
        pinned = driver.engine.pin_local(chain_of(prompt, block_tokens=BLOCK, root=ROOT))
        assert driver.engine.allocate(pinned, 3) is not None
        assert driver.engine.allocate(pinned, 1000) is None
        assert driver.engine.load().free_blocks == 64 - 5 - 3
        driver.engine.release(pinned)
        driver.engine.release(pinned)
        assert driver.engine.load().free_blocks == 64


def test_a_prefix_that_covers_the_whole_prompt_gives_the_same_first_token(tiny, running):
    prompt = _prompt(6, 32)
    with running(tiny(), sealer=LossySealer()) as driver:
        cold = driver.tokens(prompt, max_new_tokens=5)
        chain = chain_of(prompt, block_tokens=BLOCK, root=ROOT)
        warm = driver.tokens(prompt, max_new_tokens=5, prefix=driver.engine.pin_local(chain))
        assert driver.engine.load().free_blocks == 64
    assert warm == cold


def test_what_is_computed_behind_re_coded_blocks_is_sealed_and_listed_as_that(tiny, running):
    class Noting(LossySealer):
        behind: list[bool]

        def seal(self, ref, block, start_position, request_id, *, behind_recoded):
            super().seal(ref, block, start_position, request_id, behind_recoded=behind_recoded)
            self.behind.append(behind_recoded)

    prompt, sealer = _prompt(7, 32), Noting()
    with running(tiny(), sealer=sealer) as driver:
        engine, chain = driver.engine, chain_of(prompt, block_tokens=BLOCK, root=ROOT)
        for canonical, recoded in ((2, False), (1, True)):
            sealer.behind = []
            engine.forget_local()
            pinned = engine.pin_local(chain)
            blocks = engine.allocate(pinned, 2)
            engine.adopt(pinned, chain[:2], blocks, canonical=canonical)
            driver.tokens(prompt, max_new_tokens=2, prefix=pinned)
            assert sealer.behind == [recoded, recoded]
            found = engine.pin_local(chain)
            assert [engine._pool.is_recoded(block) for block in found.block_ids] == [False, recoded, recoded, recoded]
            engine.release(found)


def test_more_requests_than_the_pool_holds_are_preempted_and_their_tokens_are_unchanged(tiny, running):
    prompts = [_prompt(seed, 40) for seed in range(4)]
    with running(tiny()) as driver:
        alone = [driver.tokens(prompt, max_new_tokens=30) for prompt in prompts]
    with running(tiny(), pool_blocks=16) as driver:
        queues = [driver.submit(prompt, max_new_tokens=30) for prompt in prompts]
        together = [[e.token_id for e in driver.collect(queue) if isinstance(e, TokenOut)] for queue in queues]
        assert driver.engine.load().free_blocks == 16
    assert together == alone


def test_cancelling_ends_the_request_within_a_step_and_frees_its_blocks(tiny, running):
    with running(tiny()) as driver:
        events = driver.submit(_prompt(7, 20), max_new_tokens=400, request_id="gone")
        assert isinstance(events.get(timeout=30), SealedOut)
        driver.engine.cancel("gone")
        driver.engine.cancel("gone")
        driver.engine.cancel("never there")
        assert driver.collect(events)[-1] == FinishedOut(FinishReason.CANCELLED)
        assert driver.engine.load().free_blocks == 64
        assert driver.tokens(_prompt(8, 5), max_new_tokens=2, request_id="gone")


def _tensor_bytes():
    """Of all tensors alive in this process; a pass's activations stay until a larger pass comes."""
    gc.collect()
    storages = [found.untyped_storage() for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_a_long_prompt_takes_the_memory_of_one_chunk(tiny, running):
    def grown(**config):
        with running(tiny(), pool_blocks=100, **config) as driver:
            driver.collect(driver.submit(_prompt(1, 32)))
            before = _tensor_bytes()
            driver.collect(driver.submit(_prompt(2, 800)))
            return _tensor_bytes() - before

    assert grown(chunk_tokens=32, step_tokens=64) <= 0
    assert grown(first_come=True) > 1_000_000


def test_an_answer_ends_at_the_longest_sequence(tiny, running):
    with running(tiny(), pool_blocks=4) as driver:
        assert len(driver.tokens(_prompt(9, 20), max_new_tokens=400)) == 4 * BLOCK - 20


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_ids": []}, "empty"),
        ({"token_ids": [5] * 513}, "limit is 512"),
        ({"token_ids": [5] * 512, "max_new_tokens": 1}, "limit is 512"),
        ({"token_ids": [5, 512]}, "vocabulary of 512"),
        ({"token_ids": [5], "first_output": 2}, "first_output"),
        ({"token_ids": [5], "max_new_tokens": -1}, "max_new_tokens"),
    ],
)
def test_impossible_requests_are_refused_with_the_limit(fields, message, tiny, running):
    with running(tiny()) as driver, pytest.raises(InvalidRequest, match=message):
        driver.submit(fields.pop("token_ids"), **fields)


def test_too_many_waiting_requests_are_refused(tiny, running):
    holding = threading.Event()

    class SlowSealer:
        def seal(self, ref, block, start_position, request_id, *, behind_recoded):
            holding.wait(30)

    with running(tiny(), sealer=SlowSealer(), max_queue=1, max_batch=1) as driver:
        first = driver.submit(_prompt(1, 20), max_new_tokens=1)
        while driver.engine.load().running == 0:
            pass
        second = driver.submit(_prompt(2, 20), max_new_tokens=1)
        with pytest.raises(Overloaded):
            driver.submit(_prompt(3, 20), max_new_tokens=1)
        holding.set()
        assert driver.collect(first)[-1] == driver.collect(second)[-1] == FinishedOut(FinishReason.LENGTH)


def test_a_request_id_in_use_is_refused(tiny, running):
    with running(tiny()) as driver:
        events = driver.submit(_prompt(1, 20), max_new_tokens=50, request_id="same")
        with pytest.raises(InvalidRequest, match="in use"):
            driver.submit(_prompt(1, 20), max_new_tokens=1, request_id="same")
        driver.collect(events)


def test_a_sealer_that_fails_fails_its_request_only(tiny, running):
    class Failing:
        def seal(self, ref, block, start_position, request_id, *, behind_recoded):
            if request_id == "bad":
                raise RuntimeError("NaN in layer 2")

    with running(tiny(), sealer=Failing()) as driver:
        bad = driver.submit(_prompt(1, 20), max_new_tokens=5, request_id="bad")
        good = driver.submit(_prompt(2, 20), max_new_tokens=5)
        assert driver.collect(bad)[-1] == FailedOut("sealing a block failed: NaN in layer 2")
        assert driver.collect(good)[-1] == FinishedOut(FinishReason.LENGTH)
        assert driver.engine.load().free_blocks == 64


def test_a_step_that_fails_fails_its_requests_and_the_engine_goes_on(tiny, running):
    with running(tiny()) as driver:
        runner = driver.engine._runner
        run_rows = runner.run_rows
        runner.run_rows = lambda spans: (_ for _ in ()).throw(RuntimeError("out of memory"))
        assert driver.collect(driver.submit(_prompt(1, 20), max_new_tokens=5))[-1] == FailedOut("a compute step failed: out of memory")
        runner.run_rows = run_rows
        assert len(driver.tokens(_prompt(1, 20), max_new_tokens=5)) == 5
        assert driver.engine.load().free_blocks == 64
        assert driver.engine.alive


def test_a_sink_that_raises_disturbs_nobody(tiny, running):
    from prefill_node.engine.request import EngineRequest

    def broken(event):
        raise OSError("client gone")

    with running(tiny()) as driver:
        request = EngineRequest(request_id="x", token_ids=_prompt(1, 9), first_output=9, chain_root=ROOT, max_new_tokens=3)
        driver.engine.submit(request, broken)
        assert len(driver.tokens(_prompt(2, 9), max_new_tokens=5)) == 5


def test_stopping_fails_what_is_left_and_refuses_what_comes_after(tiny):
    engine = Engine(tiny(), EngineConfig(pool_blocks=64, threads=1), sealer=None)
    engine.start()
    from prefill_node.engine.request import EngineRequest

    events = []
    request = EngineRequest(request_id="x", token_ids=_prompt(1, 9), first_output=9, chain_root=ROOT, max_new_tokens=500)
    engine.submit(request, events.append)
    engine.stop()
    assert events[-1] == FailedOut("the engine stopped")
    assert not engine.alive
    with pytest.raises(Unavailable):
        engine.submit(request, events.append)


def test_an_engine_that_never_started_can_be_stopped(tiny):
    Engine(tiny(), EngineConfig(pool_blocks=8, threads=2), sealer=None).stop()


def test_the_load_counts_tokens_to_compute(tiny, running):
    with running(tiny()) as driver:
        assert driver.engine.load().queued_tokens == 0
        driver.tokens(_prompt(1, 50), max_new_tokens=3)
        load = driver.engine.load()
    assert load.prefill_tokens_per_s > 0
    assert load.itl_ms > 0
    assert (load.running, load.queued, load.total_blocks) == (0, 0, 64)

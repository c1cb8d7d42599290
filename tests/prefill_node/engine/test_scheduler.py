"""The scheduler under any load: a fake device that computes whatever is planned."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.ids import BlockHash
from prefill_node.engine.block_pool import BlockPool
from prefill_node.engine.config import EngineConfig
from prefill_node.engine.request import EngineRequest
from prefill_node.engine.scheduler import AGEING_ARRIVALS, Scheduler, order
from prefill_node.engine.sequence import Sequence, SequenceState

BLOCK = 4
CONFIG = EngineConfig(pool_blocks=12, max_batch=4, chunk_tokens=16, step_tokens=20, tail_blocks=1)
MOST_TOKENS = CONFIG.pool_blocks * BLOCK


class Device:
    """A scheduler, its pool, and the bookkeeping that the engine does after each step."""

    def __init__(self, config=CONFIG):
        self.config = config
        self.pool = BlockPool(config.pool_blocks)
        self.scheduler = Scheduler(self.pool, config, block_tokens=BLOCK)
        self.arrivals = 0
        self.ended: list[Sequence] = []
        self.fetching: list[Sequence] = []
        self.fetched_blocks = 0

    def add(self, length, new_tokens, *, priority=0, first_token=0, refetch=False, fetchable=0):
        request = EngineRequest(
            request_id=str(self.arrivals),
            token_ids=[first_token + i for i in range(length)],
            first_output=length,
            chain_root=BlockHash(b"r" * 32),
            max_new_tokens=new_tokens,
            priority=priority,
            refetch=refetch,
            fetchable=fetchable,
        )
        sequence = Sequence.of(request, lambda event: None, block_tokens=BLOCK, arrival=self.arrivals)
        self.arrivals += 1
        self.scheduler.add(sequence)
        return sequence

    def end(self, sequence):
        self.scheduler.end(sequence)
        self.ended.append(sequence)

    def fetch(self, sequence, *, most_blocks=MOST_TOKENS):
        """What a loader does: pins what the pool has, fills as much of the rest as there is room for, and hands it over."""
        self.fetching.remove(sequence)
        if sequence.state is SequenceState.ENDED:
            return
        chain = sequence.chain[: sequence.usable_blocks]
        blocks = self.pool.match(chain)
        for ref in chain[len(blocks) :][:most_blocks]:
            taken = self.pool.take(1)
            if taken is None:
                break
            self.pool.list_sealed(taken[0], ref)
            blocks += taken
            self.fetched_blocks += 1
        self.scheduler.resume(sequence, blocks)

    def step(self):
        plan = self.scheduler.plan()
        self.fetching += plan.fetches
        for sequence in plan.complete:
            self.end(sequence)
        spans = plan.rows + plan.chunks
        assert plan.tokens <= self.config.step_tokens
        assert len({id(span.sequence) for span in spans}) == len(spans) <= self.config.max_batch
        for span in spans:
            sequence = span.sequence
            assert sequence.state is SequenceState.RUNNING
            assert span.start == sequence.computed
            assert span.count > 0
            assert len(sequence.blocks) * BLOCK >= span.start + span.count
        for span in plan.rows:
            assert span.start // BLOCK == (span.start + span.count - 1) // BLOCK, "rows must not cross a block border"
        for span in plan.chunks:
            assert span.start % BLOCK == span.count % BLOCK == 0
            assert span.count <= self.config.chunk_tokens
        for span in spans:
            sequence = span.sequence
            sequence.computed = span.start + span.count
            for index in range(sequence.sealed, sequence.computed // BLOCK):
                self.pool.list_sealed(sequence.blocks[index], sequence.chain[index])
            sequence.sealed = sequence.computed // BLOCK
            if span in plan.rows and sequence.computed == len(sequence.tokens):
                sequence.append(7)
                if sequence.generated == sequence.request.max_new_tokens:
                    self.end(sequence)
            elif sequence.prefill_only and sequence.missing == 0:
                self.end(sequence)
        return plan


jobs = st.tuples(st.integers(1, MOST_TOKENS - 8), st.integers(0, 8), st.integers(-2, 2), st.integers(0, 2), st.booleans())


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(jobs, st.just("step"), st.just("cancel")), max_size=40), st.integers(0, 3), st.integers(0, 12))
def test_under_any_load_every_request_ends_and_every_block_comes_back(actions, fetch_steps, fetch_blocks):
    device = Device()
    live = []
    for action in actions:
        if action == "step":
            device.step()
        elif action == "cancel" and live:
            victim = live[len(live) // 2]
            if victim.state is not SequenceState.ENDED:
                device.end(victim)
        elif action != "cancel":
            length, new_tokens, priority, first_token, refetch = action
            if new_tokens == 0 and length < BLOCK:
                continue
            live.append(
                device.add(length, new_tokens, priority=priority, first_token=first_token * 1000, refetch=refetch, fetchable=first_token)
            )
    steps = 0
    while not device.scheduler.idle or device.fetching:
        plan = device.step()
        assert plan.tokens > 0 or plan.complete or device.fetching, "a step without work while requests wait"
        if steps % (fetch_steps + 1) == 0:
            for sequence in tuple(device.fetching):
                device.fetch(sequence, most_blocks=fetch_blocks)
        steps += 1
        assert steps < 5000, "no end"
    assert len(device.ended) == len(live)
    assert device.pool.available == device.pool.total


def test_decode_rows_go_first_and_a_prompt_fills_the_rest_of_the_budget():
    device = Device()
    for first in range(3):
        device.add(3, 8, first_token=1000 * (first + 1))
    device.step()
    device.add(24, 1)
    plan = device.step()
    assert [span.count for span in plan.rows] == [1, 1, 1]
    assert [span.count for span in plan.chunks] == [16]


def test_short_prompts_share_a_step():
    device = Device()
    for first in range(3):
        device.add(4, 0, first_token=1000 * first)
    assert [span.count for span in device.step().chunks] == [4, 4, 4]


def test_a_higher_priority_goes_first_and_ageing_bounds_how_long():
    device = Device()
    old = device.add(4, 1)
    important = device.add(4, 1, priority=1)
    assert order(important) < order(old)
    device.arrivals = AGEING_ARRIVALS + 1
    assert order(device.add(4, 1, priority=1)) > order(old)


def test_of_two_prompts_in_progress_the_more_important_one_gets_the_step():
    device = Device(EngineConfig(pool_blocks=64, max_batch=4, chunk_tokens=16, step_tokens=20, tail_blocks=1))
    old = device.add(60, 1)
    device.step()
    important = device.add(60, 1, priority=1, first_token=1000)
    assert [(span.sequence, span.count) for span in device.step().chunks] == [(important, 16), (old, 4)]


def test_a_long_prompt_is_not_overtaken_for_ever_by_short_ones():
    """There is always room for another short one, and never for the long one beside them."""
    device = Device()
    for first in range(3):
        device.add(8, 4, first_token=100 * first)
    device.step()
    long = device.add(40, 1, first_token=1000)
    for step in range(40):
        device.add(8, 4, first_token=2000 + 100 * step)
        device.step()
    assert long in device.ended


def test_when_the_pool_is_full_the_last_of_several_is_the_first_to_give_its_blocks_back():
    device = Device()
    running = [device.add(12, 12, first_token=100 * first) for first in range(3)]
    preempted = []
    while not preempted:
        preempted += device.step().preempted
    assert preempted == running[2:]


def test_one_that_only_waits_gives_its_blocks_to_one_that_runs_wherever_they_stand():
    device = Device()
    device.add(16, 0)
    device.step()
    runs = device.add(20, 24, first_token=1000)
    device.step()
    waits = device.add(36, 1, priority=1)  # it holds the first four blocks, and there is no room for the rest
    for _ in range(40):
        device.step()
    assert waits.state is SequenceState.ENDED
    assert runs.generated == 24
    assert device.ended[1:] == [runs, waits]


def test_the_room_of_a_sequence_that_fetches_is_not_given_away():
    device = Device()
    fetching = device.add(40, 1, refetch=True, fetchable=9)
    assert device.step().fetches == [fetching]
    device.add(12, 1, first_token=1000)
    assert device.step().tokens == 0
    device.fetch(fetching)
    assert [span.sequence for span in device.step().rows] == [fetching]


def test_when_the_pool_is_full_the_last_in_the_order_gives_its_blocks_back_and_ends_later():
    device = Device()
    first = device.add(20, 8)
    second = device.add(20, 8, first_token=1000)
    preempted = []
    while not device.scheduler.idle:
        preempted += device.step().preempted
    assert preempted
    assert all(sequence is second for sequence in preempted)
    assert device.ended == [first, second]
    assert second.generated == 8


def test_a_preempted_sequence_has_its_lost_blocks_fetched_and_does_not_compute_them_again():
    device = Device()
    device.add(20, 8)
    second = device.add(20, 8, first_token=1000, refetch=True)
    for _ in range(4):
        device.step()
    device.add(30, 8, priority=1, first_token=2000)
    computed = second.computed
    while not device.scheduler.idle or device.fetching:
        plan = device.step()
        computed += sum(span.count for span in plan.rows + plan.chunks if span.sequence is second)
        for sequence in tuple(device.fetching):
            device.fetch(sequence)
    assert second.generated == 8
    assert device.fetched_blocks > 0
    assert computed < 20 + 8 + 2 * BLOCK  # what filled no block, once more for each preemption; never a whole block


def test_a_long_uncovered_range_is_chunks_for_its_full_blocks_and_rows_for_the_rest():
    device = Device()
    device.add(22, 1)
    plan = device.step()
    assert [(span.start, span.count) for span in plan.chunks] == [(0, 16)]
    plan = device.step()
    assert [(span.start, span.count) for span in plan.chunks] == [(16, 4)]
    plan = device.step()
    assert [(span.start, span.count) for span in plan.rows] == [(20, 2)]


def test_a_short_uncovered_tail_is_rows_up_to_each_block_border():
    device = Device()
    device.add(16, 0)
    device.step()
    assert device.scheduler.idle
    device.add(16 + 4, 1)
    plan = device.step()
    assert [(span.start, span.count) for span in plan.rows] == [(16, 4)]
    assert not plan.chunks


def test_a_cached_prompt_still_computes_its_last_block_for_the_logits():
    device = Device()
    device.add(16, 0)
    device.step()
    device.add(16, 1)
    plan = device.step()
    assert [(span.start, span.count) for span in plan.rows] == [(12, 4)]


def _advance(plan):
    for span in plan.rows + plan.chunks:
        span.sequence.computed = span.start + span.count


def test_beside_answers_a_prompt_gets_a_small_share_of_each_step_and_alone_all_of_it():
    config = EngineConfig(pool_blocks=64, max_batch=4, chunk_tokens=40, step_tokens=48, mixed_tokens=8, tail_blocks=1)
    device = Device(config)
    answer = device.add(3, 50)
    first = device.scheduler.plan()
    assert [span.sequence for span in first.rows] == [answer]
    _advance(first)
    answer.append(7)
    prompt = device.add(90, 1, first_token=100)
    mixed = device.scheduler.plan()
    assert [span.count for span in mixed.rows] == [1]
    assert [(span.sequence, span.count) for span in mixed.chunks] == [(prompt, 8)]
    _advance(mixed)
    answer.append(7)
    device.add(90, 1, first_token=200)
    both = device.scheduler.plan()
    assert [(span.sequence, span.count) for span in both.chunks] == [(prompt, 8)], "all prompts together have that share"
    _advance(both)
    device.scheduler.end(device.scheduler.running[-1])
    device.end(answer)
    assert [span.count for span in device.scheduler.plan().chunks] == [40]


def test_first_come_computes_a_whole_prompt_while_answers_wait():
    config = EngineConfig(pool_blocks=64, max_batch=4, chunk_tokens=16, step_tokens=20, mixed_tokens=8, tail_blocks=1, first_come=True)
    device = Device(config)
    answer = device.add(3, 50)
    _advance(device.scheduler.plan())
    answer.append(7)
    prompts = [device.add(90, 1, first_token=100 * i) for i in (1, 2)]
    for prompt in prompts:
        plan = device.scheduler.plan()
        assert plan.rows == []
        assert [(span.sequence, span.count) for span in plan.chunks] == [(prompt, 88)]
        _advance(plan)
    assert {id(span.sequence) for span in device.scheduler.plan().rows} == {id(s) for s in (answer, *prompts)}


def _with_answers_and_a_hit(answers, *, tail):
    """Answers in progress, and a prompt just admitted of which two blocks were in the pool and `tail` tokens are missing."""
    device = Device(EngineConfig(pool_blocks=64, max_batch=16, chunk_tokens=16, step_tokens=64, tail_blocks=4))
    device.add(2 * BLOCK, 0)
    device.step()
    for first in range(answers):
        device.add(3, 50, first_token=1000 * (first + 1))
    device.step()
    return device, device.add(2 * BLOCK + tail, 1)


def _tail_rows(device, sequence):
    """Rows of the sequence in each step until its first token; everybody else has exactly one in each of them."""
    rows = []
    while sequence.generated == 0:
        plan = device.step()
        assert all(span.count == 1 for span in plan.rows if span.sequence is not sequence)
        assert not plan.chunks
        rows += [span.count for span in plan.rows if span.sequence is sequence]
    return rows


def test_beside_answers_the_tail_of_a_hit_takes_a_row_for_every_four_of_them_and_alone_it_is_not_held_up():
    assert _tail_rows(*_with_answers_and_a_hit(4, tail=3)) == [1, 1, 1]
    assert _tail_rows(*_with_answers_and_a_hit(8, tail=5)) == [2, 2, 1]
    assert _tail_rows(*_with_answers_and_a_hit(0, tail=3)) == [3]


def test_many_tails_beside_few_answers_are_over_in_some_tens_of_steps():
    device, first = _with_answers_and_a_hit(1, tail=16)
    others = [device.add(2 * BLOCK + 16, 1) for _ in range(8)]
    steps = 0
    while any(sequence.generated == 0 for sequence in (first, *others)):
        plan = device.step()
        assert sum(span.count for span in plan.rows) <= 1 + 9
        steps += 1
    assert steps <= 60


def test_what_a_client_is_in_the_middle_of_is_not_held_up():
    device, _ = _with_answers_and_a_hit(4, tail=3)
    device.step()
    request = EngineRequest(
        request_id="moved", token_ids=list(range(2 * BLOCK + 4)), first_output=2 * BLOCK, chain_root=BlockHash(b"r" * 32), max_new_tokens=9
    )
    moved = Sequence.of(request, lambda event: None, block_tokens=BLOCK, arrival=100)
    device.scheduler.add(moved)
    assert [span.count for span in device.step().rows if span.sequence is moved] == [4]


def test_beside_a_prompt_in_chunks_the_tail_of_a_hit_is_not_held_up():
    device, hit = _with_answers_and_a_hit(4, tail=3)
    device.add(40, 1, first_token=90_000)
    plan = device.step()
    assert plan.chunks
    assert [span.count for span in plan.rows if span.sequence is hit] == [3]

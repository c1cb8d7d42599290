"""What the next step computes. Pure: the same calls give the same plans; no clock, no tensor, no thread.

Rules, in this order:
1. Every running sequence that generates gets one decode row.
2. What the step's token budget has left goes to uncovered tails (more decode rows) and to prefill chunks, first come first served
   within aged priority, several short prompts in one step; beside decode rows, chunks have at most `mixed_tokens`. Beside answers alone,
   tails behind a cached prefix are spread over several steps: a hit should not be felt by those that run.
3. When the pool is full, the sequence that stands last in that order gives its blocks back and waits again (its sealed blocks stay
   listed until they are reused). The first in the order always gets its blocks from the others, so it always ends.
4. A sequence whose turn comes, and whose sealed blocks are not all in the pool (it was preempted, or there was no room to fetch them),
   is first sent to fetch them where its request says so; the room for them is kept meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prefill_node.engine.block_pool import BlockPool
from prefill_node.engine.config import EngineConfig
from prefill_node.engine.sequence import Sequence, SequenceEvent, SequenceState

AGEING_ARRIVALS = 64
"""A request stands before all that come this many arrivals later, for each step of priority that it lacks."""

ANSWERS_OF_TAIL_ROW = 4
"""Answers beside which one row of a tail goes unnoticed: what a step costs anyway is worth five rows, so it is about a ninth more."""
TAIL_STEPS = 16
"""A step takes this part of all tails that wait, when that is more: so tails wait some tens of steps, however many there are."""


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, start + count) of one sequence, to be computed in this step; its blocks cover them."""

    sequence: Sequence
    start: int
    count: int


@dataclass(slots=True, kw_only=True)
class StepPlan:
    rows: list[Span] = field(default_factory=list)
    """Decode rows. A span stays inside one block, so no row attends to a block that should have been sealed before it."""
    chunks: list[Span] = field(default_factory=list)
    """Prefill chunks: whole blocks."""
    preempted: list[Sequence] = field(default_factory=list)
    fetches: list[Sequence] = field(default_factory=list)
    """Have the missing blocks of these fetched, then call `resume`."""
    complete: list[Sequence] = field(default_factory=list)
    """Prefill-only sequences with nothing left to compute; the caller ends them."""

    @property
    def tokens(self) -> int:
        return sum(span.count for span in self.rows) + sum(span.count for span in self.chunks)


def order(sequence: Sequence) -> tuple[int, int]:
    """Smaller goes first. Priority is a head start in arrivals, so no stream of important requests starves the rest."""
    return (sequence.arrival - sequence.request.priority * AGEING_ARRIVALS, sequence.arrival)


class Scheduler:
    """Not thread-safe: the engine guards it with its lock."""

    def __init__(self, pool: BlockPool, config: EngineConfig, *, block_tokens: int) -> None:
        config.validate(block_tokens=block_tokens)
        self._pool = pool
        self._config = config
        self._block_tokens = block_tokens
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._fetching: list[Sequence] = []

    @property
    def waiting(self) -> tuple[Sequence, ...]:
        return tuple(self._waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        return tuple(self._running)

    @property
    def fetching(self) -> tuple[Sequence, ...]:
        return tuple(self._fetching)

    @property
    def idle(self) -> bool:
        """Nothing to plan before the next `add` or `resume`."""
        return not self._waiting and not self._running

    def add(self, sequence: Sequence) -> None:
        assert sequence.state is SequenceState.WAITING
        self._waiting.append(sequence)
        self._waiting.sort(key=order)

    def end(self, sequence: Sequence) -> None:
        """Finished, failed or cancelled: all its blocks go back."""
        sequence.step(SequenceEvent.ENDED)
        next(queue for queue in (self._waiting, self._running, self._fetching) if sequence in queue).remove(sequence)
        self._pool.release(sequence.drop_blocks())

    def resume(self, sequence: Sequence, block_ids: list[int]) -> None:
        """The fetch is over: `block_ids` hold its leading canonical blocks, one reference each, which it takes over."""
        self._fetching.remove(sequence)
        self._pool.release(sequence.drop_blocks())
        sequence.cover(block_ids)
        sequence.fetchable = 0
        sequence.step(SequenceEvent.FETCHED)
        self.add(sequence)

    def plan(self) -> StepPlan:
        plan = StepPlan()
        budget = self._config.step_tokens
        self._admit(plan)
        if self._config.first_come and self._plan_one_prompt(plan):
            return plan
        one_row = {id(sequence) for sequence in self._running if self._in_rows(sequence)}
        budget -= len(one_row)
        chunk_budget = self._config.mixed_tokens if one_row else budget
        tail_budget = self._tail_budget(budget)
        for sequence in sorted(self._running, key=order):
            if sequence.state is not SequenceState.RUNNING:
                continue  # given up for one that stands before it
            if sequence.missing == 0:
                plan.complete.append(sequence)
                continue
            own = 1 if id(sequence) in one_row else 0
            room = budget + own if self._in_rows(sequence) else min(budget, chunk_budget)
            count = self._count(sequence, min(room, tail_budget) if sequence.unhurried else room)
            if count == 0 or not self._grow(sequence, sequence.computed + count, plan):
                budget += own
                continue
            budget -= count - own
            span = Span(sequence, sequence.computed, count)
            if self._in_rows(sequence):
                plan.rows.append(span)
                tail_budget -= count if sequence.unhurried else 0
            else:
                plan.chunks.append(span)
                chunk_budget -= count
        return plan

    def _plan_one_prompt(self, plan: StepPlan) -> bool:
        """All of the first prompt that is not computed yet, whatever the limits of a step. False: there is none."""
        prompts = [sequence for sequence in self._running if sequence.computed < sequence.chunk_end]
        first = min(prompts, key=order, default=None)
        if first is None or not self._grow(first, first.chunk_end, plan):
            return False
        plan.chunks.append(Span(first, first.computed, first.chunk_end - first.computed))
        return True

    def _admit(self, plan: StepPlan) -> None:
        """Waiting sequences join while there is a place and the pool could hold what they miss beside what they have."""
        room = self._pool.available - sum(self._wanted(sequence) for sequence in self._fetching)
        for sequence in list(self._waiting):
            if len(self._running) + len(self._fetching) >= self._config.max_batch:
                break
            if not sequence.blocks:
                available = self._pool.available
                found = self._pool.match(sequence.chain[: sequence.usable_blocks], as_sealed=sequence.wants_as_sealed)
                sequence.recoded |= any(map(self._pool.is_recoded, found))
                sequence.cover(found)
                room -= available - self._pool.available
            wanted = self._wanted(sequence)
            if wanted > room and (self._running or self._fetching):
                break  # those behind wait too: a long prompt is not overtaken for ever by short ones
            room -= wanted
            self._waiting.remove(sequence)
            if sequence.fetchable > len(sequence.blocks):
                sequence.step(SequenceEvent.FETCH_ASKED)
                self._fetching.append(sequence)
                plan.fetches.append(sequence)
                continue
            sequence.step(SequenceEvent.ADMITTED)
            sequence.decide_chunk_end(tail_blocks=self._config.tail_blocks)
            self._running.append(sequence)

    def _tail_budget(self, budget: int) -> int:
        """Rows of this step for the tails of those that are unhurried; a step with chunks is long anyway."""
        if any(sequence.computed < sequence.chunk_end for sequence in self._running):
            return budget + len(self._running)
        tails = sum(sequence.missing for sequence in self._running if sequence.unhurried)
        answers = sum(self._in_rows(sequence) and not sequence.unhurried for sequence in self._running)
        return max(1, answers // ANSWERS_OF_TAIL_ROW, -(-tails // TAIL_STEPS)) if answers else budget + len(self._running)

    def _in_rows(self, sequence: Sequence) -> bool:
        return sequence.missing > 0 and sequence.computed >= sequence.chunk_end

    def _count(self, sequence: Sequence, budget: int) -> int:
        if self._in_rows(sequence):
            to_block_end = self._block_tokens - sequence.computed % self._block_tokens
            return max(0, min(sequence.missing, to_block_end, budget))
        count = min(sequence.chunk_end - sequence.computed, self._config.chunk_tokens, budget)
        return max(0, count // self._block_tokens * self._block_tokens)

    def _grow(self, sequence: Sequence, tokens: int, plan: StepPlan) -> bool:
        """Give `sequence` blocks for its first `tokens` tokens; sequences that stand behind it pay when the pool is full."""
        count = self._blocks_for(tokens) - len(sequence.blocks)
        while count > 0:
            taken = self._pool.take(count)
            if taken is not None:
                sequence.blocks.extend(taken)
                break
            victim = self._victim(sequence, plan)
            if victim is None:
                return False
            self._preempt(victim, plan)
        return True

    def _victim(self, sequence: Sequence, plan: StepPlan) -> Sequence | None:
        planned = {id(span.sequence) for span in plan.rows} | {id(span.sequence) for span in plan.chunks}
        behind = [s for s in (*self._waiting, *self._running) if s.blocks and order(s) > order(sequence) and id(s) not in planned]
        if behind:
            return max(behind, key=order)
        # Sequences that only wait cannot use their blocks now, wherever they stand.
        return max((s for s in self._waiting if s.blocks), key=order, default=None)

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        self._pool.release(victim.drop_blocks())
        if victim.state is SequenceState.RUNNING:
            self._running.remove(victim)
            victim.step(SequenceEvent.PREEMPTED)
            self.add(victim)
            plan.preempted.append(victim)

    def _wanted(self, sequence: Sequence) -> int:
        return self._blocks_for(sequence.target) - len(sequence.blocks)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._block_tokens)

"""The engine: one thread that plans, computes, seals and samples, and the thread-safe door to it."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Items

import numpy as np

from kvstore.errors import InvalidRequest, Overloaded, Unavailable
from kvstore.ids import BlockRef
from prefill_node.engine.block_pool import BlockPool
from prefill_node.engine.config import EngineConfig
from prefill_node.engine.measures import Measures
from prefill_node.engine.pool_tensor import PoolTensor
from prefill_node.engine.request import (
    MAX_TOP_LOGPROBS,
    EngineEvent,
    EngineLoad,
    EngineRequest,
    EventSink,
    FailedOut,
    FinishedOut,
    FinishReason,
    PinnedPrefix,
    PrefixWantedOut,
    SealedOut,
    Sealer,
    TokenOut,
)
from prefill_node.engine.runner import Runner
from prefill_node.engine.sampler import logprobs, sample
from prefill_node.engine.scheduler import Scheduler, Span, StepPlan
from prefill_node.engine.sequence import Sequence, SequenceState
from prefill_node.model.load import LoadedModel

_log = logging.getLogger(__name__)

_STARVED_WAIT_S = 0.005
"""Pause when sequences wait and nothing can be planned: blocks are pinned by loaders, who give them back on their own."""


class Engine:
    """Every public method may be called from any thread."""

    def __init__(self, model: LoadedModel, config: EngineConfig, *, sealer: Sealer | None) -> None:
        config.validate(block_tokens=model.layout.block_tokens)
        self._model = model
        self._config = config
        self._sealer = sealer
        self._block_tokens = model.layout.block_tokens
        self._tensor = PoolTensor(model.layout, blocks=config.pool_blocks, device=model.device)
        self._runner = Runner(model, self._tensor, threads=config.threads or len(os.sched_getaffinity(0)))
        self._lock = threading.Lock()
        """Guards pool, scheduler, _sequences, _stopping; never held while the device computes."""
        self._pool = BlockPool(config.pool_blocks)
        self._scheduler = Scheduler(self._pool, config, block_tokens=self._block_tokens)
        self._sequences: dict[str, Sequence] = {}
        self._arrivals = 0
        self._stopping = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._measures = Measures()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def model(self) -> LoadedModel:
        return self._model

    @property
    def max_tokens(self) -> int:
        """Longest sequence, prompt and answer together, that this engine can hold."""
        return min(self._model.max_positions, self._config.pool_blocks * self._block_tokens)

    @property
    def alive(self) -> bool:
        """The engine thread runs. False after `stop`, or when a bug ended it: then this process should be replaced."""
        return self._thread.is_alive() and not self._stopping

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the present step and fails what is left. Returns when it has ended."""
        with self._lock:
            self._stopping = True
        self._wake.put(None)
        if self._thread.is_alive():
            self._thread.join()
        self._runner.close()

    # Prefixes: blocks that a caller found or fetched before it submits.

    def pin_local(self, chain: Items[BlockRef], *, as_sealed: bool = False) -> PinnedPrefix:
        """The longest leading run of `chain` that is sealed in the pool; cannot be reused until submitted or released. `as_sealed`: it ends
        before the first re-coded block."""
        with self._lock:
            block_ids = self._pool.match(chain, as_sealed=as_sealed)
            recoded = any(map(self._pool.is_recoded, block_ids))
        return PinnedPrefix(block_ids=block_ids, refs=list(chain[: len(block_ids)]), recoded=recoded)

    def allocate(self, pinned: PinnedPrefix, count: int) -> list[int] | None:
        """`count` pool blocks for the caller to fill through `block_array`, referenced by `pinned`; None when there is no room."""
        with self._lock:
            taken = self._pool.take(count)
        if taken is not None:
            pinned.reserved.extend(taken)
        return taken

    def block_array(self, block_id: int) -> np.ndarray:
        """[layers, 2, kv_heads, block_tokens, head_dim], bf16 as uint16 bits; to be used only while the block is referenced."""
        return self._tensor.block(block_id)

    def adopt(self, pinned: PinnedPrefix, refs: Items[BlockRef], block_ids: Items[int], *, canonical: int | None = None) -> None:
        """Reserved blocks now hold the KV of `refs`, which continue the pinned ones: they are listed for local hits. The first `canonical`
        of them (None: all) as sealed, those behind re-coded."""
        start = len(pinned.refs)
        assert [ref.index for ref in refs] == list(range(start, start + len(refs))), "adopted blocks must continue the prefix"
        for block_id in block_ids:
            self._tensor.write_back(block_id)
        with self._lock:
            for number, (ref, block_id) in enumerate(zip(refs, block_ids, strict=True)):
                pinned.reserved.remove(block_id)
                pinned.recoded |= canonical is not None and number >= canonical
                self._pool.list_sealed(block_id, ref, recoded=pinned.recoded)
        pinned.block_ids.extend(block_ids)
        pinned.refs.extend(refs)

    def release(self, pinned: PinnedPrefix) -> None:
        """Gives back everything it holds; a second call does nothing."""
        block_ids, reserved = pinned.block_ids, pinned.reserved
        pinned.block_ids, pinned.refs, pinned.reserved = [], [], []
        with self._lock:
            self._pool.release(block_ids + reserved)

    def forget_local(self) -> int:
        """Unlist every sealed block that nobody holds: the next prompt finds nothing in the pool. Returns how many."""
        with self._lock:
            return self._pool.forget()

    # Requests.

    def submit(self, request: EngineRequest, sink: EventSink) -> None:
        """Queue it. Events come to `sink` in the engine thread; the last is FinishedOut or FailedOut.

        Takes the pinned prefix over, whatever happens. Raises InvalidRequest, Overloaded or Unavailable.
        """
        try:
            self._check(request)
            with self._lock:
                if self._stopping:
                    raise Unavailable("the engine is stopping")
                if len(self._scheduler.waiting) >= self._config.max_queue:
                    raise Overloaded(f"{self._config.max_queue} requests are waiting already")
                if request.request_id in self._sequences:
                    raise InvalidRequest(f"request_id {request.request_id!r} is in use")
                sequence = Sequence.of(request, sink, block_tokens=self._block_tokens, arrival=self._arrivals)
                self._arrivals += 1
                self._sequences[request.request_id] = sequence
                self._scheduler.add(sequence)
        finally:
            if request.prefix is not None:
                self.release(request.prefix)
        self._wake.put(None)

    def resume(self, request_id: str, pinned: PinnedPrefix) -> None:
        """The answer to PrefixWantedOut. Takes the pinned prefix over; a request that has ended meanwhile lets it go."""
        assert not pinned.reserved, "adopt or release reserved blocks before resume"
        with self._lock:
            sequence = self._sequences.get(request_id)
            if sequence is not None and sequence.state is SequenceState.FETCHING:
                self._scheduler.resume(sequence, sequence.taken_from(pinned))
        self.release(pinned)
        self._wake.put(None)

    def cancel(self, request_id: str) -> None:
        """Ends the request before the next step; its sink gets FinishedOut(CANCELLED). Unknown or ended: nothing happens."""
        with self._lock:
            sequence = self._sequences.get(request_id)
            if sequence is not None:
                sequence.cancelled = True
        self._wake.put(None)

    def load(self) -> EngineLoad:
        with self._lock:
            running, waiting = self._scheduler.running, self._scheduler.waiting + self._scheduler.fetching
            queued_tokens = sum(sequence.missing for sequence in (*running, *waiting))
            free_blocks = self._pool.available
        return EngineLoad(
            running=len(running),
            queued=len(waiting),
            queued_tokens=queued_tokens,
            free_blocks=free_blocks,
            total_blocks=self._config.pool_blocks,
            prefill_tokens_per_s=self._measures.prefill_tokens_per_s,
            itl_ms=self._measures.itl_ms,
        )

    def _check(self, request: EngineRequest) -> None:
        tokens, limit = len(request.token_ids), self.max_tokens
        if tokens == 0:
            raise InvalidRequest("the prompt is empty: it must have at least 1 token")
        if tokens > limit or (request.max_new_tokens > 0 and tokens == limit):
            raise InvalidRequest(f"the prompt has {tokens} tokens; the limit is {limit}, prompt and answer together")
        if not 0 <= request.first_output <= tokens:
            raise InvalidRequest(f"first_output must be from 0 to {tokens}, not {request.first_output}")
        if request.max_new_tokens < 0:
            raise InvalidRequest(f"max_new_tokens must be at least 0, not {request.max_new_tokens}")
        if request.top_logprobs is not None and not 0 <= request.top_logprobs <= MAX_TOP_LOGPROBS:
            raise InvalidRequest(f"top_logprobs must be from 0 to {MAX_TOP_LOGPROBS}, not {request.top_logprobs}")
        bad = next(
            (
                token
                for token in (*request.token_ids, *(id for id, _ in request.sampling.logit_bias))
                if not 0 <= token < self._model.vocab_size
            ),
            None,
        )
        if bad is not None:
            raise InvalidRequest(f"token id {bad} is outside the vocabulary of {self._model.vocab_size}")

    # The engine thread.

    def _run(self) -> None:
        why = "the engine stopped"
        try:
            with self._runner.in_thread():
                while self._turn():
                    pass
        except Exception as error:
            _log.exception("the engine ends: its own state is broken")
            why = f"the engine broke: {error}"
        with self._lock:
            self._stopping = True
            left = list(self._sequences.values())
            self._sequences.clear()
        for sequence in left:
            self._send(sequence, FailedOut(why))

    def _turn(self) -> bool:
        """One round of the loop. False: asked to stop."""
        self._sweep()
        with self._lock:
            if self._stopping:
                return False
            plan = self._scheduler.plan()
            idle = self._scheduler.idle
        for sequence in plan.fetches:
            self._send(sequence, PrefixWantedOut())
        for sequence in plan.complete:
            self._end(sequence, FinishedOut(FinishReason.PREFILLED))
        if plan.tokens:
            self._step(plan)
        elif not plan.complete:
            self._sleep(None if idle else _STARVED_WAIT_S)
        return True

    def _sleep(self, timeout_s: float | None) -> None:
        try:
            self._wake.get(timeout=timeout_s)
            while True:
                self._wake.get_nowait()
        except queue.Empty:
            pass

    def _sweep(self) -> None:
        """End what was cancelled."""
        with self._lock:
            cancelled = [sequence for sequence in self._sequences.values() if sequence.cancelled]
        for sequence in cancelled:
            self._end(sequence, FinishedOut(FinishReason.CANCELLED))

    def _step(self, plan: StepPlan) -> None:
        self._measures.step(plan)
        if plan.rows:
            self._guarded(plan.rows, self._run_rows)
        if plan.chunks:
            self._guarded(plan.chunks, self._run_chunks)

    def _guarded(self, spans: list[Span], compute: Callable[[list[Span]], None]) -> None:
        try:
            compute(spans)
        except Exception as error:
            # What this pass wrote is unknown, but it wrote only to unsealed blocks of its own sequences: these fail, others go on.
            _log.exception("a step failed; its %d requests fail with it", len(spans))
            for span in spans:
                if span.sequence.state is not SequenceState.ENDED:
                    self._end(span.sequence, FailedOut(f"a compute step failed: {error}"))

    def _run_rows(self, spans: list[Span]) -> None:
        logits = self._runner.run_rows(spans)
        for index, span in enumerate(spans):
            self._advance(span)
            if index in logits and span.sequence.state is SequenceState.RUNNING:
                self._emit_token(span.sequence, logits[index])

    def _run_chunks(self, spans: list[Span]) -> None:
        started = time.perf_counter()
        for part in self._parts(spans):
            live = [span for span in part if span.sequence.state is SequenceState.RUNNING]
            if live:
                self._runner.run_chunks(live)
            for span in live:
                self._advance(span)
        self._measures.prefilled(sum(span.count for span in spans), seconds=time.perf_counter() - started)
        for span in spans:
            sequence = span.sequence
            if sequence.prefill_only and sequence.missing == 0 and sequence.state is SequenceState.RUNNING:
                self._end(sequence, FinishedOut(FinishReason.PREFILLED))

    def _parts(self, spans: list[Span]) -> list[list[Span]]:
        """What may share a forward pass. With exact blocks it is one block of each span, so the next one finds it canonical; on the
        kernels 32 rows are as fast as 512, so this costs the calls only."""
        if self._sealer is None or not self._config.exact_blocks:
            return [spans]
        step = self._block_tokens
        longest = max(span.count for span in spans)
        return [[Span(s.sequence, s.start + at, step) for s in spans if at < s.count] for at in range(0, longest, step)]

    def _advance(self, span: Span) -> None:
        """The span's KV is in the pool: seal the blocks that it filled."""
        sequence = span.sequence
        sequence.computed = span.start + span.count
        try:
            for index in range(sequence.sealed, sequence.computed // self._block_tokens):
                self._seal(sequence, index)
        except Exception as error:
            _log.exception("sealing failed; request %s fails with it", sequence.request.request_id)
            self._end(sequence, FailedOut(f"sealing a block failed: {error}"))

    def _seal(self, sequence: Sequence, index: int) -> None:
        ref, block_id = sequence.chain[index], sequence.blocks[index]
        if self._sealer is not None:
            block = self._tensor.block(block_id)
            request_id = sequence.request.request_id
            self._sealer.seal(ref, block, index * self._block_tokens, request_id, behind_recoded=sequence.recoded)
            self._tensor.write_back(block_id)
        with self._lock:
            self._pool.list_sealed(block_id, ref, recoded=sequence.recoded)
        sequence.sealed = index + 1
        self._send(sequence, SealedOut(ref))

    def _emit_token(self, sequence: Sequence, logits: np.ndarray) -> None:
        request = sequence.request
        position = len(sequence.tokens)
        prompt, answer = sequence.tokens[: request.first_output], sequence.tokens[request.first_output :]
        token_id = sample(logits, request.sampling, position=position, prompt=prompt, answer=answer)
        if token_id in request.stop_token_ids:
            self._end(sequence, FinishedOut(FinishReason.STOP))
            return
        sequence.append(token_id)
        sequence.last_token_ns = self._measures.token(sequence.last_token_ns)
        found = None if request.top_logprobs is None else logprobs(logits, token_id, top=request.top_logprobs)
        self._send(sequence, TokenOut(token_id, position - request.first_output, found))
        if sequence.generated >= request.max_new_tokens or len(sequence.tokens) >= self.max_tokens:
            self._end(sequence, FinishedOut(FinishReason.LENGTH))

    def _end(self, sequence: Sequence, event: EngineEvent) -> None:
        with self._lock:
            self._scheduler.end(sequence)
            del self._sequences[sequence.request.request_id]
        self._send(sequence, event)

    def _send(self, sequence: Sequence, event: EngineEvent) -> None:
        try:
            sequence.sink(event)
        except Exception:
            _log.exception("the sink of request %s raised on %s", sequence.request.request_id, event)

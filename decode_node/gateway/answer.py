"""An answer as the client sees it: a session's tokens turned into text, cut at a stop string, with its usage record."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import Any

from decode_node.gateway.detokenize import Detokenizer, StopScanner
from decode_node.gateway.metrics import GatewayMetrics
from decode_node.gateway.nodes import FinishReason, TokenOut
from decode_node.gateway.sessions import Session, SessionTable
from decode_node.published import PublishedPrefix
from kvstore.units import Nanos, to_milliseconds, to_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What came since the last one. Text may lag behind the tokens: a character or a stop string may be unfinished."""

    text: str
    tokens: Sequence[TokenOut] = ()
    text_offset: int = 0
    """Characters of the answer that were complete before these tokens."""
    finish_reason: FinishReason | None = None
    """Set on the last one only."""


@dataclass(slots=True)
class Preparation:
    """What was found before decode began, and what goes on beside it."""

    cached_blocks: int = 0
    """Leading blocks of the prompt that the store or the prefill node had."""
    prefilled: bool = False
    """A prefill node was asked, so what the decode node finds is partly this request's own work."""
    published: PublishedPrefix | None = None
    """How far the prefill stage is; None: there is none."""


class Answer:
    """One pass: `deltas` can be taken once."""

    def __init__(
        self,
        session: Session,
        *,
        prepare: Callable[[], AbstractAsyncContextManager[Preparation]],
        decode: Callable[[Sequence[int]], str],
        continues: Sequence[int],
        stops: Sequence[str],
        block_tokens: int,
        arrived_at: Nanos,
        table: SessionTable,
        metrics: GatewayMetrics,
    ) -> None:
        """`continues`: the text that the answer goes on with; none: it is a text of its own."""
        self.session = session
        self._prepare = prepare
        self._preparation = Preparation()
        self._detokenizer = Detokenizer(decode, context=continues)
        self._scanner = StopScanner(stops)
        self._complete = 0
        self._block_tokens = block_tokens
        self._arrived_at = arrived_at
        self._table = table
        self._metrics = metrics

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Yield one delta a token and a last one with the finish reason. Closing it cancels the work on every node.

        Raises like Session.tokens, and Overloaded when the gateway has too many answers in progress.
        """
        with self._table.admitted(self.session):
            try:
                async with AsyncExitStack() as work:
                    self._preparation = await work.enter_async_context(self._prepare())
                    tokens = await work.enter_async_context(aclosing(self.session.tokens(self._preparation.published)))
                    async for token in tokens:
                        offset, completed = self._complete, self._detokenizer.push(token.token_id)
                        self._complete += len(completed)
                        text = self._scanner.push(completed)
                        if self._scanner.stopped:
                            yield Delta(text=text, tokens=(token,), text_offset=offset, finish_reason=FinishReason.STOP)
                            return
                        yield Delta(text=text, tokens=(token,), text_offset=offset)
                rest = self._scanner.push(self._detokenizer.flush())
                rest += self._scanner.flush()
                reason = FinishReason.STOP if self._scanner.stopped else self.session.finish_reason
                assert reason is not None, "a session without a finish reason raises"
                yield Delta(text=rest, finish_reason=reason)
            finally:
                self._count()

    @property
    def cached_blocks(self) -> int:
        """Blocks of the prompt that were in a pool or the store before this request's own prefill."""
        found, loaded = self._preparation.cached_blocks, self.session.story.loaded
        if not self._preparation.prefilled and loaded is not None:
            found = loaded.pool_blocks + loaded.store_blocks
        return min(found, len(self.session.request.chain))

    @property
    def pool_blocks(self) -> int:
        """Of `cached_blocks`, those that the first decode node had in its own pool; the others came from the store."""
        loaded = self.session.story.loaded
        return 0 if loaded is None else min(loaded.pool_blocks, self.cached_blocks)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object, with what operators and the demo want to know under "larder"."""
        prompt, generated = len(self.session.request.prompt_token_ids), len(self.session.transcript.generated_token_ids)
        story = self.session.story
        ttft = None if story.first_token_at is None else round(to_milliseconds(Nanos(story.first_token_at - self._arrived_at)), 3)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": self.cached_blocks * self._block_tokens},
            "larder": {
                "prompt_blocks": len(self.session.request.chain),
                "hit_blocks": self.cached_blocks,
                "pool_blocks": self.pool_blocks,
                "store_blocks": self.cached_blocks - self.pool_blocks,
                "failovers": story.failovers,
                "moves": story.moves,
                "max_gap_ms": round(to_milliseconds(story.longest_gap), 3),
                "notice_ms": round(to_milliseconds(story.longest_notice), 3),
                "takeover_ms": round(to_milliseconds(story.longest_takeover), 3),
                "decode_nodes": list(story.decode_nodes),
                "ttft_ms": ttft,
            },
        }

    def _count(self) -> None:
        story = self.session.story
        if story.first_token_at is not None:
            self._metrics.ttft.observe(to_seconds(Nanos(story.first_token_at - self._arrived_at)))
        self._metrics.prompt_tokens.inc(len(self.session.request.prompt_token_ids))
        self._metrics.cached_tokens.inc(self.cached_blocks * self._block_tokens)
        self._metrics.answer_tokens.inc(len(self.session.transcript.generated_token_ids))

"""The life of a request behind the HTTP door: tokenize, ask the store, open a session while the prompt is prefilled."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from decode_node.gateway.answer import Answer, Preparation
from decode_node.gateway.api import ChatCompletionRequest, CompletionRequest, TokenizeRequest
from decode_node.gateway.chat import template_messages
from decode_node.gateway.choices import Choices, seed_of_choice
from decode_node.gateway.config import GatewayConfig
from decode_node.gateway.failures import HttpFailure
from decode_node.gateway.fleet import Fleet, ServedModel
from decode_node.gateway.metrics import GatewayMetrics
from decode_node.gateway.nodes import Sampling
from decode_node.gateway.prefill import PrefillStage
from decode_node.gateway.router import PrefixAffinity
from decode_node.gateway.sessions import Session, SessionLimits, SessionRequest, SessionTable
from decode_node.gateway.tokenization import TextTooLong, Tokenizer, encode_within
from decode_node.gateway.watched_stream import StreamPatience
from decode_node.published import PublishedPrefix
from kvstore.clock import Clock
from kvstore.core.chain import chain_of, root_hash
from kvstore.errors import LarderError, Unavailable
from kvstore.ids import BlockRef, KeySpace, Namespace
from kvstore.units import Nanos, to_seconds

logger = logging.getLogger(__name__)

Generation = CompletionRequest | ChatCompletionRequest
Prompt = CompletionRequest | ChatCompletionRequest | TokenizeRequest


class PrefixProbe(Protocol):
    async def probe_prefix(self, key_space: KeySpace, chain: Sequence[BlockRef]) -> int:
        """How many leading blocks the store holds. Pins nothing; 0 when the store is away."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedPrompt:
    token_ids: Sequence[int]
    chain: Sequence[BlockRef]
    """Of its full blocks."""
    served: ServedModel


class GatewayService:
    def __init__(
        self,
        config: GatewayConfig,
        *,
        model_name: str,
        tokenizer: Tokenizer,
        fleet: Fleet,
        store: PrefixProbe,
        metrics: GatewayMetrics,
        clock: Clock,
    ) -> None:
        self.config = config
        self.model_name = model_name
        self.fleet = fleet
        self.metrics = metrics
        self.sessions = SessionTable(limit=config.limits.sessions)
        metrics.sessions.set_function(lambda: len(self.sessions))
        self._tokenizer = tokenizer
        self._store = store
        self._clock = clock
        self._affinity = PrefixAffinity(config.limits.affinity_entries)
        self._prefill = PrefillStage(fleet, policy=config.routing.policy, stall=config.timeouts.prefill_stall, clock=clock)
        self._limits = SessionLimits(
            patience=StreamPatience(
                connect=config.timeouts.connect,
                heartbeat=config.timeouts.heartbeat,
                first_token=config.timeouts.first_token,
                token=config.timeouts.token,
            ),
            no_node=config.timeouts.no_node,
            failures_in_a_row=config.limits.failures_in_a_row,
        )

    async def open(self, request: Generation, *, namespace: Namespace, request_id: str) -> Choices:
        """Choices that have not begun. Raises HttpFailure or InvalidRequest for a request that cannot be served, Unavailable without a
        decode node."""
        arrived_at = self._clock.now()
        self.check_model(request.model)
        self._check_token_ids(request)
        prompt = await self.tokenize(request, namespace=namespace)
        base = SessionRequest(
            request_id=request_id,
            namespace=namespace,
            identity=prompt.served.identity,
            prompt_token_ids=prompt.token_ids,
            chain=prompt.chain,
            sampling=_sampling(request),
            max_tokens=self._longest_answer(request, prompt),
            ignore_eos=bool(request.ignore_eos),
            stop_token_ids=request.stop_token_ids or (),
            top_logprobs=request.asked_logprobs,
            priority=request.priority,
        )

        def open_answer(index: int, begun: asyncio.Event) -> Answer:
            @asynccontextmanager
            async def prepare() -> AsyncIterator[Preparation]:
                if index == 0:
                    async with self._prepared(prompt, base) as preparation:
                        yield preparation
                else:
                    await begun.wait()
                    yield Preparation()

            sampling = dataclasses.replace(base.sampling, seed=seed_of_choice(base.sampling.seed, index))
            name = f"{request_id}-c{index}" if index else request_id
            choice = dataclasses.replace(base, request_id=name, sampling=sampling)
            # A chat's answer is a message of its own.
            continues = prompt.token_ids if isinstance(request, CompletionRequest) else ()
            return self._answer(choice, prepare, continues=continues, stops=request.stop or (), prompt=prompt, arrived_at=arrived_at)

        return Choices(open_answer, count=request.choices)

    def echo_of(self, request: Generation) -> str:
        """The prompt's text, if it is to stand before the answer."""
        if not isinstance(request, CompletionRequest) or not request.echo:
            return ""
        return request.prompt if isinstance(request.prompt, str) else self._tokenizer.decode(request.prompt)

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.token_bytes(token_id)

    def _answer(
        self,
        request: SessionRequest,
        prepare: Callable[[], AbstractAsyncContextManager[Preparation]],
        *,
        continues: Sequence[int],
        stops: Sequence[str],
        prompt: TokenizedPrompt,
        arrived_at: Nanos,
    ) -> Answer:
        session = Session(
            request,
            fleet=self.fleet,
            affinity=self._affinity,
            policy=self.config.routing.policy,
            limits=self._limits,
            metrics=self.metrics,
            clock=self._clock,
        )
        return Answer(
            session,
            prepare=prepare,
            decode=self._tokenizer.decode,
            continues=continues,
            stops=stops,
            block_tokens=prompt.served.block_tokens,
            arrived_at=arrived_at,
            table=self.sessions,
            metrics=self.metrics,
        )

    def _check_token_ids(self, request: Generation) -> None:
        """Raises HttpFailure for ids in options that the model does not have."""
        for param, token_ids in (("logit_bias", request.logit_bias or {}), ("stop_token_ids", request.stop_token_ids or ())):
            wrong = next((token_id for token_id in token_ids if not 0 <= token_id < self._tokenizer.vocab_size), None)
            if wrong is not None:
                message = f"{param}: token id {wrong} is unknown; token ids are in [0, {self._tokenizer.vocab_size})"
                raise HttpFailure.bad_request(message, param=param)

    def check_model(self, name: str) -> None:
        if name != self.model_name:
            message = f"the model {name[:200]!r} does not exist here; this gateway serves {self.model_name!r}"
            raise HttpFailure(404, message, param="model", code="model_not_found")

    async def tokenize(self, request: Prompt, *, namespace: Namespace) -> TokenizedPrompt:
        """Runs in a thread: a long prompt holds up nobody. Raises HttpFailure for a prompt that is empty, too long, or has ids the model
        does not have."""
        served = self.fleet.served
        if served is None:
            raise Unavailable("no decode node has answered yet, so the model's layout is not known; try again later")
        return await asyncio.to_thread(self._tokenize, request, namespace, served)

    def _tokenize(self, request: Prompt, namespace: Namespace, served: ServedModel) -> TokenizedPrompt:
        token_ids = self._token_ids(request, served.max_positions)
        if not token_ids:
            raise HttpFailure.bad_request("the prompt is empty; give at least one token", param="prompt")
        if not isinstance(request, TokenizeRequest) and len(token_ids) >= served.max_positions:
            raise _prompt_too_long(request, limit=served.max_positions, has=str(len(token_ids)))
        root = root_hash(namespace=namespace, model_digest=served.identity.model_digest, layout=served.identity.layout)
        return TokenizedPrompt(token_ids=token_ids, chain=chain_of(token_ids, block_tokens=served.block_tokens, root=root), served=served)

    def _token_ids(self, request: Prompt, limit: int) -> list[int]:
        """Raises HttpFailure for ids the model does not have, and for a text far beyond `limit`, the model's context."""
        if isinstance(request, CompletionRequest) and isinstance(request.prompt, list):
            if any(not 0 <= token_id < self._tokenizer.vocab_size for token_id in request.prompt):
                raise HttpFailure.bad_request(f"prompt: token ids are in [0, {self._tokenizer.vocab_size})", param="prompt")
            return request.prompt
        try:
            if isinstance(request, ChatCompletionRequest) or request.prompt is None:
                assert request.messages is not None
                if len(request.messages) > limit:
                    raise TextTooLong  # a message has a token at least; a template takes its time for many of them
                text = self._tokenizer.render_chat(template_messages(request.messages))
                return encode_within(self._tokenizer, text, limit=limit, add_special_tokens=False)
            assert isinstance(request.prompt, str)
            return encode_within(self._tokenizer, request.prompt, limit=limit)
        except TextTooLong:
            raise _prompt_too_long(request, limit=limit, has="far more") from None

    def _longest_answer(self, request: Generation, prompt: TokenizedPrompt) -> int:
        """Tokens the answer may have. Raises HttpFailure when the context has no room for them."""
        limit, used = prompt.served.max_positions, len(prompt.token_ids)
        if request.longest_answer is None:
            return min(limit - used, self.config.limits.default_max_tokens)
        if used + request.longest_answer > limit:
            message = (
                f"this model's context has {limit} tokens; {used + request.longest_answer} were asked for "
                f"({used} in the prompt, {request.longest_answer} for the answer): shorten one of them"
            )
            raise HttpFailure.bad_request(message, param=_prompt_field(request), code="context_length_exceeded")
        return request.longest_answer

    @asynccontextmanager
    async def _prepared(self, prompt: TokenizedPrompt, request: SessionRequest) -> AsyncIterator[Preparation]:
        """What there is of the prompt, with the prefill stage going on until the context is left."""
        if not self.fleet.decode_candidates(prompt.served.identity):
            raise Unavailable("no decode node is there to serve this; try again later")
        if not self.fleet.has_store:
            yield Preparation()
            return
        cached_blocks = await self._probe(KeySpace(request.namespace, prompt.served.identity.layout), prompt.chain)
        uncached_tokens = (len(prompt.chain) - cached_blocks) * prompt.served.block_tokens
        decode_at = self._prefill.decode_at(uncached_tokens=uncached_tokens, identity=prompt.served.identity)
        if decode_at is not None:
            self._affinity.remember(prompt.chain, decode_at)
        preparation = Preparation(cached_blocks=cached_blocks, published=PublishedPrefix())
        stage = asyncio.ensure_future(self._prefill_stage(preparation, prompt, request))
        try:
            yield preparation
        finally:
            stage.cancel()
            await asyncio.gather(stage, return_exceptions=True)

    async def _prefill_stage(self, preparation: Preparation, prompt: TokenizedPrompt, request: SessionRequest) -> None:
        block_tokens, published = prompt.served.block_tokens, preparation.published
        assert published is not None
        try:
            report = await self._prefill.run(
                request_id=request.request_id,
                namespace=request.namespace,
                token_ids=prompt.token_ids,
                cached_tokens=preparation.cached_blocks * block_tokens,
                block_tokens=block_tokens,
                identity=prompt.served.identity,
                published=published,
                priority=request.priority,
            )
        except Exception:
            # The answer does not depend on it.
            logger.exception("request %s: the prefill stage raised", request.request_id)
            return
        preparation.cached_blocks = max(preparation.cached_blocks, report.cached_blocks)
        preparation.prefilled = report.attempted

    async def _probe(self, key_space: KeySpace, chain: Sequence[BlockRef]) -> int:
        """Leading blocks in the store; 0 when it cannot say in time: a wrong guess here costs time, not the answer."""
        if not chain:
            return 0
        try:
            async with asyncio.timeout(to_seconds(self.config.timeouts.probe)):
                return await self._store.probe_prefix(key_space, chain)
        except (TimeoutError, LarderError) as error:
            logger.warning("the store did not say what it holds: %s", error or "too late")
            return 0


_LEAST_TOP_P = 1e-6
"""Of a smaller share the likeliest token alone has more, in every vocabulary there is."""


def _prompt_field(request: Prompt) -> str:
    return "messages" if isinstance(request, ChatCompletionRequest) or request.prompt is None else "prompt"


def _prompt_too_long(request: Prompt, *, limit: int, has: str) -> HttpFailure:
    message = f"this model's context has {limit} tokens, prompt and answer together; the prompt alone has {has}"
    return HttpFailure.bad_request(message, param=_prompt_field(request), code="context_length_exceeded")


def _sampling(request: Generation) -> Sampling:
    """OpenAI's defaults. Without a seed one is drawn here, so that a successor node draws the same numbers."""
    greedy = request.top_p is not None and request.top_p < _LEAST_TOP_P
    return Sampling(
        temperature=0.0 if greedy else 1.0 if request.temperature is None else request.temperature,
        top_k=max(0, request.top_k or 0),
        top_p=1.0 if greedy or request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        logit_bias=request.logit_bias or {},
        seed=random.getrandbits(64) if request.seed is None else request.seed % (1 << 64),
    )

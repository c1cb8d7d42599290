"""Requests of the OpenAI API: what is taken, what is refused and with which words.

A field that changes nothing at its default value is accepted at that value only; an unknown field is refused, so that nobody
believes a misspelt option to be in force.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from decode_node.gateway.failures import HttpFailure

MAX_CHOICES = 16
MAX_LOGIT_BIASES = 1_024
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 4
MAX_STOP_TOKENS = 64
MAX_STOP_CHARACTERS = 1_000
MAX_SEED_MAGNITUDE = 1 << 63
MAX_PRIORITY = 8
_TOKEN_ID = re.compile(r"[0-9]{1,20}")

_COMMON_NO_OPS: dict[str, tuple[Any, ...]] = {
    "service_tier": ("auto", "default"),
    "store": (False,),
}
_COMPLETION_NO_OPS = {**_COMMON_NO_OPS, "best_of": (1,), "suffix": ("",)}
_CHAT_NO_OPS = {
    **_COMMON_NO_OPS,
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
}
"""Field -> values that ask for nothing. null is always one of them."""

_NOTES = frozenset({"user", "metadata", "prompt_cache_key", "safety_identifier"})
"""Fields that describe the caller and never change the answer: accepted with any value, not used."""


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Request):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class LarderOptions(_Request):
    return_token_ids: bool = False
    """Adds `token_ids` to each choice, so that answers can be compared token by token."""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    """Larger goes first where requests wait; each step is a head start of bounded length, so nobody waits for ever."""


class GenerationRequest(_Request):
    """What completions and chat completions share."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.1, le=10, allow_inf_nan=False)] | None = None
    logit_bias: dict[int, float] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED_MAGNITUDE, lt=MAX_SEED_MAGNITUDE)] | None = None
    stop: list[str] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MAX_STOP_TOKENS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    larder: LarderOptions | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_strings(cls, value: Any) -> Any:
        stops = [value] if isinstance(value, str) else value
        if stops is None:
            return None
        if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
            raise ValueError("must be a string or an array of strings")
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings, these are {len(stops)}")
        if not all(0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
            raise ValueError(f"a stop string has 1 to {MAX_STOP_CHARACTERS} characters")
        return stops

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _biases(cls, value: Any) -> Any:
        """JSON has strings for keys; the ids stand in them."""
        if value is None:
            return None
        if not isinstance(value, dict) or not all(isinstance(key, str) and _TOKEN_ID.fullmatch(key) for key in value):
            raise ValueError("must be an object of token ids and numbers")
        if len(value) > MAX_LOGIT_BIASES:
            raise ValueError(f"at most {MAX_LOGIT_BIASES} tokens, these are {len(value)}")
        if not all(type(bias) in (int, float) and -100 <= bias <= 100 for bias in value.values()):
            raise ValueError("a bias is a number from -100 to 100")
        return {int(key): float(bias) for key, bias in value.items()}

    @model_validator(mode="after")
    def _usage_needs_a_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is only allowed with stream=true")
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def return_token_ids(self) -> bool:
        return self.larder is not None and self.larder.return_token_ids

    @property
    def priority(self) -> int:
        return 0 if self.larder is None else self.larder.priority

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def longest_answer(self) -> int | None:
        return self.max_tokens

    @property
    def asked_logprobs(self) -> int | None:
        """None: no logprobs; else how many of the likeliest tokens beside each token's own."""
        return None


class CompletionRequest(GenerationRequest):
    prompt: str | list[int]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _no_logprobs_of_the_prompt(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not supported: the prompt's own tokens have none here; leave one of them out")
        return self

    @property
    def asked_logprobs(self) -> int | None:
        return self.logprobs

    @field_validator("prompt", mode="before")
    @classmethod
    def _one_prompt(cls, value: Any) -> Any:
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            if len(value) == 1 and isinstance(value[0], str | list):
                value = value[0]
            if isinstance(value, str):
                return value
            if all(type(item) is int for item in value):
                return value
            if all(isinstance(item, str | list) for item in value):
                raise ValueError(f"one prompt a request is supported, these are {len(value)}; send them one by one")
        raise ValueError("must be a string, an array of token ids, or an array with one string")


class TextPart(_Request):
    type: Literal["text"]
    text: str


class ChatMessage(_Request):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_call_id: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    @field_validator("content", mode="before")
    @classmethod
    def _text_only(cls, value: Any) -> Any:
        if value is None or isinstance(value, str):
            return value
        if isinstance(value, list):
            other = next((part.get("type") for part in value if isinstance(part, dict) and part.get("type") != "text"), None)
            if other is not None:
                raise ValueError(f"parts of type {other!r} are not supported; this is a text model")
            return value
        raise ValueError("must be a string or an array of text parts")


class ChatCompletionRequest(GenerationRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> ChatCompletionRequest:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens mean the same; give one of them")
        return self

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs is only allowed with logprobs=true")
        return self

    @property
    def longest_answer(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def asked_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(_Request):
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


Parsed = TypeVar("Parsed", bound=BaseModel)


def parse_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """Raises HttpFailure 400 that names the field."""
    return _parse(CompletionRequest, body, no_ops=_COMPLETION_NO_OPS)


def parse_chat_completion(body: Mapping[str, Any]) -> ChatCompletionRequest:
    """Raises HttpFailure 400 that names the field."""
    return _parse(ChatCompletionRequest, body, no_ops=_CHAT_NO_OPS)


def parse_tokenize(body: Mapping[str, Any]) -> TokenizeRequest:
    """Raises HttpFailure 400 that names the field."""
    return _parse(TokenizeRequest, body, no_ops={})


def _parse(cls: type[Parsed], body: Mapping[str, Any], *, no_ops: Mapping[str, tuple[Any, ...]]) -> Parsed:
    fields = {name: value for name, value in body.items() if name not in _NOTES}
    for name, harmless in no_ops.items():
        value = fields.pop(name, None)
        if value is not None and not any(value == default and type(value) in _kinds(default) for default in harmless):
            allowed = " or ".join(repr(default) for default in harmless)
            raise HttpFailure.bad_request(f"{name}={value!r:.80} is not supported; leave it out, or set it to {allowed}", param=name)
    unknown = sorted(fields.keys() - cls.model_fields.keys())
    if unknown:
        known = sorted({*cls.model_fields, *no_ops, *_NOTES})
        nearest = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        names = ", ".join(repr(name[:80]) for name in unknown[:10])
        raise HttpFailure.bad_request(
            f"unknown field {names}{hint} (known: {', '.join(known)})", param=unknown[0][:80], code="unknown_parameter"
        )
    try:
        return cls.model_validate(fields)
    except ValidationError as error:
        raise _failure_of(error) from None


def _kinds(default: Any) -> tuple[type, ...]:
    """1 and 1.0 are one number, 1 and True are not."""
    return (int, float) if type(default) in (int, float) else (type(default),)


def _failure_of(error: ValidationError) -> HttpFailure:
    first = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(str(part) for part in first["loc"] if not _is_union_branch(part)) or None
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return HttpFailure.bad_request(f"the field {param!r} is required", param=param, code="missing_required_parameter")
    if first["type"] == "extra_forbidden":
        return HttpFailure.bad_request(f"unknown field {param!r}", param=param, code="unknown_parameter")
    return HttpFailure.bad_request(f"{param}: {message}" if param else message, param=param)


def _is_union_branch(part: int | str) -> bool:
    return isinstance(part, str) and ("[" in part or part in ("str", "int", "none"))

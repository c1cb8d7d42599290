from __future__ import annotations

from typing import Any

import pytest

from decode_node.gateway.api import parse_chat_completion, parse_completion, parse_tokenize
from decode_node.gateway.failures import HttpFailure

MESSAGES = [{"role": "user", "content": "hello"}]


def completion(**fields: Any):
    return parse_completion({"model": "m", "prompt": "hello", **fields})


def chat(**fields: Any):
    return parse_chat_completion({"model": "m", "messages": MESSAGES, **fields})


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [("hello", "hello"), ("", ""), ([1, 2, 3], [1, 2, 3]), (["hello"], "hello"), ([[1, 2]], [1, 2])],
)
def test_a_prompt_is_a_string_or_token_ids_or_a_list_with_one_of_them(prompt: Any, parsed: Any) -> None:
    assert completion(prompt=prompt).prompt == parsed


@pytest.mark.parametrize("prompt", [None, 5, {}, True, ["a", "b"], [[1], [2]], [1, "a"], [True, False], [1.5], ["a", None]])
def test_another_prompt_is_refused_by_name(prompt: Any) -> None:
    with pytest.raises(HttpFailure) as failure:
        completion(prompt=prompt)
    assert failure.value.status == 400
    assert failure.value.param == "prompt"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 3), ("suffix", "x"), ("service_tier", "flex"), ("store", True),
    ],
)  # fmt: skip
def test_an_option_that_is_not_supported_is_refused_with_what_is(field: str, value: Any) -> None:
    with pytest.raises(HttpFailure, match=f"{field}=.*not supported.*leave it out") as failure:
        completion(**{field: value})
    assert failure.value.param == field


def test_options_at_their_defaults_are_accepted() -> None:
    completion(
        n=None, best_of=1, logprobs=None, echo=False, suffix=None, presence_penalty=0, frequency_penalty=None, logit_bias={}, user="me",
        stream_options=None, service_tier="auto", metadata={"a": "b"},
    )  # fmt: skip
    chat(
        n=1, logprobs=False, top_logprobs=None, response_format={"type": "text"}, tools=[], tool_choice="none", parallel_tool_calls=True,
        modalities=["text"], store=False, prompt_cache_key="k", safety_identifier="s",
    )  # fmt: skip


def test_a_token_id_of_too_many_digits_is_refused_in_our_own_words() -> None:
    with pytest.raises(HttpFailure, match="must be an object of token ids"):
        completion(logit_bias={"9" * 5000: 1})


def test_tools_are_refused() -> None:
    with pytest.raises(HttpFailure, match=r"tools=.*not supported"):
        chat(tools=[{"type": "function", "function": {"name": "f"}}])


def test_an_unknown_field_is_named_with_the_nearest_known_one() -> None:
    with pytest.raises(HttpFailure, match="unknown field 'temprature'; did you mean 'temperature'") as failure:
        completion(temprature=1)
    assert failure.value.body["error"]["code"] == "unknown_parameter"
    assert failure.value.param == "temprature"
    with pytest.raises(HttpFailure, match=r"unknown field 'stream_options\.foo'"):
        completion(stream=True, stream_options={"foo": 1})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", "5"), ("max_tokens", 1.5), ("max_tokens", True), ("temperature", -0.1),
        ("temperature", 2.1), ("temperature", "hot"), ("temperature", float("nan")), ("top_p", 1.1), ("top_p", -1), ("top_k", 1.5),
        ("top_k", -2), ("seed", 1.5), ("seed", 1 << 64), ("stream", "yes"), ("stream", 1), ("stop", 5), ("stop", [1]), ("stop", [""]),
        ("stop", ""), ("stop", ["a", "b", "c", "d", "e"]), ("stop", "x" * 1001), ("ignore_eos", "no"), ("model", 5),
        ("larder", {"nope": 1}), ("larder", {"priority": 9}), ("larder", {"priority": -9}), ("larder", {"priority": "high"}),
        ("n", 0), ("n", 17), ("n", True), ("min_p", 1.1), ("min_p", -0.1), ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1), ("repetition_penalty", 0), ("repetition_penalty", 11), ("logit_bias", [1]), ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}), ("logit_bias", {"5": 101}), ("logit_bias", {"5": True}),
        ("logit_bias", dict.fromkeys(map(str, range(1025)), 1)),
        ("logprobs", 21), ("logprobs", -1), ("logprobs", True), ("echo", "yes"), ("stop_token_ids", [-1]), ("stop_token_ids", 5),
        ("stop_token_ids", [0] * 65),
    ],
)  # fmt: skip
def test_a_wrong_type_or_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(HttpFailure) as failure:
        completion(**{field: value})
    assert failure.value.status == 400
    assert failure.value.param is not None
    assert failure.value.param.split(".")[0] == field


def test_sampling_options_are_taken_as_they_are() -> None:
    asked = completion(n=3, min_p=0.1, presence_penalty=-2, frequency_penalty=2, repetition_penalty=1.2, stop_token_ids=[7], logprobs=5)
    assert (asked.choices, asked.min_p, asked.repetition_penalty, asked.stop_token_ids, asked.asked_logprobs) == (3, 0.1, 1.2, [7], 5)
    assert completion(logit_bias={"50": -100, "7": 0.5}).logit_bias == {50: -100.0, 7: 0.5}
    assert completion().choices == 1


def test_a_priority_is_0_unless_asked_for() -> None:
    assert (completion().priority, chat(larder={}).priority, chat(larder={"priority": -8}).priority) == (0, 0, -8)


def test_logprobs_of_a_chat_are_a_switch_and_a_number() -> None:
    assert chat().asked_logprobs is None
    assert chat(logprobs=False, top_logprobs=0).asked_logprobs is None
    assert chat(logprobs=True).asked_logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).asked_logprobs == 20
    with pytest.raises(HttpFailure, match="only allowed with logprobs=true"):
        chat(top_logprobs=5)
    with pytest.raises(HttpFailure, match="top_logprobs"):
        chat(logprobs=True, top_logprobs=21)


def test_an_echo_with_logprobs_is_refused_with_the_reason() -> None:
    assert completion(echo=True).echo
    with pytest.raises(HttpFailure, match="echo with logprobs is not supported"):
        completion(echo=True, logprobs=0)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(HttpFailure, match="'model' is required"):
        parse_completion({"prompt": "x"})
    with pytest.raises(HttpFailure, match="'messages' is required"):
        parse_chat_completion({"model": "m"})


def test_stop_strings_are_a_string_or_up_to_four() -> None:
    assert completion(stop="end").stop == ["end"]
    assert completion(stop=["a", "世界"]).stop == ["a", "世界"]
    assert completion(stop=None).stop is None
    assert completion().stop is None


def test_stream_options_need_a_stream() -> None:
    with pytest.raises(HttpFailure, match="stream_options is only allowed with stream=true"):
        completion(stream_options={"include_usage": True})
    assert completion(stream=True, stream_options={"include_usage": True}).include_usage
    assert not completion(stream=True).include_usage


def test_both_names_of_the_answer_limit_work_but_must_agree() -> None:
    assert chat(max_tokens=5).longest_answer == 5
    assert chat(max_completion_tokens=6).longest_answer == 6
    assert chat(max_tokens=7, max_completion_tokens=7).longest_answer == 7
    assert chat().longest_answer is None
    with pytest.raises(HttpFailure, match="mean the same"):
        chat(max_tokens=5, max_completion_tokens=6)


def test_text_parts_of_a_message_are_joined() -> None:
    parsed = chat(messages=[{"role": "user", "content": [{"type": "text", "text": "你"}, {"type": "text", "text": "好"}]}])
    assert parsed.messages[0].text == "你好"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        [{"role": "user"}, 5],
        [{"role": "robot", "content": "x"}],
        [{"content": "x"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": "x", "mood": "good"}],
    ],
)
def test_messages_of_another_shape_are_refused(messages: Any) -> None:
    with pytest.raises(HttpFailure) as failure:
        chat(messages=messages)
    assert failure.value.status == 400
    assert str(failure.value.param).startswith("messages")


def test_tokenize_takes_a_prompt_or_messages() -> None:
    assert parse_tokenize({"prompt": "x"}).prompt == "x"
    assert parse_tokenize({"messages": MESSAGES}).messages is not None
    with pytest.raises(HttpFailure, match="either prompt or messages"):
        parse_tokenize({})
    with pytest.raises(HttpFailure, match="either prompt or messages"):
        parse_tokenize({"prompt": "x", "messages": MESSAGES})


def test_the_error_body_has_openais_shape() -> None:
    body = HttpFailure(404, "no such model", param="model", code="model_not_found").body
    assert body == {
        "error": {"message": "no such model", "type": "invalid_request_error", "param": "model", "code": "model_not_found"},
    }
    assert HttpFailure(503, "later").body["error"]["type"] == "server_error"
    assert HttpFailure(503, "later").headers["retry-after"]

"""Every way a decode node can go: the client's stream goes on, no token lost, none twice, nothing broken at the seam."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import random
import signal
import sys
import time
from contextlib import asynccontextmanager

import pytest

from kvstore.core.view import Member, Role
from kvstore.errors import CorruptPayload, InvalidRequest, Overloaded, Unavailable
from kvstore.ids import BootId, NodeId
from kvstore.units import Nanos, milliseconds, seconds


def used_node(kitchen, usage):
    return next(node for node in kitchen.decode if node.node_id == usage["larder"]["decode_nodes"][0])


@pytest.mark.parametrize("position", [0, 1, 2, 15, 28, 29])
def test_a_stream_that_ends_with_an_error_goes_on_elsewhere_from_any_token(serving, position) -> None:
    async def scenario(kitchen) -> None:
        kitchen.break_at(position, lambda node: node.fail_at.update({position: Unavailable("a step failed")}))
        text, token_ids, reason, usage = await kitchen.streamed()
        assert text == kitchen.expected_text("tell me", 1, 30)
        assert bytes(token_ids).decode() == text
        assert reason == "length"
        assert usage["completion_tokens"] == 30
        assert usage["larder"]["failovers"] == 1
        assert len(set(usage["larder"]["decode_nodes"])) == 2
        assert kitchen.counted("larder_failovers_total", reason="error") == 1

    serving(scenario)


@pytest.mark.parametrize("status", ["UNKNOWN", "CANCELLED", "INTERNAL", "DATA_LOSS", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "NOT_FOUND"])
def test_a_stream_that_ends_with_any_status_of_failure_goes_on_elsewhere(serving, status) -> None:
    async def scenario(kitchen) -> None:
        kitchen.break_at(10, lambda node: node.abort_at.update({10: status}))
        text, *_ = await kitchen.streamed()
        assert text == kitchen.expected_text("tell me", 1, 30)
        assert kitchen.counted("larder_failovers_total", reason="error") == 1

    serving(scenario)


def test_an_exception_in_the_node_is_a_failover(serving) -> None:
    async def scenario(kitchen) -> None:
        kitchen.break_at(10, lambda node: node.fail_at.update({10: RuntimeError("a bug in the node")}))
        text, *_ = await kitchen.streamed()
        assert text == kitchen.expected_text("tell me", 1, 30)
        assert kitchen.counted("larder_failovers_total", reason="error") == 1

    serving(scenario)


def test_a_node_that_dies_in_mid_stream_is_replaced(serving) -> None:
    async def scenario(kitchen) -> None:
        kills = []
        kitchen.break_at(12, lambda node: kills.append(asyncio.ensure_future(node.kill())))
        for node in kitchen.decode:
            node.token_pause_s = 0.005
        text, _, _, usage = await kitchen.streamed()
        await asyncio.gather(*kills)
        assert text == kitchen.expected_text("tell me", 1, 30)
        assert usage["larder"]["failovers"] == 1
        assert usage["larder"]["max_gap_ms"] < 500

    serving(scenario)


def test_a_frozen_node_is_noticed_by_its_silence(serving) -> None:
    async def scenario(kitchen) -> None:
        broken = kitchen.break_at(12, lambda node: node.freeze())
        text, _, _, usage = await kitchen.streamed()
        assert text == kitchen.expected_text("tell me", 1, 30)
        assert kitchen.counted("larder_failovers_total", reason="silent") == 1
        assert 400 < usage["larder"]["max_gap_ms"] < 1_500
        broken[0].thaw()
        await asyncio.wait_for(broken[0].cancelled.wait(), 5)

    serving(scenario)


def test_a_node_frozen_before_its_first_token_is_left(serving) -> None:
    async def scenario(kitchen) -> None:
        kitchen.decode[0].freeze()
        text, _, _, usage = await kitchen.streamed()
        kitchen.decode[0].thaw()
        assert text == kitchen.expected_text("tell me", 1, 30)
        assert usage["larder"]["decode_nodes"][-1] == "decode-1"

    serving(scenario)


@pytest.mark.parametrize(
    ("lie", "reason"),
    [
        ({"shift_from": 7}, "position"),
        ({"skip_at": 7}, "position"),
        ({"end_early_at": 7}, "incomplete"),
        ({"silent_from": 7}, "silent"),
    ],
)
def test_a_node_that_lies_about_positions_or_stops_early_is_left(serving, lie, reason) -> None:
    async def scenario(kitchen) -> None:
        for name, value in lie.items():
            setattr(kitchen.decode[0], name, value)
        text, token_ids, _, usage = await kitchen.streamed()
        assert text == kitchen.expected_text("tell me", 1, 30)
        assert len(token_ids) == 30
        assert usage["larder"]["decode_nodes"] == ["decode-0", "decode-1"]
        assert list(kitchen.decode[1].requests[0].generated_token_ids) == token_ids[:7]
        assert kitchen.counted("larder_failovers_total", reason=reason) == 1

    serving(scenario)


def test_a_node_that_lives_but_makes_no_token_is_left(serving) -> None:
    async def scenario(kitchen) -> None:
        kitchen.decode[0].only_heartbeats_from = 7
        text, _, _, usage = await kitchen.streamed()
        assert text == kitchen.expected_text("tell me", 1, 30)
        assert usage["larder"]["decode_nodes"] == ["decode-0", "decode-1"]
        assert kitchen.counted("larder_failovers_total", reason="stalled") == 1

    serving(scenario, timeouts={"token": milliseconds(300)})


def test_a_gateway_that_stood_still_itself_blames_no_node(serving) -> None:
    async def scenario(kitchen) -> None:
        kitchen.break_at(12, lambda node: asyncio.get_running_loop().call_later(0.02, time.sleep, 0.8))
        for node in kitchen.decode:
            node.token_pause_s = 0.03
        text, _, _, usage = await kitchen.streamed()
        assert text == kitchen.expected_text("tell me", 1, 30)
        assert usage["larder"]["failovers"] == 0
        assert usage["larder"]["max_gap_ms"] > 700

    serving(scenario)


def test_an_answer_that_a_smaller_node_cuts_short_goes_on_elsewhere(serving) -> None:
    async def scenario(kitchen) -> None:
        def shrink(node) -> None:
            node.max_positions = 20

        kitchen.break_at(5, shrink)
        text, _, reason, usage = await kitchen.streamed()
        assert (text, reason, usage["completion_tokens"]) == (kitchen.expected_text("tell me", 1, 30), "length", 30)
        assert usage["larder"]["decode_nodes"] == ["decode-0", "decode-1"]
        await kitchen.decode[1].kill()
        kitchen.decode.pop()
        kitchen.refresh_view()
        kitchen.decode[0].max_positions = 512
        await kitchen.until(lambda: kitchen.service.fleet.served.max_positions == 512, "it has grown, and is alone")
        kitchen.break_at(5, shrink)
        _, token_ids, reason, _ = await kitchen.streamed()
        assert (len(token_ids), reason) == (13, "length"), "nobody could go on"

    serving(scenario)


def test_tokens_beyond_the_longest_answer_are_not_taken(serving) -> None:
    async def scenario(kitchen) -> None:
        kitchen.decode[0].beyond_max = True
        text, token_ids, reason, usage = await kitchen.streamed()
        assert (text, len(token_ids), reason) == (kitchen.expected_text("tell me", 1, 30), 30, "length")
        assert usage["completion_tokens"] == 30

    serving(scenario)


def test_a_node_that_dies_between_the_last_token_and_the_end_needs_no_successor(serving) -> None:
    async def scenario(kitchen) -> None:
        kitchen.decode[0].end_early_at = 30
        kitchen.decode[0].beyond_max = True
        text, _, reason, usage = await kitchen.streamed()
        assert (text, reason) == (kitchen.expected_text("tell me", 1, 30), "length")
        assert usage["larder"]["decode_nodes"] == ["decode-0"]

    serving(scenario)


def test_several_failovers_in_one_stream(serving) -> None:
    async def scenario(kitchen) -> None:
        for node in kitchen.decode:
            node.fail_at = {position: Unavailable("again") for position in (3, 4, 20, 29)}
        text, token_ids, _, usage = await kitchen.streamed()
        assert text == kitchen.expected_text("tell me", 1, 30)
        assert len(token_ids) == 30
        assert usage["larder"]["failovers"] >= 4

    serving(scenario, decode_nodes=3)


def test_only_failures_without_a_token_between_count_towards_giving_up(serving) -> None:
    async def scenario(kitchen) -> None:
        once = {position: Unavailable("again") for position in range(3, 30, 3)}
        for node in kitchen.decode:
            node.fail_at = once
        text, _, _, usage = await kitchen.streamed()
        assert text == kitchen.expected_text("tell me", 1, 30)
        assert usage["larder"]["failovers"] == 9

    serving(scenario, limits={"failures_in_a_row": 3}, timeouts={"no_node": Nanos(1)})


def test_every_successor_is_told_of_re_coded_blocks_that_any_node_before_had(serving) -> None:
    async def scenario(kitchen) -> None:
        first, second, third = kitchen.decode
        first.fail_at, second.fail_at, second.recoded = {5: Unavailable("dies")}, {10: Unavailable("dies")}, True
        third.fail_at = {15: Unavailable("dies")}
        text, *_ = await kitchen.streamed()
        assert text == kitchen.expected_text("tell me", 1, 30)
        assert [request.recoded for node in kitchen.decode for request in node.requests[:1]] == [False, False, True]
        assert [request.recoded for node in kitchen.decode for request in node.requests[1:]] == [True]
        for node in kitchen.decode:
            node.requests.clear()
        await kitchen.complete()
        assert [request.recoded for node in kitchen.decode for request in node.requests] == [False], "another answer"

    serving(scenario, decode_nodes=3)


def test_a_node_that_refuses_a_prompt_that_another_took_is_left(serving) -> None:
    async def scenario(kitchen) -> None:
        first, second, third = kitchen.decode
        first.fail_at, second.refusal = {5: Unavailable("dies")}, InvalidRequest("too long for my pool")
        text, _, _, usage = await kitchen.streamed()
        assert text == kitchen.expected_text("tell me", 1, 30)
        assert usage["larder"]["decode_nodes"] == ["decode-0", "decode-1", "decode-2"]
        assert len(third.requests) == 1

    serving(scenario, decode_nodes=3)


def test_a_character_and_a_stop_string_that_span_the_seam_come_out_right(serving) -> None:
    """The answer is cut at every byte in turn: no broken character, and the stop string is found wherever the seam lies."""
    answer = "你好🙂，世界END之后"
    script = list(answer.encode())

    async def scenario(kitchen) -> None:
        for node in kitchen.decode:
            node.script = script
        for position in range(len("你好🙂，世界END".encode())):
            for node in kitchen.decode:
                node.fail_at = {}
            kitchen.break_at(position, lambda node, position=position: node.fail_at.update({position: Unavailable("dies")}))
            text, _, reason, usage = await kitchen.streamed(stop=["END"], max_tokens=100)
            assert text == "你好🙂，世界", f"seam at byte {position}"
            assert reason == "stop"
            assert usage["larder"]["failovers"] == 1

    serving(scenario)


def test_many_streams_at_once_survive_nodes_that_fail_at_random(serving, seed) -> None:
    rng = random.Random(seed)

    def fail_sometimes(_: int) -> None:
        if rng.random() < 0.04:
            raise rng.choice([Unavailable("drains"), RuntimeError("a bug"), Overloaded("full"), CorruptPayload("bad bytes")])

    async def scenario(kitchen) -> None:
        for node in kitchen.decode:
            node.before_token = fail_sometimes
        prompts = [f"prompt {number}" for number in range(40)]
        answers = await asyncio.gather(*(kitchen.streamed(prompt, max_tokens=40) for prompt in prompts))
        for prompt, (text, token_ids, reason, usage) in zip(prompts, answers, strict=True):
            assert text == kitchen.expected_text(prompt, 1, 40), f"seed {seed}"
            assert (len(token_ids), reason, usage["completion_tokens"]) == (40, "length", 40)
        assert sum(usage["larder"]["failovers"] for *_, usage in answers) > 20

    serving(scenario, decode_nodes=3, limits={"failures_in_a_row": 20})


def test_a_single_node_that_comes_back_goes_on_with_its_own_stream(serving) -> None:
    async def scenario(kitchen) -> None:
        (node,) = kitchen.decode
        restarts = []

        async def die_and_come_back() -> None:
            await node.kill()
            await node.restart()

        kitchen.break_at(8, lambda node: restarts.append(asyncio.ensure_future(die_and_come_back())))
        node.token_pause_s = 0.005
        text, _, _, usage = await kitchen.streamed()
        await asyncio.gather(*restarts)
        assert text == kitchen.expected_text("tell me", 1, 30)
        assert usage["larder"]["failovers"] >= 1

    serving(scenario, decode_nodes=1)


def test_a_stream_whose_nodes_are_all_dead_waits_for_one_to_come_back(serving) -> None:
    async def scenario(kitchen) -> None:
        (node,) = kitchen.decode
        deaths = []

        def die(node) -> None:
            deaths.append(asyncio.ensure_future(node.kill()))

        kitchen.break_at(8, die)
        node.token_pause_s = 0.005
        answer = asyncio.ensure_future(kitchen.streamed())
        await kitchen.until(lambda: sum_of_failovers(kitchen) >= 5, "more failures in a row than a new request is given")
        await asyncio.gather(*deaths)
        await node.restart()
        text, _, _, usage = await answer
        assert text == kitchen.expected_text("tell me", 1, 30)
        assert usage["larder"]["failovers"] >= 5

    serving(scenario, decode_nodes=1, limits={"failures_in_a_row": 2}, timeouts={"no_node": seconds(20)})


def sum_of_failovers(kitchen) -> float:
    return sum(kitchen.counted("larder_failovers_total", reason=reason) for reason in ("error", "silent", "incomplete"))


def test_a_request_that_no_node_can_serve_ends_with_503_after_bounded_attempts(serving) -> None:
    async def scenario(kitchen) -> None:
        for node in kitchen.decode:
            node.fail_at = {0: Unavailable("poison")}
            node.before_token = lambda _, node=node: node.fail_at.update({0: Unavailable("poison")})
        response = await kitchen.complete()
        assert response.status_code == 503
        assert response.json()["error"]["type"] == "server_error"
        assert sum(len(node.requests) for node in kitchen.decode) == 3

    serving(scenario, limits={"failures_in_a_row": 3})


def test_a_stream_that_cannot_go_on_ends_with_an_error_event(serving) -> None:
    async def scenario(kitchen) -> None:
        for node in kitchen.decode:
            node.before_token = lambda at, node=node: node.fail_at.update({at: Unavailable("poison")}) if at >= 5 else None
        request = {"model": "oracle", "prompt": "tell me", "seed": 1, "max_tokens": 30, "stream": True}
        async with kitchen.http.stream("POST", "/v1/completions", json=request) as response:
            lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "unavailable"
        shown = "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines[:-2])
        assert shown == kitchen.expected_text("tell me", 1, 5)

    serving(scenario, limits={"failures_in_a_row": 2}, timeouts={"no_node": milliseconds(200)})


def test_a_busy_node_passes_the_request_on_and_all_busy_is_429(serving) -> None:
    async def scenario(kitchen) -> None:
        kitchen.decode[0].refusal = Overloaded("full")
        response = await kitchen.complete()
        assert response.status_code == 200
        assert response.json()["usage"]["larder"]["failovers"] == 0
        kitchen.decode[1].refusal = Overloaded("full")
        response = await kitchen.complete()
        assert response.status_code == 429
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert response.headers["retry-after"]

    serving(scenario, limits={"failures_in_a_row": 3})


def test_a_request_the_node_calls_invalid_is_not_tried_elsewhere(serving) -> None:
    async def scenario(kitchen) -> None:
        for node in kitchen.decode:
            node.refusal = InvalidRequest("the pool has no room for this prompt")
        response = await kitchen.complete()
        assert response.status_code == 400
        assert "no room" in response.json()["error"]["message"]
        assert sum(len(node.requests) for node in kitchen.decode) == 1

    serving(scenario)


@asynccontextmanager
async def streaming_from_a_process(kitchen, oracle_script, environment):
    """(process, stream) of a decode node in a process of its own, five tokens into the answer."""
    process = await asyncio.create_subprocess_exec(sys.executable, str(oracle_script), stdout=asyncio.subprocess.PIPE, env=environment)
    try:
        assert process.stdout is not None
        address = (await process.stdout.readline()).decode().strip()
        kitchen.extra_members.append(Member(node_id=NodeId("a-process"), boot_id=BootId(os.urandom(16)), role=Role.DECODE, address=address))
        kitchen.refresh_view()
        await kitchen.until(lambda: len(kitchen.service.fleet.decode_candidates(kitchen.service.fleet.served.identity)) == 2, "polled")
        stream = asyncio.ensure_future(kitchen.streamed())
        await kitchen.until(lambda: tokens_so_far(kitchen) >= 5, "five tokens")
        (session,) = kitchen.service.sessions
        assert session.decode_node == "a-process"
        yield process, stream
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def tokens_so_far(kitchen) -> int:
    return max((len(session.transcript.generated_token_ids) for session in kitchen.service.sessions), default=0)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_killed_or_stopped_by_a_signal(serving, oracle_script, subprocess_environment, blow) -> None:
    async def scenario(kitchen) -> None:
        async with streaming_from_a_process(kitchen, oracle_script, subprocess_environment) as (process, stream):
            process.send_signal(blow)
            text, _, _, usage = await stream
            assert text == kitchen.expected_text("tell me", 1, 30)
            assert usage["larder"]["decode_nodes"] == ["a-process", "decode-0"]
            # The kernel says at once that a process is dead; that it stands still, only its silence says.
            dead = blow == signal.SIGKILL
            assert kitchen.counted("larder_failovers_total", reason="error" if dead else "silent") == 1
            assert dead or usage["larder"]["notice_ms"] >= 500
            assert usage["larder"]["takeover_ms"] > 0

    serving(scenario, decode_nodes=1)


def test_a_process_that_hardly_gets_to_run_is_not_taken_for_a_frozen_one(serving, oracle_script, subprocess_environment) -> None:
    async def scenario(kitchen) -> None:
        async with streaming_from_a_process(kitchen, oracle_script, subprocess_environment) as (process, stream):
            while (tokens := tokens_so_far(kitchen)) and tokens < 15:
                process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(0.2)  # of the 0.5 s that it may be silent
                process.send_signal(signal.SIGCONT)
                await kitchen.until(lambda tokens=tokens: tokens_so_far(kitchen) != tokens, "it goes on")
            text, _, _, usage = await stream
            assert text == kitchen.expected_text("tell me", 1, 30)
            assert usage["larder"]["decode_nodes"] == ["a-process"]

    serving(scenario, decode_nodes=1)


def test_a_silent_node_gets_nothing_before_it_answers_a_poll(serving) -> None:
    """Its streams have gone, so it would look like the least busy one."""

    async def scenario(kitchen) -> None:
        kitchen.break_at(12, lambda node: node.freeze())
        _, _, _, usage = await kitchen.streamed()
        frozen, other = usage["larder"]["decode_nodes"]
        (tracked,) = [node for name, node in kitchen.service.fleet.decode.nodes.items() if name == frozen]
        tracked._excluded_until = 0  # the pause that any failure brings is over
        tracked.load = dataclasses.replace(tracked.load, sequences=0)
        later = [(await kitchen.complete(f"{n}")).json()["usage"]["larder"]["decode_nodes"] for n in range(3)]
        assert later == [[other]] * 3
        next(node for node in kitchen.decode if node.node_id == frozen).thaw()
        await kitchen.until(lambda: tracked.answers, "it answers polls again")

    serving(scenario, timeouts={"poll": seconds(20)})

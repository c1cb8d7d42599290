"""Acts 2, 4 and 5 of the demo, and what must hold beside them, on real processes with a tiny random model."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from kvstore.admin import commands, upkeep
from kvstore.admin.cluster_access import ClusterAccess
from kvstore.admin.local_cluster import LocalCluster
from kvstore.admin.stream_client import Stream

pytestmark = pytest.mark.timeout(180)

TEXT = "The larder keeps what the kitchen has cooked, and whoever comes back finds it on the shelf and goes on. " * 6


@pytest.fixture(scope="module")
def cluster(start_cluster: Callable[..., LocalCluster]) -> LocalCluster:
    return start_cluster()


def access_of(cluster: LocalCluster) -> ClusterAccess:
    return ClusterAccess(redis_url=cluster.redis_url, gateway_url=cluster.gateway_url)


def kvctl(cluster: LocalCluster, *words: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.admin.kvctl", *words, "--redis", cluster.redis_url, "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def decode_node_of(cluster: LocalCluster) -> str:
    sessions = httpx.get(f"{cluster.gateway_url}/larder/sessions", timeout=5, trust_env=False).json()["sessions"]
    (node,) = [session["decode_node"] for session in sessions if session["decode_node"]]
    return str(node)


def test_another_question_on_the_same_text_finds_its_blocks(cluster: LocalCluster, connect: Any) -> None:
    async def ask() -> tuple[Stream, Stream]:
        async with connect(cluster) as client:
            first = await client.stream(TEXT + "Where is it?", max_tokens=8)
            return first, await client.stream(TEXT + "Who comes back?", max_tokens=8)

    first, second = asyncio.run(ask())
    assert first.larder["hit_blocks"] == 0
    assert second.larder["hit_blocks"] >= second.larder["prompt_blocks"] - 2
    assert second.usage["prompt_tokens_details"]["cached_tokens"] == 32 * second.larder["hit_blocks"]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.95, "seed": 11}], ids=["greedy", "sampled"])
def test_a_stream_outlives_its_decode_node_with_the_same_tokens(cluster: LocalCluster, connect: Any, sampling: dict[str, object]) -> None:
    victims: list[str] = []

    def kill_at_100(stream: Stream) -> None:
        if not victims and len(stream.token_ids) >= 100:
            victims.append(decode_node_of(cluster))
            cluster.processes[victims[0]].kill()

    async def ask() -> tuple[Stream, Stream]:
        async with connect(cluster) as client:
            text = f"{TEXT} And then? ({sampling['temperature']})"
            killed = await client.stream(text, max_tokens=1500, on_token=kill_at_100, **sampling)
            return killed, await client.stream(text, max_tokens=1500, **sampling)

    killed, undisturbed = asyncio.run(ask())
    cluster.restart(victims[0])
    assert killed.larder["failovers"] >= 1
    assert killed.larder["decode_nodes"][0] == victims[0]
    assert len(killed.larder["decode_nodes"]) >= 2
    assert len(killed.token_ids) == 1500
    assert killed.token_ids == undisturbed.token_ids
    assert killed.text == undisturbed.text


def test_a_store_node_that_dies_leaves_the_other_replica(cluster: LocalCluster, connect: Any) -> None:
    question = TEXT * 2 + "What is on the shelf?"

    async def ask() -> Stream:
        async with connect(cluster) as client:
            stream: Stream = await client.stream(question, max_tokens=40)
            return stream

    before = asyncio.run(ask())
    for name in ("decode-1", "decode-2"):
        cluster.restart(name)  # their pools are empty now: only the store can answer
    located = asyncio.run(commands.locate(access_of(cluster), {"messages": [{"role": "user", "content": question}]}))
    victim = located["blocks"][0]["owners"][0]
    assert {copy["node_id"] for copy in located["blocks"][0]["copies"]} == set(located["blocks"][0]["owners"])
    cluster.processes[victim].kill()
    after = asyncio.run(ask())
    cluster.restart(victim)
    assert after.larder["hit_blocks"] >= after.larder["prompt_blocks"] - 1
    assert after.token_ids == before.token_ids


def test_kvctl_sees_the_cluster_and_the_blocks(cluster: LocalCluster, connect: Any) -> None:
    prompt = "One block, two blocks, three blocks of a prompt that kvctl can find again. " * 8

    async def ask() -> None:
        async with connect(cluster) as client:
            answer = await client.http.post("/v1/completions", json={"model": client.model, "prompt": prompt, "max_tokens": 4})
            assert answer.status_code == 200, answer.text

    asyncio.run(ask())
    nodes = {node["node_id"]: node["state"] for node in kvctl(cluster, "nodes")["nodes"]}
    assert {name for name, state in nodes.items() if state == "active"} >= {
        "store-1",
        "store-2",
        "store-3",
        "prefill-1",
        "decode-1",
        "decode-2",
    }
    status = kvctl(cluster, "status", "--gateway", cluster.gateway_url)
    assert status["gateway"]["health"]["status"] == "ok"
    assert sum(node["blocks"] for node in status["stores"]) > 0
    located = kvctl(cluster, "locate", prompt, "--gateway", cluster.gateway_url)
    assert located["held_prefix_blocks"] == len(located["blocks"]) > 3
    assert all(len(block["copies"]) == 2 for block in located["blocks"])
    verified = kvctl(cluster, "verify")
    assert verified["bad_copies"] == 0
    assert sum(node["checked_copies"] for node in verified["nodes"]) >= 2 * len(located["blocks"])
    assert kvctl(cluster, "repair")["failed_blocks"] == 0
    evicted = kvctl(cluster, "evict", "--prompt", prompt, "--gateway", cluster.gateway_url)
    assert sum(node["evicted_copies"] for node in evicted["nodes"]) == 2 * len(located["blocks"])
    explained = kvctl(cluster, "explain", prompt, "--gateway", cluster.gateway_url)
    assert (explained["held_prefix_blocks"], explained["cause"], explained["broken"]["index"]) == (0, "evicted", 0)
    assert "operator" in {gone["reason"] for gone in explained["departures"]}
    with pytest.raises(AssertionError, match=r"nothing to pin: the prompt has \d+ tokens, and no full block of"):
        kvctl(cluster, "pin", "short", "--gateway", cluster.gateway_url)


def test_the_official_client_works_streaming_and_not(cluster: LocalCluster) -> None:
    from openai import OpenAI

    with OpenAI(base_url=f"{cluster.gateway_url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        messages: list[Any] = [{"role": "user", "content": "你好，世界！ Say something."}]
        whole = client.chat.completions.create(model=model, messages=messages, max_tokens=24, temperature=0)
        pieces = list(client.chat.completions.create(model=model, messages=messages, max_tokens=24, temperature=0, stream=True))
        text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        assert text == whole.choices[0].message.content
        assert whole.usage is not None
        assert whole.usage.completion_tokens > 0


def test_every_process_serves_metrics_under_our_names(cluster: LocalCluster) -> None:
    wanted = {
        "store": "larder_tier_bytes",
        "prefill": "larder_queue_length",
        "decode": "larder_hit_tokens",
        "gateway": "larder_ttft_seconds",
    }
    for process in cluster.processes.values():
        text = httpx.get(f"http://{process.addresses['metrics']}/metrics", timeout=5, trust_env=False).text
        assert wanted[process.role] in text, process.name


def test_a_drain_moves_the_streams_of_a_decode_node_and_they_do_not_show_it(cluster: LocalCluster, connect: Any) -> None:
    """What `kvctl drain` calls, under several streams. The last test of this cluster: the node stays drained."""
    samplings: list[dict[str, object]] = [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.95, "seed": 11}] * 2
    texts = [f"{TEXT} And {number} times?" for number in range(len(samplings))]

    async def ask() -> tuple[str, list[Stream], list[Stream]]:
        async with connect(cluster) as client:
            all_run = asyncio.Event()
            running: set[int] = set()

            def tell(stream: Stream) -> None:
                if len(stream.token_ids) >= 20:
                    running.add(id(stream))
                    if len(running) == len(samplings):
                        all_run.set()

            def all_streams(**more: Any) -> Any:
                asked = zip(texts, samplings, strict=True)
                return asyncio.gather(*(client.stream(text, max_tokens=1500, **more, **sampling) for text, sampling in asked))

            moved = asyncio.ensure_future(all_streams(on_token=tell))
            await asyncio.wait((moved, asyncio.ensure_future(all_run.wait())), return_when=asyncio.FIRST_COMPLETED)
            answer = await asyncio.to_thread(httpx.get, f"{cluster.gateway_url}/larder/sessions", timeout=30, trust_env=False)
            leaving = str(answer.json()["sessions"][0]["decode_node"])
            await upkeep.drain(access_of(cluster), leaving, wait=True, on_progress=lambda *_: None)
            return leaving, await moved, await all_streams()

    leaving, moved, undisturbed = asyncio.run(ask())
    assert [stream.token_ids for stream in moved] == [stream.token_ids for stream in undisturbed]
    assert sum(stream.larder["failovers"] for stream in moved) == 0
    assert sum(stream.larder["moves"] for stream in moved) >= 1
    assert all(stream.larder["decode_nodes"][0] == leaving for stream in moved if stream.larder["moves"])


def test_without_any_store_node_requests_succeed_and_health_says_so(start_cluster: Callable[..., LocalCluster], connect: Any) -> None:
    cluster = start_cluster(store_nodes=2, decode_nodes=1)

    async def ask() -> tuple[Stream, Stream]:
        async with connect(cluster) as client:
            before = await client.stream(TEXT + "Still there?", max_tokens=24)
            for name in ("store-1", "store-2"):
                cluster.processes[name].kill()
            return before, await client.stream(TEXT + "Still there?", max_tokens=24)

    before, after = asyncio.run(ask())
    assert after.token_ids == before.token_ids
    health = _health_that_says(cluster, "no store node")
    assert health["status"] == "degraded"

    async def ask_something_new() -> Stream:
        async with connect(cluster) as client:
            stream: Stream = await client.stream("A prompt that nobody has ever seen. " * 12, max_tokens=24)
            return stream

    assert len(asyncio.run(ask_something_new()).token_ids) == 24


def _health_that_says(cluster: LocalCluster, reason: str) -> Any:
    """The gateway notices dead nodes by its polls, one after the other; wait for the word, at most 20 s."""
    import time

    deadline = time.monotonic() + 20
    health: Any = {}
    while time.monotonic() < deadline:
        health = httpx.get(f"{cluster.gateway_url}/health", timeout=5, trust_env=False).json()
        if any(reason in each for each in health.get("degraded", ())):
            return health
        time.sleep(0.1)
    raise AssertionError(health)

"""`python -m prefill_node`: one prefill node."""

from __future__ import annotations

from kvstore.process import run_process
from prefill_node.config import PrefillConfig
from prefill_node.start import started


async def serve(config: PrefillConfig) -> None:
    async with started(config) as start:
        from prefill_node.serving import serve_prefill  # torch takes seconds to import

        await serve_prefill(config, start)


if __name__ == "__main__":
    run_process(serve, PrefillConfig, "prefill_node")

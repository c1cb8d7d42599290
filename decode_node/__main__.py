"""`python -m decode_node`: one decode node."""

from __future__ import annotations

from decode_node.config import DecodeConfig
from kvstore.process import run_process
from prefill_node.start import started


async def serve(config: DecodeConfig) -> None:
    async with started(config) as start:
        from decode_node.serving import serve_decode  # torch takes seconds to import

        await serve_decode(config, start)


if __name__ == "__main__":
    run_process(serve, DecodeConfig, "decode_node")

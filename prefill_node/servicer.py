"""PrefillService on the wire: messages to a PrefillSession and back."""

from __future__ import annotations

import itertools
from contextlib import aclosing
from typing import Any

from kvpb.v1 import prefill_pb2, prefill_pb2_grpc

from kvstore.rpc.server import guarded
from prefill_node.compute_node import ComputeNode
from prefill_node.session import PrefillCall, PrefillSession


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):  # type: ignore[misc]  # generated code has no types
    def __init__(self, node: ComputeNode) -> None:
        self._node = node
        self._calls = itertools.count()

    @guarded
    async def Prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> None:
        call = PrefillCall(
            # The same request may come twice, over two calls that overlap: the number tells them apart.
            request_id=f"{request.request_id}/{next(self._calls)}",
            namespace=request.namespace,
            token_ids=tuple(request.token_ids),
            priority=request.priority,
        )
        async with aclosing(PrefillSession(call, self._node).progress()) as stream:
            async for progress in stream:
                await context.write(
                    prefill_pb2.PrefillProgress(
                        cached_blocks=progress.cached_blocks,
                        published_blocks=progress.published_blocks,
                        prompt_blocks=progress.prompt_blocks,
                        done=progress.done,
                        degraded=progress.degraded,
                    )
                )

    @guarded
    async def Load(self, request: prefill_pb2.PrefillLoadRequest, context: Any) -> prefill_pb2.PrefillLoadResponse:
        load = self._node.engine.load()
        return prefill_pb2.PrefillLoadResponse(
            node_id=self._node.config.node_id,
            model=self._node.model.name,
            layout_fingerprint=self._node.model.layout.fingerprint,
            running=load.running,
            queued=load.queued,
            queued_tokens=load.queued_tokens,
            tokens_per_s=load.prefill_tokens_per_s,
            model_digest=self._node.model.model_digest,
        )

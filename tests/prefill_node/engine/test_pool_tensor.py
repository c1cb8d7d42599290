from __future__ import annotations

import pytest
import torch

from kvstore.core.layout import Layout
from kvstore.errors import ConfigError
from prefill_node.engine.pool_tensor import PoolTensor


@pytest.mark.parametrize("blocks", [10**7, 10**11, 10**17])
def test_a_pool_beyond_the_memory_is_refused_with_the_key_to_change(blocks: int) -> None:
    layout = Layout(layers=30, kv_heads=3, head_dim=64, dtype="bfloat16", block_tokens=32)
    with pytest.raises(ConfigError, match="set pool_blocks lower"):
        PoolTensor(layout, blocks=blocks, device=torch.device("cpu"))

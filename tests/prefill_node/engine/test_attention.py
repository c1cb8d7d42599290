"""The kernels against the reference made of torch's operators."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvstore.core.layout import Layout
from prefill_node.engine.attention import GatheredAttention
from prefill_node.engine.batch import make_batch
from prefill_node.engine.kernel_attention import KernelAttention
from prefill_node.engine.packed_linear import PackedLinear
from prefill_node.engine.pool_tensor import PoolTensor
from prefill_node.engine.scheduler import Span
from prefill_node.engine.team import Team


@pytest.fixture(params=[1, 3])
def team(request):
    team = Team(request.param)
    yield team
    team.close()


def _sequence(length, blocks):
    return SimpleNamespace(tokens=[1] * length, blocks=blocks)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("block_tokens", "head_dim", "kv_heads", "heads"), [(8, 16, 2, 6), (32, 64, 3, 9), (16, 80, 1, 4), (8, 128, 4, 4)])
def test_paged_attention_equals_the_reference_and_writes_the_same_pool(dtype, block_tokens, head_dim, kv_heads, heads, team):
    layout = Layout(layers=2, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, block_tokens=block_tokens)
    torch.manual_seed(1)
    pools = [PoolTensor(layout, blocks=24, device=torch.device("cpu")) for _ in range(2)]
    pools[0].kv.normal_()
    pools[0].kv[20:] = float("nan")  # slots that nobody wrote must not be looked at
    pools[1].kv.copy_(pools[0].kv)
    b = block_tokens
    spans = [
        Span(_sequence(3 * b, [7, 2, 20]), 2 * b, 3),
        Span(_sequence(5 * b, [3, 4, 9, 11, 12]), b, 3 * b),
        Span(_sequence(b, [21]), 0, 1),
    ]
    batch = make_batch(spans, block_tokens=b)
    query, key, value = (torch.randn(batch.rows, count, head_dim).transpose(0, 1) for count in (heads, kv_heads, kv_heads))
    kernel, reference = KernelAttention(pools[0], batch, team), GatheredAttention(pools[1].kv, batch, rows_alone=False)
    with team.awake():
        for layer in range(2):
            ours = kernel.attend(layer, query, key, value, head_dim**-0.5)
            theirs = reference.attend(layer, query, key, value, head_dim**-0.5)
            assert (ours - theirs).abs().max() < 2e-5
    assert np.array_equal(pools[0].array, pools[1].array, equal_nan=dtype == "float32")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(8, 5), (48, 100), (640, 256)])
def test_a_packed_linear_layer_equals_the_original_for_any_number_of_rows(dtype, bias, inputs, outputs, team):
    torch.manual_seed(2)
    parts = [torch.nn.Linear(inputs, outputs, bias=bias).to(dtype), torch.nn.Linear(inputs, 7, bias=False).to(dtype)]
    packed = PackedLinear(parts, team)
    x = torch.randn(230, inputs)
    with torch.inference_mode(), team.awake():
        whole = torch.cat(
            [torch.nn.functional.linear(x, p.weight.float(), None if p.bias is None else p.bias.float()) for p in parts], dim=1
        )
        for rows in (1, 2, 3, 4, 5, 6, 7, 13, 230):
            out = packed(x[None, :rows])
            assert out.shape == (1, rows, outputs + 7)
            assert (out[0] - whole[:rows]).abs().max() < 1e-4
            assert torch.equal(out[0], packed(x)[:rows])

"""The kernels against the reference made of torch's operators."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvstore.core.layout import Layout
from prefill_node.engine.attention import GatheredAttention
from prefill_node.engine.batch import make_batch
from prefill_node.engine.operations import operations
from prefill_node.engine.packed_linear import PackedLinear, WeightRoom
from prefill_node.engine.pool_tensor import PoolTensor
from prefill_node.engine.program import linear_record
from prefill_node.engine.record import ITEMS, ROWS, ROWS_OF_ITEM, address, float_bits, record
from prefill_node.engine.scheduler import Span
from prefill_node.engine.team import Team


@pytest.fixture(params=[1, 3])
def team(request):
    team = Team(request.param)
    yield team
    team.close()


def _run(team, *operations):
    """Each (record, items) on so many rows."""
    rows, pairs = operations[0], operations[1:]
    records = np.stack([fields for fields, _ in pairs])
    records[:, ROWS] = rows
    records[:, ITEMS] = [items for _, items in pairs]
    team.run(records)


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
    query, key, value = (torch.randn(batch.rows, count, head_dim) for count in (heads, kv_heads, kv_heads))
    side_by_side = torch.cat([query, key, value], dim=1).view(batch.rows, -1).contiguous()
    cos, sin = torch.ones(batch.rows, head_dim), torch.zeros(batch.rows, head_dim)  # turned by nothing
    reference = GatheredAttention(pools[1].kv, batch, rows_alone=False)
    kernels, out = operations(), torch.empty(batch.rows, heads, head_dim)
    row = (address(side_by_side), side_by_side.shape[1])
    tables = (address(batch.tables), batch.tables.shape[1], address(batch.table_of), address(batch.lengths), address(batch.groups))
    places = (address(cos), address(sin), address(batch.write_blocks), address(batch.write_offsets))
    with team.awake():
        for layer in range(2):
            at = pools[0].array[0, layer].ctypes.data
            in_pool = (at, layout.block_bytes, block_tokens, int(dtype == "bfloat16"))
            write = record(kernels.heads, *row, heads, kv_heads, head_dim, 0, 0, 0, *in_pool, *places)
            attend = record(
                kernels.attend, *row, heads // kv_heads, kv_heads, head_dim, *in_pool, float_bits(head_dim**-0.5), address(out), *tables
            )
            _run(team, batch.rows, (write, -(-batch.rows // ROWS_OF_ITEM)), (attend, len(batch.groups) * kv_heads))
            theirs = reference.attend(layer, *(x.transpose(0, 1) for x in (query, key, value)), head_dim**-0.5)
            assert (out - theirs).abs().max() < 2e-5
    assert np.array_equal(pools[0].array, pools[1].array, equal_nan=dtype == "float32")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(8, 5), (48, 100), (640, 256)])
def test_a_packed_linear_layer_equals_the_original_for_any_number_of_rows(dtype, bias, inputs, outputs, team):
    torch.manual_seed(2)
    parts = [torch.nn.Linear(inputs, outputs, bias=bias).to(dtype), torch.nn.Linear(inputs, 7, bias=False).to(dtype)]
    packed = PackedLinear.of(parts, WeightRoom([parts]))
    x, out = torch.randn(230, inputs), torch.empty(230, packed.width)
    fields = linear_record(packed, x, out, threads=team.threads)
    with torch.inference_mode(), team.awake():
        expected = torch.cat(
            [torch.nn.functional.linear(x, p.weight.float(), None if p.bias is None else p.bias.float()) for p in parts], dim=1
        )
        whole = None
        for rows in (230, 1, 2, 3, 4, 5, 6, 7, 13):
            out.fill_(float("nan"))
            items = -(-rows // packed.row_block) * -(-packed.panels // packed.panels_of_item(team.threads))
            _run(team, rows, (fields, items))
            if whole is None:
                whole = out[:, : outputs + 7].clone()
                assert (whole - expected).abs().max() < 1e-4
            assert torch.equal(out[:rows, : outputs + 7], whole[:rows])
            assert out[rows:].isnan().all()

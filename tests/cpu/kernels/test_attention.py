"""The CPU route of paged attention against its oracle."""

from copy import deepcopy

import pytest
import torch

from longlane.kernels import kv_codec
from longlane.kernels.attention import Rotation, cpu, naive
from support.rows import SHAPES, make_rows

HEADS, KV_HEADS, DIM = 6, 2, 32
CODEC = {torch.float64: "float64", torch.float32: "float32", torch.bfloat16: "bf16"}
TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def filled(rows, dtype):
    """Query, and pages that hold the rows' keys and values up to their last token and NaN beyond."""
    torch.manual_seed(3)
    pages = kv_codec.allocate(CODEC[dtype], int(rows.block_table.max()) + 1, KV_HEADS, DIM)
    for plane in (pages.k, pages.v):
        plane.fill_(torch.nan)
    whole = make_rows([end - start + context for start, end, context in rows.spans()], [0] * rows.rows)
    k, v = torch.randn(2, whole.tokens, KV_HEADS, DIM, dtype=dtype)
    kv_codec.append(pages, k, v, whole)
    return torch.randn(rows.tokens, HEADS, DIM, dtype=dtype), pages


@pytest.mark.parametrize("first_slot", [0, 1])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_route_equals_oracle(shape, dtype, first_slot):
    rows = make_rows(*SHAPES[shape])
    q, pages = filled(rows, dtype)
    result, reference = (route.attend(q, pages, rows, scale=0.2, first_slot=first_slot) for route in (cpu, naive))
    torch.testing.assert_close(result, reference, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_query_with_nothing_to_see_gets_zeros():
    rows = make_rows((2,), (0,))
    q, pages = filled(rows, torch.float32)
    result = cpu.attend(q, pages, rows, scale=0.2, first_slot=1)
    assert not result[0].any()
    torch.testing.assert_close(result[1], pages.v[rows.page[1], :, rows.offset[1]].repeat_interleave(3, 0))


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_a_mix_equals_the_oracle(gated):
    rows = make_rows((3, 1), (62, 0))
    q, pages = filled(rows, torch.float32)
    k, v = torch.randn(2, rows.tokens, KV_HEADS, DIM)
    angle, weights = torch.randn(rows.tokens, DIM // 4), torch.rand(2, DIM)
    # The gate is a slice of a fused product.
    gate = torch.randn(rows.tokens, 2 * HEADS, DIM)[:, HEADS:] if gated else None
    given = (q, k, v, Rotation(angle.cos(), angle.sin(), *weights, 1e-6))
    got, want = (op.mix(*given, deepcopy(pages), rows, scale=0.2, gate=gate) for op in (cpu, naive))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_append_writes_its_own_cells_only():
    rows = make_rows((3, 1), (62, 0))
    pages = kv_codec.allocate("float32", int(rows.block_table.max()) + 1, KV_HEADS, DIM)
    pages.k.fill_(7)
    k, v = torch.randn(2, rows.tokens, KV_HEADS, DIM)
    kv_codec.append(pages, k, v, rows)
    for token, (row, position) in enumerate([(0, 62), (0, 63), (0, 64), (1, 0)]):
        page = rows.block_table[row, position // 64]
        assert torch.equal(pages.k[page, :, position % 64], k[token])
        assert torch.equal(pages.v[page, :, position % 64], v[token])
    assert (pages.k == 7).sum() == pages.k.numel() - k.numel()

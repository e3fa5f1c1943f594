"""Triton routes on the card against their oracles, at the 27B's head shapes and at odd ones."""

from importlib import import_module
from types import ModuleType

import pytest
import torch

from support import route_checks

BF16, F32 = torch.bfloat16, torch.float32
TINY, MIDDLE, FULL = (6, 2, 24, 16), (4, 2, 72, 64), (48, 16, 128, 128)


def route(op: str) -> ModuleType:
    return import_module(f"longlane.kernels.{op}.triton")


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize(("tokens", "size"), [(1, 5120), (63, 72), (65, 128)])
def test_norms(tokens: int, size: int, dtype: torch.dtype) -> None:
    route_checks.norms(route("norm_rope"), tokens, size, "cuda", dtype)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize(("tokens", "size"), [(1, 17408), (65, 63)])
def test_gates(tokens: int, size: int, dtype: torch.dtype) -> None:
    route_checks.gates(route("norm_rope"), tokens, size, "cuda", dtype)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
@pytest.mark.parametrize(("tokens", "size", "half"), [(1, 256, 32), (65, 24, 12)])
def test_rotation(tokens: int, size: int, half: int, normed: bool, dtype: torch.dtype) -> None:
    route_checks.rotation(route("norm_rope"), tokens, size, half, "cuda", dtype, normed=normed)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("heads", [(24, 4, 256), (6, 2, 32), (9, 3, 64)], ids=str)
@pytest.mark.parametrize("rows", route_checks.ROWS)
def test_attention(rows: str, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    if dtype == F32 and heads[2] == 256:
        pytest.skip("float32 pages of 256 do not fit a tile; they are for tests at small heads")
    for first_slot in (0, 1):
        route_checks.attention(
            route("attention"), *route_checks.ROWS[rows], *heads, "cuda", dtype, first_slot=first_slot
        )


def test_attention_columns_are_independent() -> None:
    route_checks.columns_of_attention_are_independent(
        route("attention"), (62, 255, 7000), 6, 24, 4, 256, "cuda", BF16, pages=128
    )


def test_attention_far_into_a_long_row() -> None:
    """Several units of pages a program: 70,000 tokens of history, checked against one dense softmax."""
    pages, context = 1100, 70_000
    rows = route_checks.rows_on("cuda", (2,), (context,), pages)
    cache = route_checks.filled_pages((2,), (context,), 1, 256, "cuda", "bf16", pages)
    q = torch.randn(2, 6, 256, device="cuda").to(BF16)
    got = route("attention").attend(q, cache, rows, scale=0.0625)
    used = rows.block_table[0, : -(-(context + 2) // 64)]
    k, v = (plane[used, 0].flatten(0, 1)[: context + 2].float() for plane in (cache.k, cache.v))
    scores = torch.einsum("thd,ld->thl", q.float(), k) * 0.0625
    scores[0, :, -1] = -torch.inf
    route_checks.assert_close(got, torch.einsum("thl,ld->thd", scores.softmax(-1), v), BF16)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "f32"])
@pytest.mark.parametrize("geometry", [TINY, MIDDLE, FULL], ids=["tiny", "middle", "27b"])
@pytest.mark.parametrize("rows", [*route_checks.ROWS, "verify-kept"])
def test_gdn(rows: str, geometry: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    lengths, context = route_checks.ROWS[rows.removesuffix("-kept")]
    advance = not rows.endswith("-kept")
    route_checks.gdn(route("gdn"), lengths, context, geometry, "cuda", dtype, advance=advance)


@pytest.mark.parametrize("rows", route_checks.ROWS)
def test_gdn_over_states_in_bf16(rows: str) -> None:
    lengths, context = route_checks.ROWS[rows]
    route_checks.gdn(route("gdn"), lengths, context, FULL, "cuda", BF16, advance=True, state=BF16)


@pytest.mark.parametrize("kept", [F32, BF16], ids=["f32", "bf16"])
@pytest.mark.parametrize("geometry", [TINY, FULL], ids=["tiny", "27b"])
def test_fold_is_decode(geometry: tuple[int, int, int, int], kept: torch.dtype) -> None:
    route_checks.fold_is_decode(route("gdn"), 4, (9, 0, 4), (2, 4, 0), geometry, "cuda", BF16, kept)

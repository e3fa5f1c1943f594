"""GPU route of paged attention, for every `--kv-dtype`. Queries are packed as (token, head of the group) rows of a KV
head. Where keys are stored rotated, the queries are rotated once; where values are, the sum of the parts is."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longlane.kernels import kv_codec, norm_rope
from longlane.kernels.attention import long, short
from longlane.kernels.attention.prepare import prepare
from longlane.kernels.attention.rotation import Rotation
from longlane.kernels.kv_codec import decode
from longlane.kernels.kv_codec.codes import ROTATED_K, ROTATED_V
from longlane.kernels.kv_codec.encode import hadamard
from longlane.kernels.kv_codec.pages import KVPages
from longlane.kernels.launch import properties
from longlane.kernels.ragged import Ragged
from longlane.kernels.sizes import RAW_BYTES

# exp2 is what the card has.
LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["origin"])
def _join(
    partial, peaks, masses, starts, contexts, gate, out, origin, gate_stride,
    HEADS: tl.constexpr, D: tl.constexpr, ROTATED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
    UNIT: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add the parts of 64 values of one token and head, in order, if the row has LEAST to MOST new tokens. A part
    begins at page UNIT x its number and has something for a token that is at or past it. The first token that has parts
    is `origin`. GATED: what comes out is rounded, then multiplied by the sigmoid of `gate`."""
    column, head, row = tl.program_id(0), tl.program_id(1) % HEADS, tl.program_id(2)
    start = tl.load(starts + row)
    length = tl.load(starts + row + 1) - start
    position = tl.load(contexts + row) + column
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if (length < LEAST) | (length > MOST) | (column >= length):
        return
    d = tl.program_id(1) // HEADS * 64 + tl.arange(0, 64)
    where = ((start + column - origin).to(tl.int64) * HEADS + head) * PARTS
    part = tl.arange(0, BLOCK)
    real = (part < PARTS) & (part * UNIT * 64 <= position)
    # Everything at once: what is waited for is memory.
    source = partial + (where + part)[:, None] * D + d[None, :]
    values = tl.load(source, mask=real[:, None] & (d < D)[None, :], other=0.0)
    peak = tl.load(peaks + where + part, mask=real, other=float("-inf"))
    mass = tl.load(masses + where + part, mask=real, other=0.0)
    top = tl.max(peak)
    weight = tl.exp2(peak - tl.where(top == float("-inf"), 0.0, top))
    acc = tl.sum(values * weight[:, None], axis=0)
    mass = tl.sum(mass * weight)
    # Nothing seen: zeros.
    acc = acc / tl.where(mass > 0, mass, 1.0)
    if ROTATED:
        acc = tl.reshape(hadamard(tl.reshape(acc, [1, 64]), 1, 64), [64])
    token, y = (start + column).to(tl.int64), acc.to(out.dtype.element_ty)
    if GATED:
        g = tl.load(gate + token * gate_stride + head * D + d, mask=d < D, other=0.0).to(tl.float32)
        y = (y.to(tl.float32) / (1 + tl.exp(-g))).to(y.dtype)
    tl.store(out + (token * HEADS + head) * D + d, y, mask=d < D)


def mix(
    q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, pages: KVPages, rows: Ragged, *, scale: float,
    first_slot: int = 0, gate: Tensor | None = None,
) -> Tensor:  # fmt: skip
    assert scale > 0
    assert all(plane.is_contiguous() for plane in pages.planes())
    assert gate is None or (gate.shape == q.shape and gate.stride()[1:] == (q.shape[2], 1)), "gate"
    if max(rows.lengths()) <= short.SHORT:
        prepared = prepare(q, k, v, rotation, pages, rows)
        return _short(prepared, pages, rows, torch.empty_like(prepared), gate, scale=scale, first_slot=first_slot)
    r = rotation
    q, k = norm_rope.qk_norm_rope(q, k, r.cos, r.sin, r.q_weight, r.k_weight, r.eps)
    kv_codec.append(pages, k, v, rows)
    out = attend(q, pages, rows, scale=scale, first_slot=first_slot)
    return out if gate is None else norm_rope.sigmoid_gate(out.flatten(1), gate.flatten(1)).view(out.shape)


def attend(q: Tensor, pages: KVPages, rows: Ragged, *, scale: float, first_slot: int = 0) -> Tensor:
    tokens, heads, size = q.shape
    assert q.stride()[1:] == (size, 1), q.stride()
    assert scale > 0
    assert all(plane.is_contiguous() for plane in pages.planes())
    lengths, card, kv_heads = rows.lengths(), properties(q), pages.k.shape[1]
    out = torch.empty(tokens, heads, size, dtype=q.dtype, device=q.device)
    if min(lengths) <= short.SHORT:
        turned = decode.rotate(pages.codec, q) if pages.codec in ROTATED_K else q
        _short(turned, pages, rows, out, None, scale=scale, first_slot=first_slot)
    if max(lengths) > short.SHORT:
        some = rows.rows * kv_heads * triton.cdiv(max(lengths) * (heads // kv_heads), long.blocks(card)[0])
        count = long.parts(card, some, rows.block_table.shape[1])
        parts = long.attend(
            q, pages, rows, out, count, shortest=short.SHORT, scale=scale * LOG2_E, first_slot=first_slot
        )
        if parts:
            _joined(out, parts, None, pages, rows, 0, UNIT=0, LEAST=short.SHORT + 1, MOST=1 << 30)
    return out


def _short(
    q: Tensor, pages: KVPages, rows: Ragged, out: Tensor, gate: Tensor | None, *, scale: float, first_slot: int
) -> Tensor:
    """The rows of up to SHORT tokens into out, from queries turned as the keys are."""
    heads, size = q.shape[1:]
    count = short.splits(properties(q), pages.k.shape[1], plain=pages.codec in RAW_BYTES)
    for first, last in short.runs(rows.lengths()):
        some = rows.between(first, last)
        tokens, origin = sum(some.lengths()), some.query_start[0]
        sums = torch.empty(tokens, heads, count, size, dtype=torch.float32, device=q.device)
        parts = (sums, *torch.empty(2, tokens, heads, count, dtype=torch.float32, device=q.device))
        short.attend(q, pages, some, parts, origin, scale=scale * LOG2_E, first_slot=first_slot)
        _joined(out, parts, gate, pages, some, origin, UNIT=short.UNIT, LEAST=1, MOST=short.SHORT)
    return out


def _joined(
    out: Tensor, parts: tuple[Tensor, Tensor, Tensor], gate: Tensor | None, pages: KVPages, rows: Ragged, origin: int,
    **shape: int,
) -> None:  # fmt: skip
    heads, size = out.shape[1:]
    pdl, count = properties(out).dependent_launch, parts[1].shape[2]
    _join[(min(max(rows.lengths()), shape["MOST"]), heads * triton.cdiv(size, 64), rows.rows)](
        *parts, rows.starts, rows.contexts, gate, out, origin, 0 if gate is None else gate.stride(0),
        HEADS=heads, D=size, ROTATED=pages.codec in ROTATED_V, PARTS=count, BLOCK=triton.next_power_of_2(count),
        GATED=gate is not None, PDL=pdl, num_warps=4, launch_pdl=pdl, **shape,
    )  # fmt: skip

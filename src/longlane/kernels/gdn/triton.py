"""GPU route of Gated DeltaNet. The recurrence keeps its piece of the state in registers over the columns of a row; long
rows run in chunks.

A decode step, a verify column and a folded column are the same instructions on the same tile, so they agree bit for
bit. Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longlane.kernels.gdn.chunks import CHUNK, chunked
from longlane.kernels.gdn.convolution import causal_conv, fold_history
from longlane.kernels.gdn.record import Record
from longlane.kernels.gdn.shared import SHORT, heads, log_decay, unit
from longlane.kernels.launch import properties
from longlane.kernels.ragged import Ragged

__all__ = ["causal_conv", "delta_rule", "fold"]

# Value rows of the state that a program of the recurrence, one warp, holds: its sums never leave the warp.
_VALUES = 8


@triton.jit
def _column(
    s, qkv, a, b, a_log, dt_bias, token, head, value, C, gate_stride,
    HV: tl.constexpr, REPEAT: tl.constexpr, DV: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One token into the rows `value` of one head's state s [V, BLOCK_K]: (next s, q [1, BLOCK_K])."""
    i = tl.arange(0, BLOCK_K)[None, :]
    inside = i < DK
    base = qkv + token * C
    KEY: tl.constexpr = HV // REPEAT * DK
    q = unit(tl.load(base + head // REPEAT * DK + i, mask=inside, other=0.0).to(tl.float32))
    k = unit(tl.load(base + KEY + head // REPEAT * DK + i, mask=inside, other=0.0).to(tl.float32))
    v = tl.load(base + 2 * KEY + head * DV + value, mask=value < DV, other=0.0).to(tl.float32)
    alpha = tl.exp(log_decay(tl.load(a + token * gate_stride + head).to(tl.float32), a_log, dt_bias))
    beta = 1 / (1 + tl.exp(-tl.load(b + token * gate_stride + head).to(tl.float32)))
    s = s * alpha
    u = beta * (v - tl.sum(s * k, axis=1))
    return s + u[:, None] * k, q


@triton.jit(do_not_specialize=["longest"])
def _recurrence(
    qkv, a, b, a_log, dt_bias, state, starts, contexts, slots, accepted, out, C, gate_stride, longest,
    HV: tl.constexpr, REPEAT: tl.constexpr, DV: tl.constexpr, DK: tl.constexpr, BLOCK_K: tl.constexpr,
    VALUES: tl.constexpr, ADVANCE: tl.constexpr, FOLD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """VALUES rows of one head's state over the tokens of one row. FOLD takes `accepted` tokens and writes no output."""
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    value = part * VALUES + tl.arange(0, VALUES)
    i = tl.arange(0, BLOCK_K)[None, :]
    log_rate = tl.load(a_log + head).to(tl.float32)
    bias = tl.load(dt_bias + head).to(tl.float32)
    start = tl.load(starts + row)
    length = tl.load(starts + row + 1) - start
    slot = tl.load(slots + row).to(tl.int64)
    place = state + ((slot * HV + head) * DV + value)[:, None] * DK + i
    inside = (value < DV)[:, None] & (i < DK)
    # No other kernel of the step writes this state, so it is on its way before the kernel that makes qkv has ended.
    s = tl.load(place, mask=inside & (tl.load(contexts + row) > 0), other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if length > longest:
        return
    if FOLD:
        length = tl.load(accepted + row).to(tl.int32)
        if length == 0:
            return
    for t in range(length):
        token = (start + t).to(tl.int64)
        s, q = _column(s, qkv, a, b, log_rate, bias, token, head, value, C, gate_stride, HV, REPEAT, DV, DK, BLOCK_K)
        if not FOLD:
            o = tl.sum(s * q, axis=1) / tl.sqrt(DK * 1.0)
            tl.store(out + (token * HV + head) * DV + value, o.to(out.dtype.element_ty), mask=value < DV)
        s = s.to(state.dtype.element_ty).to(tl.float32)
    if ADVANCE:
        tl.store(place, s.to(state.dtype.element_ty), mask=inside)


def delta_rule(
    qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, rows: Ragged, *, advance: bool
) -> Tensor:
    value_heads, value_dim = state.shape[1:3]
    out = torch.empty(qkv.shape[0], value_heads, value_dim, dtype=qkv.dtype, device=qkv.device)
    lengths = rows.lengths()
    long = advance and max(lengths) > SHORT and min(state.shape[2:]) >= CHUNK.value
    if not long or min(lengths) <= SHORT:
        longest = SHORT if long else max(lengths)
        _recur(qkv, a, b, a_log, dt_bias, state, rows, out, rows.slots, longest, advance=advance, fold=False)
    if long:
        chunked(qkv, a, b, a_log, dt_bias, state, rows, out)
    return out


def fold(
    record: Record, accepted: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, history: Tensor, rows: Ragged
) -> None:
    _recur(
        record.qkv,
        record.a,
        record.b,
        a_log,
        dt_bias,
        state,
        rows,
        record.qkv,
        accepted,
        SHORT,
        advance=True,
        fold=True,
    )
    fold_history(record.x, accepted, history, rows)


def _recur(
    qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, state: Tensor, rows: Ragged, out: Tensor,
    accepted: Tensor, longest: int, *, advance: bool, fold: bool,
) -> None:  # fmt: skip
    shape, pdl = heads(qkv, state), properties(qkv).dependent_launch
    assert a.stride() == b.stride() == (a.stride(0), 1), (a.stride(), b.stride())
    _recurrence[(triton.cdiv(shape["DV"], _VALUES), shape["HV"], rows.rows)](
        qkv, a, b, a_log, dt_bias, state, rows.starts, rows.contexts, rows.slots, accepted, out, qkv.shape[1],
        a.stride(0), longest, VALUES=_VALUES, ADVANCE=advance, FOLD=fold, PDL=pdl,
        num_warps=1, launch_pdl=pdl, **shape,
    )  # fmt: skip

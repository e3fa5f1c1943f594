"""GPU route: one launch an operation, sums in float32, rows of any stride as long as the last axis is dense."""

import triton
import triton.language as tl
from torch import Tensor, empty
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from longlane.kernels.launch import properties

# Elements a program of the elementwise kernels takes.
_BLOCK = 1024


@triton.jit
def _add_rms_norm(
    x, delta, weight, total, out, x_stride, delta_stride, part_stride, D, eps,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out = norm(x + delta) * weight, total = x + delta, one row a program. delta is the sum of PARTS; there is
    none for 0."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < D
    w = tl.load(weight + i, mask=inside, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * x_stride + i, mask=inside, other=0.0)
    y = value.to(tl.float32)
    if PARTS > 0:
        added = tl.load(delta + row * delta_stride + i, mask=inside, other=0.0).to(tl.float32)
        if PARTS == 2:
            added += tl.load(delta + part_stride + row * delta_stride + i, mask=inside, other=0.0)
            added = added.to(value.dtype).to(tl.float32)
        # The sum is rounded to the stream's dtype before it is normed, as the oracle does.
        y = (y + added).to(value.dtype)
        tl.store(total + row * D + i, y, mask=inside)
        y = y.to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y) / D + eps) * w
    tl.store(out + row * D + i, y.to(value.dtype), mask=inside)


@triton.jit
def _gated_rms_norm(
    x, gate, weight, out, x_stride, gate_stride, heads, rows, D, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """norm(x) * weight * SiLU(gate), ROWS heads a program; rows counts heads of all tokens."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (i < D)
    token, head = (row // heads).to(tl.int64), row % heads
    w = tl.load(weight + i, mask=i < D, other=0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + token * x_stride + head * D + i, mask=inside, other=0.0)
    g = tl.load(gate + token * gate_stride + head * D + i, mask=inside, other=0.0).to(tl.float32)
    y = value.to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, axis=1) / D + eps)[:, None] * w
    y = y * (g / (1 + tl.exp(-g)))
    tl.store(out + row.to(tl.int64) * D + i, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def turned(
    source, weight, cos, sin, i, eps, D: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, DTYPE: tl.constexpr
):  # fmt: skip
    """One head at `source` after norm and rotation by the angles at cos, sin: its values i, a tile of all of them."""
    inside = i < D
    # The partner of i in the rotation; values past 2 HALF rotate with angle 0.
    partner = tl.where(i < HALF, i + HALF, i - HALF)
    turns = i < 2 * HALF
    angle = tl.where(i < HALF, i, i - HALF)
    sign = tl.where(i < HALF, -1.0, 1.0)
    y = tl.load(source + i, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(source + partner, mask=turns, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(y * y) / D + eps)
        # Rounded between norm and rotation, as the oracle does.
        y = (y * factor * tl.load(weight + i, mask=inside, other=0.0)).to(DTYPE).to(tl.float32)
        other = (other * factor * tl.load(weight + partner, mask=turns, other=0.0)).to(DTYPE).to(tl.float32)
    c = tl.load(cos + angle, mask=turns, other=1.0)
    s = tl.load(sin + angle, mask=turns, other=0.0)
    return (y * c + sign * other * s).to(DTYPE)


@triton.jit
def _qk_norm_rope(
    q, k, cos, sin, q_weight, k_weight, q_out, k_out, q_stride, k_stride, eps,
    HQ: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    NORM: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One head of one token a program: head < HQ is a query, the others are keys."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    if head < HQ:
        source, target, weight = q + token * q_stride + head * D, q_out + (token * HQ + head) * D, q_weight
    else:
        source = k + token * k_stride + (head - HQ) * D
        target, weight = k_out + (token * HK + head - HQ) * D, k_weight
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    angles = token * HALF
    y = turned(source, weight, cos + angles, sin + angles, i, eps, D, HALF, NORM, q.dtype.element_ty)
    tl.store(target + i, y, mask=i < D)


@triton.jit
def _gate(
    x, gate, out, x_stride, gate_stride, gate_step, D, SWIGLU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """x * sigmoid(gate), or SiLU(gate) * x, one block of one row a program."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < D
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    value = tl.load(x + row * x_stride + i, mask=inside, other=0.0)
    g = tl.load(gate + row * gate_stride + i * gate_step, mask=inside, other=0.0).to(tl.float32)
    y = value.to(tl.float32) / (1 + tl.exp(-g))
    if SWIGLU:
        y = y * g
    tl.store(out + row * D + i, y.to(value.dtype), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    flat = x.reshape(-1, x.shape[-1])
    out = empty(flat.shape, dtype=x.dtype, device=x.device)
    _norm(flat, flat, weight, flat, out, eps, parts=0)
    return out.view(x.shape)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total, out = (empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _norm(x, delta, weight, total, out, eps, parts=len(delta) if delta.dim() == 3 else 1)
    return total, out


def _norm(x: Tensor, delta: Tensor, weight: Tensor, total: Tensor, out: Tensor, eps: float, *, parts: int) -> None:
    rows, size = x.shape
    assert x.stride(1) == delta.stride(-1) == 1, (x.stride(), delta.stride())
    assert parts <= 2, delta.shape
    block, pdl = triton.next_power_of_2(size), properties(x).dependent_launch
    _add_rms_norm[(rows,)](
        x, delta, weight, total, out, x.stride(0), delta.stride(-2), delta.stride(0), size, eps,
        PARTS=parts, BLOCK=block, PDL=pdl, num_warps=min(8, max(1, block // 512)), launch_pdl=pdl,
    )  # fmt: skip


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    tokens, heads, size = x.shape
    assert x.stride()[1:] == gate.stride()[1:] == (size, 1), (x.stride(), gate.stride())
    out = empty(x.shape, dtype=gate.dtype, device=x.device)
    pdl, per_program = properties(x).dependent_launch, 4
    _gated_rms_norm[(triton.cdiv(tokens * heads, per_program),)](
        x, gate, weight, out, x.stride(0), gate.stride(0), heads, tokens * heads, size, eps,
        ROWS=per_program, BLOCK=triton.next_power_of_2(size), PDL=pdl, num_warps=per_program, launch_pdl=pdl,
    )  # fmt: skip
    return out


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    tokens, q_heads, size = q.shape
    k_heads, half = k.shape[1], cos.shape[-1]
    assert q.stride()[1:] == k.stride()[1:] == (size, 1), (q.stride(), k.stride())
    assert cos.is_contiguous()
    assert sin.is_contiguous()
    q_out, k_out = (empty(y.shape, dtype=y.dtype, device=y.device) for y in (q, k))
    norm, pdl = q_weight is not None and k_weight is not None, properties(q).dependent_launch
    _qk_norm_rope[(tokens, q_heads + k_heads)](
        q, k, cos, sin, q_weight if norm else cos, k_weight if norm else cos, q_out, k_out,
        q.stride(0), k.stride(0), eps, HQ=q_heads, HK=k_heads, D=size, HALF=half,
        NORM=norm, BLOCK=triton.next_power_of_2(size), PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return q_out, k_out


def swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return _gated(up, gate, swiglu=True)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    return _gated(x, gate, swiglu=False)


def _gated(x: Tensor, gate: Tensor, *, swiglu: bool) -> Tensor:
    rows, size = x.shape
    assert x.stride(1) == 1, x.stride()
    gate = gate.expand_as(x)
    out, pdl = empty(rows, size, dtype=x.dtype, device=x.device), properties(x).dependent_launch
    _gate[(rows, triton.cdiv(size, _BLOCK))](
        x,
        gate,
        out,
        x.stride(0),
        gate.stride(0),
        gate.stride(1),
        size,
        SWIGLU=swiglu,
        BLOCK=_BLOCK,
        PDL=pdl,
        launch_pdl=pdl,
    )
    return out

"""What every GPU route must do, on any device and dtype: each function runs a route on poisoned, oddly strided inputs
and compares it with the oracle. The interpreter runs them in float32, the GPU tests in bfloat16 too."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from longlane.kernels import kv_codec
from longlane.kernels.attention import Rotation
from longlane.kernels.attention import naive as naive_attention
from longlane.kernels.gdn import Record
from longlane.kernels.gdn import naive as naive_gdn
from longlane.kernels.kv_codec import cpu as cpu_codec
from longlane.kernels.kv_codec import naive as naive_codec
from longlane.kernels.norm_rope import naive as naive_norm
from longlane.kernels.ragged import Ragged
from longlane.kernels.sizes import CODE_BITS, RAW_BYTES
from support.rows import make_rows

EPS = 1e-6
# Share of codes that may fall on the other side of a rounding boundary, where sums run in another order.
ROUNDED_OTHERWISE = 1e-3
RAW = {torch.float32: "float32", torch.bfloat16: "bf16"}
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}

# Lengths and contexts of the rows of a step.
ROWS = {
    "first": ((1,), (0,)),
    "decode": ((1, 1, 1), (0, 63, 400)),
    "verify": ((4, 4), (62, 381)),
    "prefill": ((63, 65), (0, 64)),
    "mixed": ((200, 3, 1, 17), (64, 0, 63, 129)),
}


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype, slack: float = 1.0) -> None:
    """Relative error of the whole, and no element further off than the dtype's rounding of the largest."""
    got, want = got.float(), want.float()
    assert torch.equal(got.isnan(), want.isnan()), "NaN where the oracle has none, or none where it has"
    got, want = got.nan_to_num(), want.nan_to_num()
    limit = slack * TOLERANCE[dtype]
    error = (got - want).norm() / want.norm().clamp_min(1e-30)
    assert error <= limit, f"relative error {error:.2e} above {limit:.2e}"
    worst = (got - want).abs().max() / want.abs().max().clamp_min(1e-30)
    assert worst <= 2 * limit, f"worst element off by {worst:.2e} of the largest"


def norms(route: ModuleType, tokens: int, size: int, device: str, dtype: torch.dtype) -> None:
    x, delta = torch.randn(2, tokens, size + 8, device=device).to(dtype)[..., :size]
    weight = torch.randn(size, device=device)
    assert_close(route.rms_norm(x, weight, EPS), naive_norm.rms_norm(x, weight, EPS), dtype)
    total, normed = route.add_rms_norm(x, delta, weight, EPS)
    want_total, want_normed = naive_norm.add_rms_norm(x, delta, weight, EPS)
    assert torch.equal(total, want_total)
    assert_close(normed, want_normed, dtype)
    parts = torch.randn(2, tokens, size, device=device)
    total, normed = route.add_rms_norm(x, parts, weight, EPS)
    want_total, want_normed = route.add_rms_norm(x, parts.sum(0).to(dtype), weight, EPS)
    assert torch.equal(total, want_total)
    assert torch.equal(normed, want_normed)
    heads = torch.randn(tokens, 5, size, device=device).to(dtype)[:, 1:4]
    gate = torch.randn(tokens, 4, size, device=device).to(dtype)[:, :3]
    assert_close(
        route.gated_rms_norm(heads, gate, weight, EPS), naive_norm.gated_rms_norm(heads, gate, weight, EPS), dtype
    )


def gates(route: ModuleType, tokens: int, size: int, device: str, dtype: torch.dtype) -> None:
    both = torch.randn(tokens, 2 * size + 4, device=device).to(dtype)[:, : 2 * size]
    assert_close(route.swiglu(both), naive_norm.swiglu(both), dtype)
    x, gate = both.chunk(2, dim=-1)
    for given in (gate, gate[:, :1]):
        assert_close(route.sigmoid_gate(x, given), naive_norm.sigmoid_gate(x, given), dtype)


def rotation(
    route: ModuleType, tokens: int, size: int, half: int, device: str, dtype: torch.dtype, *, normed: bool
) -> None:
    fused = torch.randn(tokens, 9, size, device=device).to(dtype)
    angle = torch.randn(tokens, half, device=device)
    weights = [torch.randn(size, device=device) for _ in range(2)] if normed else [None, None]
    inputs = (fused[:, :6], fused[:, 6:8], angle.cos(), angle.sin(), *weights, EPS)
    for got, want in zip(route.qk_norm_rope(*inputs), naive_norm.qk_norm_rope(*inputs), strict=True):
        assert_close(got, want, dtype)


def rows_on(device: str, lengths: tuple[int, ...], context: tuple[int, ...], pages: int = 7) -> Ragged:
    rows = make_rows(lengths, context, pages)
    moved = {name: getattr(rows, name).to(device) for name in ("block_table", "slots", "starts", "contexts")}
    return replace(rows, page=rows.page.to(device), offset=rows.offset.to(device), **moved)


def filled_pages(
    lengths: tuple[int, ...], context: tuple[int, ...], kv_heads: int, size: int, device: str, codec: str,
    pages: int = 7,
) -> kv_codec.KVPages:  # fmt: skip
    """Pages with the rows' keys and values up to their last token; in every cell beyond, NaN and all bits set."""
    rows = rows_on(device, tuple(a + b for a, b in zip(lengths, context, strict=True)), (0,) * len(lengths), pages)
    filled = kv_codec.allocate(codec, len(lengths) * pages + 1, kv_heads, size, device)
    for plane in filled.planes():
        plane.fill_(255 if plane.dtype == torch.uint8 else torch.nan)
    k, v = torch.randn(2, rows.tokens, kv_heads, size, device=device)
    (naive_codec if codec in RAW_BYTES else cpu_codec).append(filled, k, v, rows)
    return filled


def attention(
    route: ModuleType, lengths: tuple[int, ...], context: tuple[int, ...], heads: int, kv_heads: int, size: int,
    device: str, dtype: torch.dtype, *, first_slot: int = 0, codec: str = "", pages: int = 7,
) -> None:  # fmt: skip
    """Over pages of `codec`, or as `dtype`."""
    rows = rows_on(device, lengths, context, pages)
    cache = filled_pages(lengths, context, kv_heads, size, device, codec or RAW[dtype], pages)
    q = torch.randn(rows.tokens, heads + 1, size, device=device).to(dtype)[:, :heads]
    arguments = {"scale": size**-0.5, "first_slot": first_slot}
    assert_close(route.attend(q, cache, rows, **arguments), naive_attention.attend(q, cache, rows, **arguments), dtype)


def attention_mix(
    route: Callable[[str], ModuleType], lengths: tuple[int, ...], context: tuple[int, ...],
    heads: tuple[int, int, int], device: str, dtype: torch.dtype, *, plain: bool = False, codec: str = "",
    pages: int = 7,
) -> None:  # fmt: skip
    """Norms, rotation, append, attention and gate together are what the operations are one by one, bit for bit, in the
    pages too: those of other tokens are as they were. `route` gives the module of an operation. `plain` has
    neither norms nor gate."""
    query_heads, kv_heads, size = heads
    rows = rows_on(device, lengths, context, pages)
    got_pages = filled_pages(lengths, context, kv_heads, size, device, codec or RAW[dtype], pages)
    want_pages = deepcopy(got_pages)
    fused = torch.randn(rows.tokens, 2 * query_heads + 2 * kv_heads, size, device=device).to(dtype)
    q, k, gate, v = fused.split_with_sizes([query_heads, kv_heads, query_heads, kv_heads], dim=1)
    angle = torch.randn(rows.tokens, size // 4, device=device)
    weights = torch.randn(2, size, device=device) if not plain else (None, None)
    rotation = Rotation(angle.cos(), angle.sin(), *weights, EPS)
    some = {"scale": size**-0.5, "first_slot": 1}
    got = route("attention").mix(q, k, v, rotation, got_pages, rows, **some, gate=None if plain else gate)
    turned, keys = route("norm_rope").qk_norm_rope(q, k, rotation.cos, rotation.sin, *weights, EPS)
    route("kv_codec").append(want_pages, keys, v, rows)
    for a, b in zip(got_pages.planes(), want_pages.planes(), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    want, exact = (op.attend(turned, want_pages, rows, **some) for op in (route("attention"), naive_attention))
    if not plain:
        want = route("norm_rope").sigmoid_gate(want.flatten(1), gate.flatten(1)).view(want.shape)
        exact = naive_norm.sigmoid_gate(exact, gate)
    assert torch.equal(got, want)
    assert_close(got, exact, dtype)


def columns_of_attention_are_independent(
    route: ModuleType, contexts: tuple[int, ...], columns: int, heads: int, kv_heads: int, size: int, device: str,
    dtype: torch.dtype, pages: int = 7, codec: str = "",
) -> None:  # fmt: skip
    """A column of a verify step of many rows has the bits of a decode step of its row alone."""
    lengths = (columns,) * len(contexts)
    rows = rows_on(device, lengths, contexts, pages)
    cache = filled_pages(lengths, contexts, kv_heads, size, device, codec or RAW[dtype], pages)
    q = torch.randn(rows.tokens, heads, size, device=device).to(dtype)
    together = route.attend(q, cache, rows, scale=0.1)
    for row, context in enumerate(contexts):
        for column in range(columns):
            alone = rows_on(device, (1,), (context + column,), pages)
            alone = replace(alone, block_table=rows.block_table[row : row + 1])
            token = row * columns + column
            assert torch.equal(route.attend(q[token : token + 1], cache, alone, scale=0.1)[0], together[token])


class Mixer:
    """Inputs of a Gated DeltaNet step; slots that must not be read are NaN. state: the dtype of kept states."""

    def __init__(
        self, rows: Ragged, geometry: tuple[int, int, int, int], device: str, dtype: torch.dtype,
        state: torch.dtype = torch.float32, taps: int = 4,
    ) -> None:  # fmt: skip
        value_heads, key_heads, value_dim, key_dim = geometry
        self.rows, self.dtype = rows, dtype
        channels = 2 * key_heads * key_dim + value_heads * value_dim
        self.x = torch.randn(rows.tokens, channels + 8, device=device).to(dtype)[:, :channels]
        self.a, self.b = torch.randn(rows.tokens, 2 * value_heads, device=device).to(dtype).chunk(2, dim=-1)
        self.weight = torch.randn(taps, channels, device=device)
        self.a_log, self.dt_bias = torch.randn(2, value_heads, device=device)
        slots = rows.rows + 2
        self.state = torch.full((slots, value_heads, value_dim, key_dim), torch.nan, device=device, dtype=state)
        self.history = torch.full((slots, taps, channels), torch.nan, device=device, dtype=dtype)
        for slot, context in zip(rows.slots.tolist(), rows.context, strict=True):
            if context:
                self.state[slot].normal_()
                for position in range(max(0, context - taps + 1), context):
                    self.history[slot, position % taps].normal_()

    def run(self, route: ModuleType, *, advance: bool) -> tuple[Tensor, Tensor, Tensor, Record | None]:
        """(mixed, state, history, record) after a step on copies of the caches."""
        state, history = self.state.clone(), self.history.clone()
        given = (self.x, self.a, self.b, self.weight, self.a_log, self.dt_bias)
        out, record = route.mix(*given, state, history, self.rows, advance=advance)
        return out, state, history, record

    def fold(self, route: ModuleType, record: Record, accepted: Tensor) -> tuple[Tensor, Tensor]:
        state, history = self.state.clone(), self.history.clone()
        route.fold(record, accepted, self.a_log, self.dt_bias, state, history, self.rows)
        return state, history

    def decode(self, route: ModuleType, row: int, token: int, position: int, state: Tensor, history: Tensor) -> Tensor:
        """A step of one token of one row alone, on the caches given."""
        one = rows_on(str(self.x.device), (1,), (position,))
        one.slots.copy_(self.rows.slots[row : row + 1])
        t = slice(token, token + 1)
        given = (self.x[t], self.a[t], self.b[t], self.weight, self.a_log, self.dt_bias)
        return route.mix(*given, state, history, one, advance=True)[0][0]


def gdn(
    route: ModuleType, lengths: tuple[int, ...], context: tuple[int, ...], geometry: tuple[int, int, int, int],
    device: str, dtype: torch.dtype, *, advance: bool, state: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    case = Mixer(rows_on(device, lengths, context), geometry, device, dtype, state)
    want = case.run(naive_gdn, advance=advance)
    got = case.run(route, advance=advance)
    for a, b, of in zip(got[:2], want[:2], (dtype, state), strict=True):
        assert_close(a, b, max(dtype, state, of, key=TOLERANCE.__getitem__))
    # What a step only copies is equal, bit for bit, and every other line and slot is as it was.
    assert torch.equal(got[2].nan_to_num(7), want[2].nan_to_num(7))
    if got[3] and want[3]:
        assert_close(got[3].qkv, want[3].qkv, dtype)
    assert (got[3] is None) == (want[3] is None) == advance


def fold_is_decode(
    route: ModuleType, columns: int, contexts: tuple[int, ...], accepted: tuple[int, ...],
    geometry: tuple[int, int, int, int], device: str, dtype: torch.dtype, kept: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    """Verify leaves the caches; fold moves them as that many decode steps do, and columns equal decode steps, bit for
    bit."""
    rows = rows_on(device, (columns,) * len(contexts), contexts)
    case = Mixer(rows, geometry, device, dtype, kept)
    verified, state, history, record = case.run(route, advance=False)
    assert record
    assert torch.equal(state.nan_to_num(7), case.state.nan_to_num(7))
    assert torch.equal(history.nan_to_num(7), case.history.nan_to_num(7))
    counts = torch.tensor(accepted, dtype=torch.int32, device=device)
    folded_state, folded_history = case.fold(route, record, counts)
    for row, count in enumerate(accepted):
        want_state, want_history = case.state.clone(), case.history.clone()
        for column in range(count):
            token = columns * row + column
            out = case.decode(route, row, token, contexts[row] + column, want_state, want_history)
            assert torch.equal(out, verified[token])
        slot = rows.slots[row]
        assert torch.equal(folded_state[slot].nan_to_num(7), want_state[slot].nan_to_num(7))
        assert torch.equal(folded_history[slot].nan_to_num(7), want_history[slot].nan_to_num(7))


def codes_apart(codec: str, part: str, got: Tensor, want: Tensor) -> tuple[int, int]:
    """Codes that differ, and by how many steps at most; a cylinder's codes have no order."""
    bits = CODE_BITS[codec][part == "v"]
    if codec == "rk2v4-e8" and part == "k":
        return int((got != want).sum()), 0
    if codec == "fp8":
        order = [torch.where(x > 127, 127 - x.int(), x.int()) for x in (got, want)]
    elif bits == 8:
        order = [x.view(torch.int8).int() for x in (got, want)]
    else:
        order = [torch.stack([(x & 15 ^ 8).int() - 8, (x >> 4 ^ 8).int() - 8]) for x in (got, want)]
    gap = (order[0] - order[1]).abs()
    return int((gap > 0).sum()), int(gap.max())


def append_coded(
    route: ModuleType, codec: str, lengths: tuple[int, ...], context: tuple[int, ...], kv_heads: int, size: int,
    device: str, dtype: torch.dtype,
) -> None:  # fmt: skip
    """The route writes what `codes.py` would, but for values within rounding of a boundary, and nothing else."""
    rows = rows_on(device, lengths, context)
    k, v = torch.randn(2, rows.tokens, kv_heads + 1, size, device=device).to(dtype)[:, :, :kv_heads]
    k *= 10.0 ** torch.randint(-3, 3, (rows.tokens, kv_heads, 1), device=device)
    # Any root does for a cylinder of radius 0, and the routes choose differently.
    if codec != "rk2v4-e8":
        k[0, 0] = 0
    v[0, 0], v[-1, 0] = 6e4, 0
    got, want = (kv_codec.allocate(codec, int(rows.block_table.max()) + 1, kv_heads, size, device) for _ in range(2))
    for plane in (*got.planes(), *want.planes()):
        plane.fill_(255 if plane.dtype == torch.uint8 else 7)
    route.append(got, k, v, rows)
    cpu_codec.append(want, k, v, rows)
    for part in ("k", "v"):
        scales = [getattr(pages, f"{part}_scale") for pages in (got, want)]
        torch.testing.assert_close(*scales, rtol=2**-10, atol=2**-24)
        # The whole plane, so that a write anywhere else counts too.
        others, steps = codes_apart(codec, part, *(getattr(pages, part) for pages in (got, want)))
        assert steps <= 1, f"{part} codes off by {steps} steps"
        most = max(2.0, ROUNDED_OTHERWISE * k.numel())
        assert others <= most, f"{others} of {k.numel()} codes of {part} differ, at most {most:.1f} may"

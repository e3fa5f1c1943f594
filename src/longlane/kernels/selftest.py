"""Each operation of a device against its oracle, on small odd shapes of the family's real widths: `longlane doctor`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from longlane.kernels import advance, attention, chain, gdn, kv_codec, layout, linear, norm_rope, sampling
from longlane.kernels.advance import cpu as plain_advance
from longlane.kernels.attention import naive as naive_attention
from longlane.kernels.chain import Gated, Norm, Product
from longlane.kernels.chain import naive as naive_chain
from longlane.kernels.gdn import naive as naive_gdn
from longlane.kernels.layout import cpu as plain_layout
from longlane.kernels.linear import naive as naive_linear
from longlane.kernels.norm_rope import naive as naive_norm
from longlane.kernels.ragged import Ragged, ragged
from longlane.kernels.sampling import naive as naive_sampling

# Relative error of the whole output that rounding explains: of float32, of bfloat16, and of activations in int8.
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
INT8_LIMIT = 2e-2
# Bytes a group has in each plane of a packed weight, and the width of its codes.
PLANES = {"q4_g64_fp16": (32, 0, 4), "q5_g64_fp16": (32, 8, 5), "q6_g64_fp16": (32, 16, 6), "q8_g32_fp16": (32, 0, 8)}
# What a codec loses of normal values, keys and values together, with a little room.
CODECS = {"bf16": 3e-3, "int8": 1e-2, "fp8": 4e-2, "rk8v4": 1e-1, "rk4v4": 0.13, "rk4v4-e8": 0.17, "rk2v4-e8": 0.36}
HEADS, KV_HEADS, HEAD_DIM, EPS = 8, 2, 256, 1e-6

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One operation: its relative error beside the limit, or what it failed with."""

    name: str
    error: float | None
    limit: float
    failure: str | None = None

    @property
    def passed(self) -> bool:
        return self.error is not None and self.error <= self.limit


def checks(device: torch.device, dtype: torch.dtype) -> Iterator[Check]:
    """Every operation in `dtype` (float32 or bfloat16), one after the other."""
    for name, case in _cases(device, dtype).items():
        # The same draws whatever comes before it.
        torch.manual_seed(0)
        limit = _limit(name, device, dtype)
        try:
            got, want = (x.double() for x in case())
            error = float((got - want).norm() / want.norm().clamp_min(1e-30))
            yield Check(name=name, error=error, limit=limit)
        except Exception as error:  # whatever a kernel of an unknown card fails with is the finding
            yield Check(name=name, error=None, limit=limit, failure=f"{type(error).__name__}: {error}")


def _limit(name: str, device: torch.device, dtype: torch.dtype) -> float:
    op, _, rest = name.partition(" ")
    if op == "append":
        return CODECS[rest]
    if op == "attend":
        # A value at the edge of two codes may be written as either.
        return max(LIMITS[dtype], CODECS[rest.partition(",")[0]] / 10)
    return INT8_LIMIT if op in ("linear", "chain") and device.type == "cpu" else LIMITS[dtype]


def _cases(device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], Pair]]:
    cases: dict[str, Callable[[], Pair]] = {
        "rms_norm": partial(_rms_norm, device, dtype),
        "add_rms_norm": partial(_add_rms_norm, device, dtype),
        "gated_rms_norm": partial(_gated_rms_norm, device, dtype),
        "swiglu": partial(_swiglu, device, dtype),
        "sigmoid_gate": partial(_sigmoid_gate, device, dtype),
        "qk_norm_rope": partial(_rotation, device, dtype),
        "advance": partial(_advance, device),
        "begin": partial(_begin, device),
        "angles": partial(_angles, device),
        "greedy": partial(_greedy, device),
        "draw_rows": partial(_draw_rows, device),
        "delta_rule, verify and fold": partial(_fold, device, dtype),
    }
    for format in PLANES:
        for tokens in (1, 3, 300):
            cases[f"linear {format}, {tokens} rows"] = partial(_linear, format, tokens, device, dtype)
        cases[f"rows {format}"] = partial(_embedding, format, device, dtype)
    cases["linear of long rows and its norm"] = partial(_long_rows, device, dtype)
    for columns in (1, 5, 16):
        cases[f"chain of {columns} columns"] = partial(_chain, columns, device, dtype)
    for name, (lengths, contexts) in {"decode": ((1, 1), (70, 0)), "prefill": ((130, 5), (3, 64))}.items():
        cases[f"delta_rule, {name}"] = partial(_delta_rule, lengths, contexts, device, dtype)
    for codec in CODECS:
        cases[f"append {codec}"] = partial(_append, codec, device, dtype)
        for name, (lengths, contexts) in {"decode": ((1, 1), (130, 5)), "prefill": ((70, 3), (60, 0))}.items():
            cases[f"attend {codec}, {name}"] = partial(_attend, codec, lengths, contexts, device, dtype)
    return cases


def _rms_norm(device: torch.device, dtype: torch.dtype) -> Pair:
    x, weight = torch.randn(5, 1000, device=device).to(dtype), torch.randn(1000, device=device)
    return norm_rope.rms_norm(x, weight, EPS), naive_norm.rms_norm(x, weight, EPS)


def _add_rms_norm(device: torch.device, dtype: torch.dtype) -> Pair:
    (x, delta), weight = torch.randn(2, 5, 1000, device=device).to(dtype), torch.randn(1000, device=device)
    got, want = norm_rope.add_rms_norm(x, delta, weight, EPS), naive_norm.add_rms_norm(x, delta, weight, EPS)
    return torch.cat(got), torch.cat(want)


def _long_rows(device: torch.device, dtype: torch.dtype) -> Pair:
    """A product whose rows two programs of a card share, and the norm that adds what they have."""
    weight, factor = _weight("q5_g64_fp16", 96, 6144), torch.rand(96) + 0.5
    stream, x = torch.randn(3, 96).to(dtype), torch.randn(3, 6144).to(dtype)
    prepared = linear.prepare(weight, device=device, dtype=dtype, packed=True)
    parts = linear.linear_in_parts(x.to(device), prepared, independent=True)
    got = norm_rope.add_rms_norm(stream.to(device), parts, factor.to(device), EPS)
    delta = naive_linear.linear(x.float(), weight).to(dtype)
    return torch.cat(got).cpu(), torch.cat(naive_norm.add_rms_norm(stream, delta, factor, EPS))


def _gated_rms_norm(device: torch.device, dtype: torch.dtype) -> Pair:
    (x, gate), weight = torch.randn(2, 5, 3, 128, device=device).to(dtype), torch.randn(128, device=device)
    return norm_rope.gated_rms_norm(x, gate, weight, EPS), naive_norm.gated_rms_norm(x, gate, weight, EPS)


def _swiglu(device: torch.device, dtype: torch.dtype) -> Pair:
    x = torch.randn(5, 2000, device=device).to(dtype)
    return norm_rope.swiglu(x), naive_norm.swiglu(x)


def _sigmoid_gate(device: torch.device, dtype: torch.dtype) -> Pair:
    x, gate = torch.randn(2, 5, 1000, device=device).to(dtype)
    return norm_rope.sigmoid_gate(x, gate), naive_norm.sigmoid_gate(x, gate)


def _rotation(device: torch.device, dtype: torch.dtype) -> Pair:
    q = torch.randn(5, HEADS, HEAD_DIM, device=device).to(dtype)
    k = torch.randn(5, KV_HEADS, HEAD_DIM, device=device).to(dtype)
    angle, weights = torch.randn(5, 32, device=device), torch.randn(2, HEAD_DIM, device=device)
    given = (q, k, angle.cos(), angle.sin(), *weights, EPS)
    got, want = norm_rope.qk_norm_rope(*given), naive_norm.qk_norm_rope(*given)
    return torch.cat(got, dim=1), torch.cat(want, dim=1)


def _advance(device: torch.device) -> Pair:
    """A row that goes on, one that ends by its second stop id, one whose logits are broken, and one of nobody's."""
    results = []
    for ops, place in ((advance, device), (plain_advance, torch.device("cpu"))):
        inputs = torch.tensor([[70, 64, 5, 0], [1, 2, 3, 0], [8, 8, 8, 0], [9] * 4, [7, 11, 9, 9]], dtype=torch.int32)
        context, slot, token, *stops = inputs.to(place)
        drawn, peaks = torch.tensor([10, 11, 12, 0]), torch.tensor([1.0, 2.0, torch.nan, 0.0], dtype=torch.float64)
        ops.advance(context, slot, token, torch.stack(stops), drawn.to(place), peaks.to(place))
        results.append(torch.stack((context, slot, token)).cpu())
    return results[0], results[1]


def _begin(device: torch.device) -> Pair:
    """Two rows of three tokens and one of nobody's, the last column of the first a draft."""
    block = torch.tensor([[62, 0, 190], [2, 0, 1], [1, 3, 3], [7, 0, 8], [9, 0, 10], [11, 0, 12]], dtype=torch.int32)
    table, drafts = torch.arange(1, 13, dtype=torch.int32).view(3, 4), torch.arange(100, 109).view(3, 3)
    results = []
    for ops, place in ((layout, device), (plain_layout, torch.device("cpu"))):
        contexts, slots, given, *tokens = block.to(place)
        token_ids = torch.empty(9, dtype=torch.int64, device=place)
        given_drafts = given, drafts.to(place)
        made = ops.begin(contexts, slots, torch.stack(tokens, dim=1), table.to(place), token_ids, given_drafts)
        results.append(torch.cat(made).cpu())
    return results[0], results[1]


def _angles(device: torch.device) -> Pair:
    """Of the longest context's last positions, on three axes."""
    positions, axis = 262_143 - torch.arange(15).view(3, 5), torch.arange(32) % 3
    frequency = 1e7 ** -(torch.arange(32).double() / 32)
    got = layout.angles(positions.to(device), frequency.to(device), axis.to(device), torch.float32)
    return torch.cat(got).cpu(), torch.cat(plain_layout.angles(positions, frequency, axis, torch.float64))


def _embedding(format: str, device: torch.device, dtype: torch.dtype) -> Pair:
    weight, ids = _weight(format, 96, 512), torch.tensor([95, 0, 17])
    prepared = linear.table(weight, device=device, dtype=dtype)
    return linear.rows(prepared, ids.to(device)).cpu(), naive_linear.dequantize(weight)[ids]


def _greedy(device: torch.device) -> Pair:
    logits = torch.randn(3, 5000, device=device)
    logits[1, 4000] = logits[1, 17] = 9.0
    lowest = [int((row == row.max()).nonzero()[0]) for row in logits.cpu()]
    return sampling.greedy(logits)[0].cpu(), torch.tensor(lowest)


def _draw_rows(device: torch.device) -> Pair:
    """The first column greedy, each of the others with a filter of its own."""
    logits, u = 3 * torch.randn(4, 5000), 0.4
    filters = [(0.0, 0, 1.0, 0.0), (1.0, 20, 0.9, 0.0), (0.7, 0, 0.95, 0.0), (1.0, 0, 1.0, 0.1)]
    want = [int(logits[0].argmax())]
    for row, (temperature, top_k, top_p, min_p) in zip(logits[1:], filters[1:], strict=True):
        want.append(naive_sampling.draw(row, u, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    parameters = torch.tensor([(u, *filter) for filter in filters], dtype=torch.float64).T.contiguous()
    return sampling.draw_rows(logits.to(device), parameters.to(device))[0].cpu(), torch.tensor(want)


def _linear(format: str, tokens: int, device: torch.device, dtype: torch.dtype) -> Pair:
    weight = _weight(format, 96, 512)
    x = torch.randn(tokens, 512).to(dtype)
    prepared = linear.prepare(weight, device=device, dtype=dtype, packed=True)
    return linear.linear(x.to(device), prepared).cpu(), naive_linear.linear(x.float(), weight)


def _weight(format: str, rows: int, width: int) -> linear.PackedWeight:
    base, high, bits = PLANES[format]
    groups = width // linear.GROUP[format]
    scale = (torch.rand(rows, groups) + 0.5) * 12**0.5 / (1 << bits) / width**0.5
    return linear.PackedWeight(
        format,
        (rows, width),
        torch.randint(256, (rows, groups, base), dtype=torch.uint8),
        scale.half(),
        torch.randint(256, (rows, groups, high), dtype=torch.uint8) if high else None,
    )


def _chain(columns: int, device: torch.device, dtype: torch.dtype) -> Pair:
    """From the core of a Gated DeltaNet to the next one's input projection, which has a dense part."""
    hidden, inner, heads, size = 512, 768, 6, 128
    q4, q5, q6, _ = PLANES
    matrices = [[_weight(q6, hidden, heads * size)], [_weight(q4, 2 * inner, hidden)], [_weight(q5, hidden, inner)]]
    entry = [_weight(q5, 640, hidden), torch.randn(12, hidden).to(dtype) / hidden**0.5]
    norms = {1: torch.rand(hidden) + 0.5, 3: torch.rand(hidden) + 0.5}
    stream, (x, gate) = torch.randn(columns, hidden), torch.randn(2, columns, heads, size)
    given, head_norm = [y.to(dtype) for y in (stream, x, gate)], torch.rand(size) + 0.5

    def run(device: torch.device, dtype: torch.dtype, *, packed: bool) -> tuple[tuple[Product, ...], Tensor, Gated]:
        products = []
        for index, weights in enumerate((*matrices, entry)):
            parts = [linear.prepare(w, device=device, dtype=dtype, packed=packed, paired=index == 1) for w in weights]
            norm = Norm(norms[index].to(device), EPS) if index in norms else None
            products.append(Product(tuple(parts), norm))
        y, x, gate = (value.to(device, dtype) for value in given)
        return tuple(products), y, Gated(x, gate, head_norm.to(device), EPS)

    products, y, first = run(device, dtype, packed=True)
    got = chain.run(y, products, first, independent=True)
    products, y, first = run(torch.device("cpu"), torch.float32, packed=False)
    want = naive_chain.run(y, products, first)
    return torch.cat(got, dim=1).cpu(), torch.cat(want, dim=1)


def _delta_rule(lengths: tuple[int, ...], contexts: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Pair:
    mixer = _Mixer(_rows(lengths, contexts, device), dtype)
    return mixer.run(gdn, advance=True), mixer.run(naive_gdn, advance=True)


def _fold(device: torch.device, dtype: torch.dtype) -> Pair:
    """Three columns of each row, of which 2, none and all stand."""
    mixer = _Mixer(_rows((3, 3, 3), (0, 65, 9), device), dtype)
    accepted = torch.tensor([2, 0, 3], device=device)
    return mixer.run(gdn, advance=False, accepted=accepted), mixer.run(naive_gdn, advance=False, accepted=accepted)


class _Mixer:
    """Inputs of a Gated DeltaNet step, and what routes make of them."""

    def __init__(self, rows: Ragged, dtype: torch.dtype) -> None:
        value_heads, key_heads, size = 4, 2, 128
        device, channels = rows.slots.device, 2 * key_heads * size + value_heads * size
        self.rows = rows
        self.x = torch.randn(rows.tokens, channels, device=device).to(dtype)
        self.a, self.b = torch.randn(2, rows.tokens, value_heads, device=device).to(dtype)
        self.taps, self.gates = torch.randn(4, channels, device=device), torch.randn(2, value_heads, device=device)
        self.state = torch.randn(rows.rows + 1, value_heads, size, size, device=device)
        self.history = torch.randn(rows.rows + 1, 4, channels, device=device).to(dtype)

    def run(self, ops: ModuleType, *, advance: bool, accepted: Tensor | None = None) -> Tensor:
        """Everything that a step, and the fold of its `accepted` columns, computes."""
        state, history = self.state.clone(), self.history.clone()
        given = (self.x, self.a, self.b, self.taps, *self.gates, state, history, self.rows)
        o, record = ops.mix(*given, advance=advance)
        results = [o, state[1:], history[1:]]
        if record and accepted is not None:
            ops.fold(record, accepted, *self.gates, state, history, self.rows)
            results.append(record.qkv)
        return torch.cat([part.float().flatten() for part in results])


def _append(codec: str, device: torch.device, dtype: torch.dtype) -> Pair:
    """What is read back beside what was written."""
    rows = _rows((70,), (62,), device)
    k, v = torch.randn(2, rows.tokens, KV_HEADS, HEAD_DIM, device=device).to(dtype)
    pages = _pages(codec, rows, device)
    kv_codec.append(pages, k, v, rows)
    got = kv_codec.gather(pages, rows.block_table[0], 132)
    # Read back [heads, positions, D], written [tokens, heads, D].
    return torch.stack([part[:, 62:].transpose(0, 1).float() for part in got]), torch.stack([k, v]).float()


def _attend(
    codec: str, lengths: tuple[int, ...], contexts: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> Pair:
    whole = tuple(a + b for a, b in zip(lengths, contexts, strict=True))
    everything, rows = _rows(whole, (0,) * len(whole), device), _rows(lengths, contexts, device)
    pages = _pages(codec, rows, device)
    k, v = torch.randn(2, everything.tokens, KV_HEADS, HEAD_DIM, device=device).to(dtype)
    kv_codec.append(pages, k, v, everything)
    fused = torch.randn(rows.tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, device=device).to(dtype)
    angle, weights = torch.randn(rows.tokens, 32, device=device), torch.randn(2, HEAD_DIM, device=device)
    rotation = attention.Rotation(angle.cos(), angle.sin(), weights[0], weights[1], EPS)
    q, k, v = fused.split_with_sizes([HEADS, KV_HEADS, KV_HEADS], dim=1)
    scale = HEAD_DIM**-0.5
    got = attention.mix(q, k, v, rotation, pages, rows, scale=scale)
    return got, naive_attention.mix(q, k, v, rotation, pages, rows, scale=scale)


def _pages(codec: str, rows: Ragged, device: torch.device) -> kv_codec.KVPages:
    return kv_codec.allocate(codec, int(rows.block_table.max()) + 1, KV_HEADS, HEAD_DIM, device)


def _rows(lengths: tuple[int, ...], contexts: tuple[int, ...], device: torch.device) -> Ragged:
    """Over pages in no order, slots from 1 on."""
    starts, count, pages = [0], len(lengths), 4
    for length in lengths:
        starts.append(starts[-1] + length)
    table = (torch.arange(count * pages, dtype=torch.int32).flip(0).view(count, pages) + 1).to(device)
    return ragged(tuple(starts), contexts, table, torch.arange(1, count + 1, device=device))

"""The chain of products between two mixer cores, one operation after the other, against the oracle."""

import pytest
import torch

from longlane.kernels import chain
from longlane.kernels.chain import Gated, Norm, Product, naive, steps
from longlane.kernels.linear import prepare
from support.packed import random_weight

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16
TOLERANCE = {F64: 1e-13, F32: 1e-5, BF16: 2e-2}
EPS = 1e-6
HIDDEN, INNER, HEADS, SIZE = 72, 96, 3, 40
# rows, columns, formats of the weights side by side, whether they are paired, whether their input is normed
MATRICES = [
    (HIDDEN, HEADS * SIZE, ["q6_g64_fp16"], False, False),
    (2 * INNER, HIDDEN, ["q4_g64_fp16"], True, True),
    (HIDDEN, INNER, ["q5_g64_fp16"], False, False),
    (50, HIDDEN, ["q8_g32_fp16", "dense", "q4_g64_fp16"], False, True),
]


def wide(dtype):
    return F64 if dtype == F64 else F32


def random_products(dtype):
    """The chain of a block in `dtype`, and the same in the dtype of sums."""
    own, exact = [], []
    for index, (rows, columns, formats, paired, normed) in enumerate(MATRICES):
        pairs = [
            (torch.randn(rows, columns).to(dtype) / columns**0.5,) * 2
            if name == "dense"
            else random_weight(name, rows, columns, seed=10 * index + at)
            for at, name in enumerate(formats)
        ]
        norm = Norm(torch.rand(HIDDEN, dtype=wide(dtype)) + 0.5, EPS) if normed else None
        for made, kind, which in ((own, dtype, 0), (exact, wide(dtype), 1)):
            parts = [prepare(pair[which], device="cpu", dtype=kind, paired=paired) for pair in pairs]
            made.append(Product(tuple(parts), norm))
    return own, exact


def random_core(columns, dtype, *, gated=True):
    x = torch.randn(columns, HEADS, SIZE, dtype=dtype)
    if not gated:
        return x.flatten(1)
    # The gate is a slice of a fused product.
    gate = torch.randn(columns, 5, HEADS, SIZE, dtype=dtype)[:, 2]
    return Gated(x, gate, torch.rand(SIZE, dtype=wide(dtype)) + 0.5, EPS)


def widened(first, dtype):
    if not isinstance(first, Gated):
        return first.to(wide(dtype))
    return Gated(first.x.to(wide(dtype)), first.gate.to(wide(dtype)), first.weight, first.eps)


def check(got, want, dtype):
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == dtype
        assert (mine - theirs).norm() <= TOLERANCE[dtype] * theirs.norm()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("columns", [1, 3, 17, 65])
@pytest.mark.parametrize("gated", [True, False], ids=["delta", "attention"])
def test_a_block(columns, dtype, gated):
    torch.manual_seed(columns)
    own, exact = random_products(dtype)
    stream, first = torch.randn(columns, HIDDEN, dtype=dtype), random_core(columns, dtype, gated=gated)
    kept = stream.clone()
    got = chain.run(stream, own, first, independent=True)
    check(got, naive.run(stream.to(wide(dtype)), exact, widened(first, dtype)), dtype)
    assert torch.equal(stream, kept), "the stream is an input"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_ends_of_a_model(dtype):
    """A first chain has nothing to add to the stream, a last one ends with a norm."""
    torch.manual_seed(0)
    own, exact = random_products(dtype)
    stream, last = torch.randn(5, HIDDEN, dtype=dtype), Product((), own[1].norm)
    same, projected = chain.run(stream, own[3:], independent=True)
    assert torch.equal(same, stream)
    check((same, projected), naive.run(stream.to(wide(dtype)), exact[3:], None), dtype)
    first = random_core(5, dtype)
    got = chain.run(stream, [*own[:3], last], first, independent=True)
    check(got, naive.run(stream.to(wide(dtype)), [*exact[:3], last], widened(first, dtype)), dtype)


@pytest.mark.parametrize("run", [steps.run, naive.run])
def test_a_divided_chain_is_the_whole_one(run):
    torch.manual_seed(0)
    products, _ = random_products(F32)
    stream, first = torch.randn(5, HIDDEN), random_core(5, F32)
    options = {} if run is naive.run else {"independent": True}
    whole = run(stream, products, first, **options)
    middle, normed = run(stream, [products[0], Product((), products[1].norm)], first, **options)
    _, inner = run(middle, [Product(products[1].weights), products[2]], normed, **options)
    divided = run(middle, products[3:], inner, **options)
    assert all(torch.equal(*pair) for pair in zip(divided, whole, strict=True))

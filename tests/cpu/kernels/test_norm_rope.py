"""The CPU route of norms, rotation and gates against its oracle."""

import pytest
import torch

from longlane.kernels.norm_rope import cpu, naive

TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 2e-2}
EPS = 1e-6


@pytest.fixture(params=[1, 63, 65])
def tokens(request):
    torch.manual_seed(request.param)
    return request.param


@pytest.fixture(params=TOLERANCE, ids=str)
def dtype(request):
    return request.param


def check(name, dtype, *inputs):
    copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    result, reference = getattr(cpu, name)(*inputs), getattr(naive, name)(*copies)
    torch.testing.assert_close(result, reference, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for given, copy in zip(inputs, copies, strict=True):
        assert given is copy or torch.equal(given, copy), "an input was overwritten"


def wide(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


def test_rms_norm(tokens, dtype):
    x, weight = torch.randn(tokens, 72, dtype=dtype), torch.randn(72, dtype=wide(dtype))
    x[0] = 0
    check("rms_norm", dtype, x, weight, EPS)
    check("add_rms_norm", dtype, x, torch.randn_like(x), weight, EPS)
    check("add_rms_norm", dtype, x, torch.randn(2, tokens, 72, dtype=wide(dtype)), weight, EPS)
    # Heads are slices of a fused product.
    heads = torch.randn(tokens, 5, 80, dtype=dtype)[:, 1:4, :72]
    check("gated_rms_norm", dtype, heads, torch.randn_like(heads), weight, EPS)


@pytest.mark.parametrize("half", [4, 16])
@pytest.mark.parametrize("normed", [True, False])
def test_qk_norm_rope(tokens, dtype, half, normed):
    fused = torch.randn(tokens, 9, 32, dtype=dtype)
    angle = torch.randn(tokens, half, dtype=wide(dtype))
    weights = [torch.randn(32, dtype=wide(dtype)) for _ in range(2)] if normed else [None, None]
    check("qk_norm_rope", dtype, fused[:, :6], fused[:, 6:8], angle.cos(), angle.sin(), *weights, EPS)


def test_gates(tokens, dtype):
    check("swiglu", dtype, torch.randn(tokens, 96, dtype=dtype))
    x = torch.randn(tokens, 48, dtype=dtype)
    check("sigmoid_gate", dtype, x, torch.randn_like(x))
    check("sigmoid_gate", dtype, x, torch.randn(tokens, 1, dtype=dtype))

"""All layers of a llama in one native call, against the same layers in plain torch."""

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from longlane.kernels.kv_codec.pages import PAGE, KVPages
from longlane.kernels.linear import cpu
from longlane.kernels.native import build
from longlane.kernels.native.llama import Geometry, Layer, NativeLlama
from support.packed import random_weight
from support.poison import poisoned_empty

__all__ = ["poisoned_empty"]
pytestmark = [
    pytest.mark.skipif(build.library() is None, reason="no compiler, or a processor without AVX2"),
    pytest.mark.usefixtures("poisoned_empty"),
]
GEOMETRY = Geometry(hidden=96, heads=3, kv_heads=1, head_dim=64, inner=160, epsilon=1e-5)
WIDTH = GEOMETRY.heads * GEOMETRY.head_dim
SHAPES = {
    "qkv": (WIDTH + 2 * GEOMETRY.kv_heads * GEOMETRY.head_dim, 96),
    "output": (96, WIDTH),
    "gate_up": (320, 96),
    "down": (96, 160),
}
FORMATS = ["q4_1_g32_fp16", "q4_g64_fp16", "q8_g32_fp16"]
MATRICES = [{name: random_weight(FORMATS[i], *SHAPES[name], seed=i) for name in SHAPES} for i in range(3)]
NORMS = torch.rand(7, 96, generator=torch.Generator().manual_seed(1)) + 0.5


@pytest.fixture(scope="module")
def model() -> NativeLlama:
    lib = build.library()
    assert lib is not None
    layers = [
        Layer(
            input_norm=NORMS[2 * i].clone(),
            post_norm=NORMS[2 * i + 1].clone(),
            matrices={name: cpu.pack(weight) for name, (weight, _) in matrices.items()},
        )
        for i, matrices in enumerate(MATRICES)
    ]
    return NativeLlama(lib, GEOMETRY, layers, NORMS[6].clone())


@pytest.fixture(params=[1, 3], ids=lambda n: f"{n} threads")
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def embeddings(tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, 96, generator=torch.Generator().manual_seed(seed))


def rotation(positions: Tensor) -> tuple[Tensor, Tensor]:
    frequency = 1e4 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    angle = positions[:, None] * frequency
    return angle.cos().float(), angle.sin().float()


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + GEOMETRY.epsilon) * weight


def oracle(x: Tensor) -> Tensor:
    """Hidden states of one sequence in float64, nothing rounded."""
    x, n = x.double(), x.shape[0]
    cos, sin = (t.double().unsqueeze(1) for t in rotation(torch.arange(n)))

    def rotate(heads: Tensor) -> Tensor:
        a, b = heads.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    for i, matrices in enumerate(MATRICES):
        w = {name: values for name, (_, values) in matrices.items()}
        q, k, v = (norm(x, NORMS[2 * i]) @ w["qkv"].T).split([WIDTH, 64, 64], -1)
        q, k, v = (t.reshape(n, -1, 64) for t in (q, k, v))
        q, k, v = (t.transpose(0, 1) for t in (rotate(q), rotate(k), v))
        mixed = functional.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), is_causal=True)
        x = x + mixed.transpose(0, 1).reshape(n, WIDTH) @ w["output"].T
        gate, up = (norm(x, NORMS[2 * i + 1]) @ w["gate_up"].T).chunk(2, -1)
        x = x + (functional.silu(gate) * up) @ w["down"].T
    return norm(x, NORMS[6])


def poisoned_pages(count: int) -> list[KVPages]:
    shape = (count, GEOMETRY.kv_heads, PAGE, GEOMETRY.head_dim)
    return [KVPages("float32", torch.full(shape, torch.nan), torch.full(shape, torch.nan)) for _ in MATRICES]


def run(
    model: NativeLlama, kv: list[KVPages], rows: Sequence[Tensor], context: Sequence[int], table: Sequence[list[int]]
) -> list[Tensor]:
    """One step over `rows` of embeddings on top of `context` tokens -> hidden states of each row."""
    lengths = [row.shape[0] for row in rows]
    starts = [sum(lengths[:i]) for i in range(len(rows) + 1)]
    cos, sin = rotation(torch.cat([torch.arange(c, c + n) for c, n in zip(context, lengths, strict=True)]))
    blocks = torch.tensor(table, dtype=torch.int32)
    hidden = model.forward(torch.cat(list(rows)), cos, sin, starts, context, blocks, kv)
    return list(hidden.split(lengths))


def test_matches_torch_within_int8_activations(model: NativeLlama, threads: int) -> None:
    x = embeddings(150)
    (hidden,) = run(model, poisoned_pages(5), [x], [0], [[4, 1, 3]])
    expected = oracle(x)
    assert (hidden - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("chunks", [[150], [1, 63, 1, 65, 20], [64, 64, 22], [17] * 8 + [14]], ids=str)
def test_every_chunking_gives_the_same_bits(model: NativeLlama, threads: int, chunks: list[int]) -> None:
    x = embeddings(150)
    table = [[4, 1, 3]]
    token_by_token = poisoned_pages(5)
    expected = torch.cat([run(model, token_by_token, [row[None]], [i], table)[0] for i, row in enumerate(x)])
    kv, start, parts = poisoned_pages(5), 0, []
    for count in chunks:
        parts += run(model, kv, [x[start : start + count]], [start], table)
        start += count
    assert torch.equal(torch.cat(parts), expected)
    for a, b in zip(kv, token_by_token, strict=True):
        assert torch.equal(a.k[[4, 1]], b.k[[4, 1]])
        assert torch.equal(a.v[[4, 1]], b.v[[4, 1]])


def test_rows_of_a_batch_do_not_see_each_other(model: NativeLlama) -> None:
    lengths = [1, 64, 130, 3]
    tables = [[1, 0, 0], [2, 7, 0], [3, 4, 5], [6, 0, 0]]
    prompts = [embeddings(n, seed=n) for n in lengths]
    nexts = [embeddings(1, seed=100 + n) for n in lengths]
    alone = []
    for prompt, following, table in zip(prompts, nexts, tables, strict=True):
        kv = poisoned_pages(8)
        run(model, kv, [prompt], [0], [table])
        alone += run(model, kv, [following], [len(prompt)], [table])
    kv = poisoned_pages(8)
    run(model, kv, prompts, [0] * 4, tables)
    together = run(model, kv, nexts, lengths, tables)
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_only_the_rows_own_pages_are_written(model: NativeLlama) -> None:
    kv = poisoned_pages(6)
    run(model, kv, [embeddings(65)], [0], [[2, 5]])
    for layer in kv:
        for plane in (layer.k, layer.v):
            assert plane[[0, 1, 3, 4]].isnan().all()
            assert plane[2].isfinite().all()
            assert plane[5, :, 0].isfinite().all()
            assert plane[5, :, 1:].isnan().all()


def test_a_geometry_without_vector_tails_is_refused() -> None:
    assert GEOMETRY.supported()
    assert not Geometry(hidden=96, heads=3, kv_heads=1, head_dim=48, inner=160, epsilon=1e-5).supported()
    assert not Geometry(hidden=72, heads=3, kv_heads=1, head_dim=64, inner=160, epsilon=1e-5).supported()

"""Models over tiled weights, as a card in bfloat16 runs them, with the kernels replaced by their definition."""

from types import SimpleNamespace

import pytest
import torch

from longlane.artifact.formats import decode
from longlane.kernels import linear as products
from longlane.kernels.linear import cuts, prepare
from longlane.kernels.linear.tiles import Tiles
from longlane.layers.linear import Linear
from longlane.layers.parameters import HandedOver
from longlane.models.qwen3_5.mtp import previous_hidden
from longlane.models.registry import build
from support import tiled
from support.lanes import Lanes
from support.packed import random_weight
from support.stored_model import DENSE, MOE, TOKENS, run, stored

TIED = {**DENSE, "tie_word_embeddings": True}
BF16 = torch.bfloat16


@pytest.fixture
def card(monkeypatch):
    """Take the CPU for a card."""
    monkeypatch.setattr(products, "on_tiles", lambda device, dtype: dtype == BF16)
    monkeypatch.setattr(products, "_gpu", lambda: tiled.KERNELS)


@pytest.mark.parametrize("config", [DENSE, TIED, MOE], ids=["dense", "tied", "moe"])
def test_a_tiled_model_computes_what_its_weights_decode_to(config, card):
    weights = stored(config)
    decoded = {name: w if isinstance(w, torch.Tensor) else decode(w) for name, w in weights.items()}
    exact = run(build(config, decoded, dtype=torch.float32), torch.float32)
    fast = run(build(config, weights, dtype=BF16, packed=True), BF16)
    # Activations of eight bits of mantissa now and then choose another expert.
    allowed = 0.3 if config is MOE else 0.04
    for got, full in zip(fast, exact, strict=True):
        assert got.dtype == torch.float32
        assert (got - full).norm() < allowed * full.norm()


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_rows_that_programs_share_are_added_up(config, card, monkeypatch):
    """As those of a large model are; these are short."""
    model = build(config, stored(config), dtype=BF16, packed=True)
    whole, asked = run(model, BF16), []

    def parts(matrix):
        asked.append(matrix)
        return 1 if matrix.paired else 2

    monkeypatch.setattr(cuts, "parts", parts)
    for got, want in zip(run(model, BF16), whole, strict=True):
        assert (got - want).norm() < 0.02 * want.norm()
    assert asked


@pytest.mark.parametrize("config", [DENSE, TIED], ids=["dense", "tied"])
def test_resident_bytes_are_those_of_all_tiles_and_the_table(config, card):
    weights = stored(config)
    model = build(config, weights, dtype=BF16, packed=True)
    blocks = [*model.blocks, model.mtp.block]
    linears = [part for block in blocks for layer in (block.mixer, block.mlp) for part in vars(layer).values()]
    linears += [model.head, model.mtp.input_projection, model.mtp.draft_head]
    tiles = [part.tiles for linear in linears if isinstance(linear, Linear) for part in linear.parts]
    assert all(isinstance(part, Tiles) for part in tiles)
    matrices = sum(part.nbytes for part in tiles)
    if config is TIED:
        assert model.embedding.table is model.head.parts[0]
    else:
        assert model.embedding.table.packed is not None
        matrices += model.embedding.table.nbytes
    small = sum(w.numel() * (8 if "token_ids" in name else 4) for name, w in weights.items() if is_vector(name, w))
    assert model.weight_bytes == matrices + small


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_decode_and_verify_only_stream(config, card, monkeypatch):
    """The dense product of a long chunk computes a token by what stands beside it; these may not."""

    def refuse(*_, **__):
        raise AssertionError("a product that depends on its neighbours")

    model = build(config, stored(config), dtype=BF16, packed=True)
    lanes = Lanes(model, BF16, 40, pages_each=2)

    def in_parts(x, matrix, *, independent):
        return (tiled.linear_in_parts if independent else refuse)(x, matrix, independent=independent)

    routes = {"linear": refuse, "linear_many": refuse, "linear_in_parts": in_parts}
    kernels = SimpleNamespace(**{**vars(tiled.KERNELS), **routes})
    monkeypatch.setattr(products, "_gpu", lambda: kernels)
    for kind, columns in (("verify", 3), ("decode", 1)):
        batch = lanes.batch(kind, [TOKENS[:columns]] * 40)
        hidden = lanes.run(kind, [TOKENS[:columns]] * 40).hidden
        model.mtp.forward(batch, previous_hidden(batch, hidden, lanes.caches), lanes.caches)
        assert model.logits(hidden).isfinite().all()
    with pytest.raises(AssertionError, match="depends on its neighbours"):
        lanes.run("prefill", [TOKENS])


@pytest.mark.parametrize("config", [DENSE, TIED, MOE], ids=["dense", "tied", "moe"])
def test_matrices_that_are_handed_over_are_given_up(config, card):
    weights = stored(config)
    kept = run(build(config, weights, dtype=BF16, packed=True), BF16)
    handed = HandedOver(weights)
    given = run(build(config, handed, dtype=BF16, packed=True), BF16)
    assert all(is_vector(name, weight) for name, weight in handed.items())
    assert all(torch.equal(*pair) for pair in zip(given, kept, strict=True))


def is_vector(name, weight):
    return isinstance(weight, torch.Tensor) and (weight.ndim == 1 or name.endswith("convolution"))


@pytest.mark.parametrize("name", ["q4_g64_fp16", "q4_1_g32_fp16"])
@pytest.mark.parametrize("rows", [64, 90], ids=["fused", "odd"])
def test_a_pair_yields_silu_of_its_gate_times_up(name, rows, card):
    weight, values = random_weight(name, rows, 192)
    prepared = prepare(weight, device="cpu", dtype=BF16, packed=True, paired=True)
    assert prepared.tiles.paired == (rows == 64)
    x = torch.randn(5, 192).to(BF16)
    out = torch.full((5, 100), torch.nan)
    products.linear(x, prepared, out=out[:, 3 : 3 + rows // 2])
    gate, up = (x.double() @ values.T).chunk(2, -1)
    want = torch.nn.functional.silu(gate) * up
    assert (out[:, 3 : 3 + rows // 2] - want).norm() < 0.01 * want.norm()
    assert out[:, :3].isnan().all()
    assert out[:, 3 + rows // 2 :].isnan().all()


@pytest.mark.parametrize("name", ["q4_g64_fp16", "q8_g32_fp16", "q4_1_g32_fp16"])
def test_rows_are_gathered_from_tiles(name, card, monkeypatch):
    monkeypatch.setattr(products, "_GATHERED", 3)
    weight, values = random_weight(name, 45, 192)
    ids = torch.tensor([[44, 0, 15], [16, 31, 31]])
    gathered = products.rows(prepare(weight, device="cpu", dtype=BF16, packed=True), ids)
    assert torch.equal(gathered, values[ids].float().to(BF16))


def test_only_a_card_in_bfloat16_has_tiles():
    weight, _ = random_weight("q4_g64_fp16", 16, 128)
    assert not products.on_tiles("cpu", BF16)
    assert not products.on_tiles("cuda", torch.float32)
    assert products.on_tiles("cuda:1", BF16)
    assert prepare(weight, device="cpu", dtype=BF16, packed=True).packed is not None

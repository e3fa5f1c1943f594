"""The llama with native layers: close to the exact model, and the same bits in every batch."""

from dataclasses import replace

import pytest
import torch

from longlane.artifact import llama_config
from longlane.kernels.linear import PackedWeight, Weight
from longlane.kernels.native import build as native
from longlane.models.decoder import Decoder
from longlane.models.llama.native import NativeDecoder
from longlane.models.registry import build
from support.lanes import Lanes, relative_error
from support.packed import random_weight

needs_native = pytest.mark.skipif(native.library() is None, reason="no compiler, or a processor without AVX2")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 200,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
PROMPT = torch.randint(0, 200, (150,), generator=torch.Generator().manual_seed(1)).tolist()


def weights() -> dict[str, Weight]:
    named: dict[str, Weight] = {}
    for seed, (name, shape) in enumerate(llama_config.parse(CONFIG).shapes().items()):
        if len(shape) == 1:
            named[name] = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5
        else:
            kind = "q8_g32_fp16" if name == "text/token_embedding" else "q4_1_g32_fp16"
            named[name] = random_weight(kind, shape[0], shape[1], seed)[0]
    # A strong stream, as trained models have, keeps the rounding of activations small beside it.
    table = named["text/token_embedding"]
    assert isinstance(table, PackedWeight)
    return named | {"text/token_embedding": replace(table, scale=table.scale * 10)}


@pytest.fixture(scope="module")
def fast() -> Decoder:
    return build(CONFIG, weights(), packed=True)


@needs_native
def test_logits_are_within_the_error_of_int8_activations(fast: Decoder) -> None:
    assert isinstance(fast, NativeDecoder)
    exact = Lanes(build(CONFIG, weights()), torch.float32).logits(PROMPT)
    assert relative_error(Lanes(fast, torch.float32).logits(PROMPT), exact) < 0.03


@needs_native
@pytest.mark.parametrize("chunk", [1, 7, 64, 65])
def test_every_chunking_gives_the_same_bits(fast: Decoder, chunk: int) -> None:
    whole = Lanes(fast, torch.float32).logits(PROMPT)
    assert torch.equal(Lanes(fast, torch.float32).logits(PROMPT, chunk), whole)


@needs_native
def test_a_verify_step_gives_the_bits_of_decode_steps(fast: Decoder) -> None:
    lanes = Lanes(fast, torch.float32)
    lanes.run("prefill", [PROMPT[:100]])
    verified = lanes.run("verify", [PROMPT[100:104]])
    decoded = [lanes.run("decode", [[token]]).hidden for token in PROMPT[100:104]]
    assert verified.records == []
    assert torch.equal(verified.hidden, torch.cat(decoded))


@needs_native
def test_other_page_formats_run_the_plain_layers(fast: Decoder) -> None:
    lanes = Lanes(fast, torch.float32)
    coded = Lanes(fast, torch.bfloat16)
    expected = lanes.logits(PROMPT)
    assert relative_error(coded.logits(PROMPT), expected) < 0.03


def test_dense_weights_and_other_widths_keep_the_plain_layers() -> None:
    dense = {n: torch.randn(s) for n, s in llama_config.parse(CONFIG).shapes().items()}
    assert type(build(CONFIG, dense, packed=True)) is Decoder
    assert type(build(CONFIG, weights(), packed=True, dtype=torch.float64)) is Decoder

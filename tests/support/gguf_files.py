"""Small GGUF files, as the package writes them."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from torch import Tensor

from support.random_checkpoint import byte_tokenizer

HIDDEN, INTER, HEADS, KV_HEADS, VOCAB = 64, 96, 4, 2, 320
DIM = HIDDEN // HEADS
Arrays = dict[str, NDArray[np.float32]]


def random_arrays(tied: bool = True) -> Arrays:
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (VOCAB, HIDDEN), "output_norm": (HIDDEN,)}
    if not tied:
        shapes["output"] = (VOCAB, HIDDEN)
    for layer in range(2):
        shapes |= {
            f"blk.{layer}.{name}": shape
            for name, shape in {
                "attn_norm": (HIDDEN,),
                "attn_q": (HIDDEN, HIDDEN),
                "attn_k": (KV_HEADS * DIM, HIDDEN),
                "attn_v": (KV_HEADS * DIM, HIDDEN),
                "attn_output": (HIDDEN, HIDDEN),
                "ffn_norm": (HIDDEN,),
                "ffn_gate": (INTER, HIDDEN),
                "ffn_up": (INTER, HIDDEN),
                "ffn_down": (HIDDEN, INTER),
            }.items()
        }
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    arrays: Arrays,
    types: dict[str, Type],
    *,
    family: str = "llama",
    pre: str = "smollm",
    heads: int = HEADS,
    scaling: Any = None,
    eos: int = 257,
    stops: list[int] | None = None,
    alignment: int | None = None,
    **raw: Any,
) -> dict[str, Tensor]:
    """A small model; `types` by the end of a tensor's name, float32 otherwise. Returns the values it holds."""
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTER)
    writer.add_head_count(heads)
    if scaling is not None:
        writer.add_rope_scaling_type(scaling)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e5)
    vocab = byte_tokenizer(VOCAB).get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    tokens += [f"<unused {id}>" for id in range(len(tokens), VOCAB - 1)] + ["ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if 256 <= id < 259 else 4 if 259 <= id < 300 else 1 for id in range(VOCAB)])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(eos)
    if stops is not None:
        writer.add_array("tokenizer.ggml.eos_token_ids", stops)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_chat_template("{{ messages }}")
    held = {}
    for name, values in arrays.items():
        type = next((type for end, type in types.items() if name.endswith(end)), Type.F32)
        data = raw[name] if name in raw else gguf.quantize(values, type)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=type)
        held[name] = torch.from_numpy(gguf.dequantize(data, type).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held

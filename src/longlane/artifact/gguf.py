"""GGUF files of the llama family: their blocks bit for bit, their tokenizer and settings as side files.

Source: the GGUF specification and its Q4_1 and Q8_0 block types.
"""

import json
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from longlane.artifact import llama_config
from longlane.artifact.gguf_file import LONGEST, GgufFile, GgufTensor
from longlane.artifact.layouts import AFFINE
from longlane.artifact.recipe import Item
from longlane.artifact.text_config import LLAMA
from longlane.errors import CheckpointError, counted
from longlane.kernels.linear.weight import PackedWeight, Weight

CONTROL, USER_DEFINED = 3, 4
Bytes = NDArray[np.uint8]
# What `tokenizer.ggml.pre` stands for: every digit alone, then the byte-level rule of GPT-2.
PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
}
# The objects of one layer, in file order, and the tensors whose rows they stack.
LAYER = {
    "input_norm": ("attn_norm",),
    "attention/query_key_value": ("attn_q", "attn_k", "attn_v"),
    "attention/output": ("attn_output",),
    "post_attention_norm": ("ffn_norm",),
    "mlp/gate_up": ("ffn_gate", "ffn_up"),
    "mlp/down": ("ffn_down",),
}
# Sampling that a model's authors recommend; GGUF has no field for it. By the start of `general.basename`.
SAMPLING = {"smollm2": {"temperature": 0.2, "top_p": 0.9}}
READABLE = {Type.Q4_1: AFFINE, Type.Q8_0: "q8_g32_fp16", Type.BF16: "bf16", Type.F16: "fp32", Type.F32: "fp32"}


class GgufModel:
    """One mapped GGUF file of architecture `llama`. `config` and `resources` are as a Hugging Face directory has them.

    Raises CheckpointError naming the file and what this build reads instead.
    """

    def __init__(self, file: GgufFile):
        self.path, self._file, self._tensors = file.path, file, file.tensors
        if (family := file.text("general.architecture")) != "llama":
            raise CheckpointError(
                f"{self.path}: GGUF architecture {family} is not supported; this build converts llama"
            )
        self._read: set[str] = set()
        self.config = self._config()
        llama_config.parse(self.config, self.path)
        self._check_rope()
        self._shapes = _shapes(self.config)
        self.resources = self._resources()

    def items(self) -> list[Item]:
        """Every object of the artifact, in file order, without loss."""
        found = [self._item("text/token_embedding", "token_embd")]
        for layer in range(self.config["num_hidden_layers"]):
            for name, parts in LAYER.items():
                found.append(self._item(f"text/layers/{layer}/{name}", *(f"blk.{layer}.{part}" for part in parts)))
        found.append(self._item("text/final_norm", "output_norm"))
        if not self.config["tie_word_embeddings"]:
            found.append(self._item("text/output_head", "output"))
        if unread := sorted(self._tensors.keys() - self._read):
            raise CheckpointError(
                f"{self.path}: a llama model has no place for {counted(len(unread), 'tensor')} ({unread[0]}); "
                "this build cannot run the model with them and will not run it without"
            )
        return found

    def _check_rope(self) -> None:
        """Refuse a rotary embedding that this build would compute as the plain one."""
        scaling = self._file.text("llama.rope.scaling.type", "none")
        rotated = self._file.count("llama.rope.dimension_count", self.config["head_dim"])
        if scaling != "none" or rotated != self.config["head_dim"]:
            raise CheckpointError(
                f"{self.path}: rotary embedding of {rotated} dimensions with scaling {scaling} is not supported; "
                f"this build rotates all {self.config['head_dim']} of a head, without scaling"
            )

    def _config(self) -> dict[str, Any]:
        file = self._file
        heads, hidden = file.count("llama.attention.head_count"), file.count("llama.embedding_length")
        return {
            "architectures": [LLAMA],
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": file.count("llama.feed_forward_length"),
            "num_hidden_layers": file.count("llama.block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": file.count("llama.attention.head_count_kv", heads),
            "head_dim": file.count("llama.attention.key_length", hidden // heads),
            "hidden_act": "silu",
            "max_position_embeddings": file.count("llama.context_length"),
            "rms_norm_eps": file.positive("llama.attention.layer_norm_rms_epsilon"),
            "rope_theta": file.positive("llama.rope.freq_base", 10000.0),
            "vocab_size": len(file.list_of(str, "tokenizer.ggml.tokens")),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": self._token_id("bos"),
            "eos_token_id": self._token_id("eos"),
            "pad_token_id": self._token_id("padding"),
        }

    def _token_id(self, role: str) -> int | None:
        """The first of a role, which may have several."""
        return next(iter(self._file.ids(f"tokenizer.ggml.{role}_token_id")), None)

    def _resources(self) -> dict[str, bytes]:
        tokens = self._file.list_of(str, "tokenizer.ggml.tokens")
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": self.config["max_position_embeddings"],
            "add_bos_token": self._file.flag("tokenizer.ggml.add_bos_token"),
            "clean_up_tokenization_spaces": False,
            **{
                f"{role}_token": None if (id := self.config[f"{role}_token_id"]) is None else self._token(tokens, id)
                for role in ("bos", "eos", "pad")
            },
        }
        name = (self._file.text("general.basename") or "").lower()
        sampling = next((preset for family, preset in SAMPLING.items() if name.startswith(family)), {})
        generation = {"eos_token_id": self._stop_ids(tokens), "pad_token_id": self.config["pad_token_id"], **sampling}
        resources = {
            "tokenizer": self._tokenizer(tokens).to_str().encode(),
            "tokenizer_config": _json(settings),
            "generation_config": _json(generation),
        }
        if template := self._file.text("tokenizer.chat_template"):
            resources["chat_template"] = template.encode()
        return resources

    def _token(self, tokens: list[str], id: int) -> str:
        if id >= len(tokens):
            raise CheckpointError(f"{self.path}: token {id} is outside its vocabulary of {len(tokens)}; fetch it again")
        return tokens[id]

    def _stop_ids(self, tokens: list[str]) -> list[int]:
        """The end of a turn, and the end of a text where the file names another one."""
        keys = ("eos_token_id", "eot_token_id", "eos_token_ids")
        found = sorted({id for key in keys for id in self._file.ids(f"tokenizer.ggml.{key}")})
        if not found:
            raise CheckpointError(
                f"{self.path}: GGUF key tokenizer.ggml.eos_token_id is missing; convert the model to GGUF again"
            )
        self._token(tokens, found[-1])
        return found

    def _tokenizer(self, tokens: list[str]) -> Tokenizer:
        if (kind := self._file.text("tokenizer.ggml.model")) != "gpt2":
            raise CheckpointError(f"{self.path}: GGUF tokenizer {kind} is not supported; this build reads gpt2 (BPE)")
        if (pre := self._file.text("tokenizer.ggml.pre")) not in PRE_TOKENIZERS:
            raise CheckpointError(
                f"{self.path}: GGUF pre-tokenizer {pre} is not supported; this build reads {', '.join(PRE_TOKENIZERS)}"
            )
        vocabulary = {token: id for id, token in enumerate(tokens)}
        if len(vocabulary) < len(tokens):
            twice = next(token for id, token in enumerate(tokens) if vocabulary[token] != id)
            raise CheckpointError(f"{self.path}: its tokens hold {twice[:LONGEST]!r} twice; fetch it again")
        types = self._file.list_of(int, "tokenizer.ggml.token_type")
        if len(types) != len(tokens):
            raise CheckpointError(
                f"{self.path}: {counted(len(tokens), 'token')}, but {counted(len(types), 'token type')}; fetch it again"
            )
        tokenizer = Tokenizer(models.BPE(vocabulary, self._merges(vocabulary)))
        tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
        tokenizer.decoder = decoders.ByteLevel()
        added = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED)]
        tokenizer.add_tokens([AddedToken(token, special=kind == CONTROL, normalized=False) for token, kind in added])
        return tokenizer

    def _merges(self, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
        merges: list[tuple[str, str]] = []
        for merge in self._file.list_of(str, "tokenizer.ggml.merges"):
            left, _, right = merge.partition(" ")
            if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
                raise CheckpointError(
                    f"{self.path}: merge {len(merges) + 1} ({merge[:LONGEST]!r}) does not join two tokens to a third; "
                    "fetch it again"
                )
            merges.append((left, right))
        return merges

    def _item(self, name: str, *sources: str) -> Item:
        tensors = [self._tensor(f"{source}.weight") for source in sources]
        formats = {_exact_format(tensor) for tensor in tensors}
        # Rows of one object share a format; float32 holds any mixture exactly.
        format = formats.pop() if len(formats) == 1 else "fp32"
        width = tensors[0].shape[-1]
        rows = sum(tensor.shape[0] for tensor in tensors if len(tensor.shape) == 2)
        shape = (rows, width) if rows else (width,)
        return Item(name, format, shape, lambda: (self._rows(tensor, format) for tensor in tensors))

    def _tensor(self, name: str) -> GgufTensor:
        if (tensor := self._tensors.get(name)) is None:
            raise CheckpointError(f"{self.path}: tensor {name} is missing; convert the model to GGUF again")
        if tensor.type not in READABLE:
            raise CheckpointError(
                f"{self.path}: tensor {name} is of GGUF type {tensor.type.name}; "
                f"quantise the model to one of {', '.join(type.name for type in READABLE)}"
            )
        if tensor.shape != (expected := self._shapes[name.split(".")[-2]]):
            raise CheckpointError(
                f"{self.path}: tensor {name} has shape {list(tensor.shape)}, its settings imply {list(expected)}; "
                "convert the model to GGUF again"
            )
        self._read.add(name)
        return tensor

    def _rows(self, tensor: GgufTensor, format: str) -> Weight:
        data = tensor.data
        for part, heads in (("attn_q", "num_attention_heads"), ("attn_k", "num_key_value_heads")):
            if part in tensor.name:
                data = _half_split(data, self.config[heads])
        weight = _decode(data, tensor.type, format)
        parts = [weight] if isinstance(weight, torch.Tensor) else [weight.scale, weight.minimum]
        if not all(bool(part.isfinite().all()) for part in parts if part is not None):
            raise CheckpointError(f"{self.path}: tensor {tensor.name} has values that are not finite; fetch it again")
        return weight


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """What the settings imply for each kind of tensor."""
    hidden, inter = config["hidden_size"], config["intermediate_size"]
    query, key = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    matrices = {
        "attn_q": (query, hidden),
        "attn_k": (key, hidden),
        "attn_v": (key, hidden),
        "attn_output": (hidden, query),
        "ffn_gate": (inter, hidden),
        "ffn_up": (inter, hidden),
        "ffn_down": (hidden, inter),
    }
    vocabulary = dict.fromkeys(("token_embd", "output"), (config["vocab_size"], hidden))
    return {**matrices, **vocabulary, **dict.fromkeys(("attn_norm", "ffn_norm", "output_norm"), (hidden,))}


def _decode(data: Bytes, type: Type, format: str) -> Weight:
    if format == AFFINE:
        return _affine(data)
    if format == "q8_g32_fp16":
        return _symmetric(data)
    dense = torch.tensor(gguf.dequantize(data, type))
    return dense.bfloat16() if format == "bf16" else dense


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode()


def _half_split(rows: Bytes, heads: int) -> Bytes:
    """Rows of q or k from GGUF's order, which interleaves the two halves of a head for RoPE, back to halves."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _blocks(data: Bytes, size: int) -> Bytes:
    return data.reshape(len(data), -1, size)


def _halves(blocks: Bytes) -> NDArray[np.float16]:
    """[N, groups, 2] bytes -> [N, groups] float16."""
    return np.ascontiguousarray(blocks).view(np.float16).squeeze(-1)


def _exact_format(tensor: GgufTensor) -> str:
    """The format that holds the tensor exactly; float32 for a Q8_0 with codes or scales that q8_g32_fp16 forbids."""
    if tensor.type == Type.Q8_0:
        blocks = _blocks(tensor.data, 34)
        if np.signbit(_halves(blocks[..., :2])).any() or (blocks[..., 2:] == 0x80).any():
            return "fp32"
    return READABLE[tensor.type]


def _affine(data: Bytes) -> PackedWeight:
    """Q4_1 blocks (scale, minimum, 16 bytes: lane j low, lane j + 16 high) -> planes with neighbours in a byte."""
    blocks = _blocks(data, 20)
    codes = blocks[..., 4:]
    lanes = np.concatenate((codes & 0xF, codes >> 4), axis=-1)
    base = lanes[..., 0::2] | lanes[..., 1::2] << 4
    scale, minimum = _halves(blocks[..., :2]), _halves(blocks[..., 2:4])
    planes = {"base": base, "scale": scale, "minimum": minimum}
    shape = (len(data), 32 * blocks.shape[1])
    return PackedWeight(AFFINE, shape, **{name: torch.from_numpy(plane) for name, plane in planes.items()})


def _symmetric(data: Bytes) -> PackedWeight:
    """Q8_0 blocks (scale, 32 codes) -> planes, with empty groups up to a multiple of 128 lanes."""
    blocks = _blocks(data, 34)
    count = blocks.shape[1]
    padded = np.pad(blocks, ((0, 0), (0, -count % 4), (0, 0)))
    base, scale = np.ascontiguousarray(padded[..., 2:]), _halves(padded[..., :2])
    return PackedWeight("q8_g32_fp16", (len(data), 32 * count), torch.from_numpy(base), torch.from_numpy(scale))

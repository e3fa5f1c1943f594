"""The Llama model with all its layers in one native call, where the CPU has that route."""

import torch

from longlane.artifact.llama_config import LlamaConfig
from longlane.kernels.linear import PackedWeight, cpu
from longlane.kernels.native.build import library
from longlane.kernels.native.llama import Geometry, Layer, NativeLlama
from longlane.layers.batch import Batch, Caches, Output
from longlane.layers.parameters import Parameters
from longlane.models.decoder import Decoder


class NativeDecoder(Decoder):
    """A decoder whose layers run natively over float32 pages; over any other pages, and for its head, it is the plain
    one."""

    def __init__(self, plain: Decoder, layers: NativeLlama) -> None:
        super().__init__(
            plain.spec, plain.embedding, plain.blocks, plain.final_norm, plain.head, plain.rope,
            weight_bytes=plain.weight_bytes,
        )  # fmt: skip
        self._layers = layers

    @torch.inference_mode()
    def forward(self, batch: Batch, caches: Caches) -> Output:
        if caches.kv[0].codec != "float32":
            return super().forward(batch, caches)
        cos, sin = self.rope(batch.positions)
        x = self.embedding(batch.token_ids)
        hidden = self._layers.forward(x, cos, sin, batch.query_start, batch.context, batch.block_table, caches.kv)
        return Output(hidden, [] if batch.kind == "verify" else None)


def accelerated(config: LlamaConfig, params: Parameters, plain: Decoder) -> Decoder:
    """`plain` with native layers, or as it is: on another device or dtype, without a compiler, for weights that are not
    packed or a width that vectors do not divide."""
    geometry = Geometry(
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        inner=config.intermediate_size,
        epsilon=config.rms_norm_eps,
    )
    if params.device.type != "cpu" or params.dtype != torch.float32 or not geometry.supported():
        return plain
    if (lib := library()) is None or not all(isinstance(params.matrix(name), PackedWeight) for name in _names(config)):
        return plain
    layers = [_layer(params.at(f"layers/{index}")) for index in range(config.num_hidden_layers)]
    return NativeDecoder(plain, NativeLlama(lib, geometry, layers, plain.final_norm.weight))


_MATRICES = {
    "qkv": "attention/query_key_value",
    "output": "attention/output",
    "gate_up": "mlp/gate_up",
    "down": "mlp/down",
}


def _names(config: LlamaConfig) -> list[str]:
    return [f"layers/{i}/{name}" for i in range(config.num_hidden_layers) for name in _MATRICES.values()]


def _layer(params: Parameters) -> Layer:
    def matrix(name: str) -> cpu.Matrix:
        weight = params.matrix(name)
        assert isinstance(weight, PackedWeight), name
        return cpu.pack(weight)

    return Layer(
        input_norm=params.vector("input_norm"),
        post_norm=params.vector("post_attention_norm"),
        matrices={field: matrix(name) for field, name in _MATRICES.items()},
    )

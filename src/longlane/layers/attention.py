"""Attention blocks over paged keys and values."""

from dataclasses import dataclass

from torch import Tensor

from longlane.kernels import attention, kv_codec, norm_rope
from longlane.kernels.attention import Rotation
from longlane.layers.batch import Caches, Step
from longlane.layers.linear import Linear
from longlane.layers.parameters import Parameters


@dataclass(frozen=True, slots=True)
class Heads:
    """Shape of an attention layer: query heads, KV heads, and the size of each."""

    query: int
    kv: int
    dim: int


class Attention:
    """Plain rotary attention (Llama). `index` is the layer's place in `Caches.kv`."""

    def __init__(self, params: Parameters, heads: Heads, index: int) -> None:
        self.heads, self.index = heads, index
        self.input = Linear.of(params, "query_key_value")
        self.output = Linear.of(params, "output")

    def core(self, projected: Tensor, step: Step, caches: Caches) -> Tensor:
        heads = self.heads
        fused = projected.view(projected.shape[0], -1, heads.dim)
        q, k, v = fused.split_with_sizes([heads.query, heads.kv, heads.kv], dim=1)
        rotation = Rotation(step.cos, step.sin)
        return attention.mix(q, k, v, rotation, caches.kv[self.index], step.rows, scale=heads.dim**-0.5).flatten(1)


class GatedAttention:
    """Attention with zero-centred norms of query and key heads and a sigmoid output gate (Qwen3.5).

    Positions below `first_slot` are never seen: the MTP layer has no entry at 0. Source: transformers `qwen3_5`.
    """

    def __init__(self, params: Parameters, heads: Heads, index: int, eps: float, first_slot: int = 0) -> None:
        self.heads, self.index, self.eps, self.first_slot = heads, index, eps, first_slot
        self.input = Linear.of(params, *params.fused("query_key_gate_value", "query_key", "gate_value"))
        self.query_norm = params.vector("query_norm") + 1
        self.key_norm = params.vector("key_norm") + 1
        self.output = Linear.of(params, "output")

    def core(self, projected: Tensor, step: Step, caches: Caches) -> Tensor:
        q, k, gate, v = self._split(projected)
        rotation = Rotation(step.cos, step.sin, self.query_norm, self.key_norm, self.eps)
        some = {"scale": self.heads.dim**-0.5, "first_slot": self.first_slot}
        return attention.mix(q, k, v, rotation, caches.kv[self.index], step.rows, **some, gate=gate).flatten(1)

    def append(self, projected: Tensor, step: Step, caches: Caches) -> None:
        """Write the keys and values alone."""
        q, k, _, v = self._split(projected)
        _, k = norm_rope.qk_norm_rope(q, k, step.cos, step.sin, self.query_norm, self.key_norm, self.eps)
        kv_codec.append(caches.kv[self.index], k, v, step.rows)

    def _split(self, projected: Tensor) -> tuple[Tensor, ...]:
        """Query, key, gate and value [N, heads, dim]."""
        heads = self.heads
        fused = projected.view(projected.shape[0], -1, heads.dim)
        return fused.split_with_sizes([heads.query, heads.kv, heads.query, heads.kv], dim=1)

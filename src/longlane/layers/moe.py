"""A mixture of SwiGLU experts with a shared one."""

import torch
from torch import Tensor

from longlane.kernels import norm_rope
from longlane.kernels.linear import linear
from longlane.layers.linear import Linear
from longlane.layers.mlp import MLP
from longlane.layers.parameters import Parameters


class MoE:
    """The `top_k` experts with the largest softmax probability, weighted by it renormalised, plus a shared expert
    weighted by a sigmoid of its own gate.

    router_shared_gate [E + 1, H] holds the router's rows and then the shared gate's. Rows of routed_gate_up are
    expert, then gate | up; of routed_down expert, then H. Source: transformers `qwen3_5_moe`.
    """

    def __init__(self, params: Parameters, top_k: int) -> None:
        self.top_k = top_k
        self.router = Linear.of(params, "router_shared_gate")
        self.experts = self.router.parts[0].shape[0] - 1
        self.gate_up = params.split("routed_gate_up", self.experts, paired=True)
        self.down = params.split("routed_down", self.experts)
        self.shared = MLP(params, "shared_")

    def __call__(self, x: Tensor, independent: bool) -> Tensor:
        scores = self.router(x, independent)
        wide = scores if scores.dtype == torch.float64 else scores.float()
        weight, chosen = wide[:, :-1].softmax(-1).topk(self.top_k, dim=-1)
        weight = (weight / weight.sum(-1, keepdim=True)).to(x.dtype)
        out = norm_rope.sigmoid_gate(self.shared(x, independent), scores[:, -1:])
        for expert in sorted(set(chosen.flatten().tolist())):
            token, place = torch.where(chosen == expert)
            inner = linear(x[token], self.gate_up[expert], independent=independent)
            y = linear(inner, self.down[expert], independent=independent)
            out.index_add_(0, token, y * weight[token, place, None])
        return out

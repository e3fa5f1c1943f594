"""The MTP head straight from its formulas, over whole sequences in float64: no cache, no slots.

Row t is made from embed(x_{t+1}) and h_t, the final-normed hidden of the model, at position t, and predicts x_{t+2}.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu


@dataclass(frozen=True)
class MTPOracle:
    """Weights under artifact names, dense models only."""

    weights: Mapping[str, Tensor]
    heads: int
    kv_heads: int
    dim: int
    rotary: int
    theta: float
    eps: float = 1e-6

    def __call__(self, next_ids: Tensor, hidden: Tensor) -> Tensor:
        """next_ids [T]: x_1..x_T; hidden [T, H]: h_0..h_{T-1} -> hidden of the head [T, H]."""
        embedded = self.norm(self["text/token_embedding"][next_ids], "mtp/embedding_norm")
        x = torch.cat((embedded, self.norm(hidden, "mtp/hidden_norm")), -1) @ self["mtp/input_projection"].T
        x = x + self.attention(self.norm(x, "mtp/layer/input_norm"))
        y = self.norm(x, "mtp/layer/post_attention_norm") @ self["mtp/layer/mlp/gate_up"].T
        gate, up = y.chunk(2, -1)
        return self.norm(x + (silu(gate) * up) @ self["mtp/layer/mlp/down"].T, "mtp/final_norm")

    def logits(self, hidden: Tensor) -> Tensor:
        head = "text/output_head" if "text/output_head" in self.weights else "text/token_embedding"
        return hidden @ self[head].T

    def draft(self, next_ids: Tensor, hidden: Tensor, count: int) -> list[int]:
        """Greedy drafts after x_T, recursive: a draft and the hidden that made it are the next row."""
        drafts: list[int] = []
        for _ in range(count):
            made = self(next_ids, hidden)[-1:]
            drafts.append(int(self.logits(made).argmax()))
            next_ids = torch.cat((next_ids, torch.tensor(drafts[-1:])))
            hidden = torch.cat((hidden, made))
        return drafts

    def attention(self, x: Tensor) -> Tensor:
        query, key = self.heads * self.dim, self.kv_heads * self.dim
        fused = x @ self["mtp/layer/attention/query_key_gate_value"].T
        q, k, gate, v = fused.split([query, key, query, key], -1)
        q = self.rotate(self.norm(q.view(len(x), -1, self.dim), "mtp/layer/attention/query_norm"))
        k = self.rotate(self.norm(k.view(len(x), -1, self.dim), "mtp/layer/attention/key_norm"))
        k, v = (y.view(len(x), -1, self.dim).repeat_interleave(self.heads // self.kv_heads, 1) for y in (k, v))
        score = torch.einsum("thd,shd->hts", q, k) * self.dim**-0.5
        score = score.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
        y = torch.einsum("hts,shd->thd", score.softmax(-1), v).flatten(1)
        return (y * torch.sigmoid(gate)) @ self["mtp/layer/attention/output"].T

    def rotate(self, x: Tensor) -> Tensor:
        half = self.rotary // 2
        angle = torch.arange(len(x))[:, None] * self.theta ** (-torch.arange(half).double() / half)
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]
        turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * turn
        return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), -1)

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (1 + self[name])

    def __getitem__(self, name: str) -> Tensor:
        return self.weights[name].double()

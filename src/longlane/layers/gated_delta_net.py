"""The Gated DeltaNet block of Qwen3.5."""

from torch import Tensor

from longlane.kernels import gdn
from longlane.kernels.chain import Gated
from longlane.kernels.gdn import Record
from longlane.kernels.ragged import Ragged
from longlane.layers.batch import Caches, Step
from longlane.layers.linear import Linear
from longlane.layers.parameters import Parameters


class GatedDeltaNet:
    """Causal convolution, gated delta rule, norm gated by z. `index` is the layer's place in `Caches.state`.

    Source: transformers `qwen3_5`; Yang, Kautz, Hatamizadeh, "Gated Delta Networks", 2024.
    """

    def __init__(self, params: Parameters, index: int, key_channels: int, eps: float) -> None:
        self.index, self.eps = index, eps
        mixed = params.fused("query_key_value_z", "query_key", "value_z")
        self.input = Linear.of(params, *mixed, *params.fused("a_b_projection", "a_projection", "b_projection"))
        self.convolution = params.vector("convolution")
        self.a_log = params.vector("a_log")
        self.dt_bias = params.vector("dt_bias")
        self.norm = params.vector("norm")
        self.output = Linear.of(params, "output")
        channels, heads = self.convolution.shape[1], self.a_log.shape[0]
        # [q | k | v] go through the convolution; z, a and b do not.
        self.sizes = [channels, channels - key_channels, heads, heads]

    def core(self, projected: Tensor, step: Step, caches: Caches) -> Gated:
        mixed, z, a, b = projected.split_with_sizes(self.sizes, dim=1)
        state, history = caches.state[self.index], caches.conv[self.index]
        given = (mixed, a, b, self.convolution, self.a_log, self.dt_bias, state, history)
        o, record = gdn.mix(*given, step.rows, advance=step.advance)
        if record:
            step.records.append(record)
        return Gated(o, z.view(o.shape), self.norm, self.eps)

    def fold(self, record: Record, accepted: Tensor, rows: Ragged, caches: Caches) -> None:
        """Advance the state by the first `accepted` [R] columns of a verify step."""
        state, history = caches.state[self.index], caches.conv[self.index]
        gdn.fold(record, accepted, self.a_log, self.dt_bias, state, history, rows)

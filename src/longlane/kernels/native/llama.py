"""All layers of a llama-family model in one native call."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longlane.kernels.kv_codec.pages import PAGE, KVPages
from longlane.kernels.linear.cpu import CMatrix, Matrix, buffer

MATRICES = ("qkv", "output", "gate_up", "down")


class _CLayer(ctypes.Structure):
    _fields_ = (
        ("input_norm", ctypes.c_void_p),
        ("post_norm", ctypes.c_void_p),
        *((name, CMatrix) for name in MATRICES),
    )


class _CPages(ctypes.Structure):
    _fields_ = (("k", ctypes.c_void_p), ("v", ctypes.c_void_p))


class _CGeometry(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.c_int32),
        ("hidden", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("inner", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
    )


class _CStep(ctypes.Structure):
    _fields_ = (
        ("tokens", ctypes.c_int32),
        ("rows", ctypes.c_int32),
        ("table_stride", ctypes.c_int32),
        ("query_start", ctypes.POINTER(ctypes.c_int32)),
        ("context", ctypes.POINTER(ctypes.c_int32)),
        ("block_table", ctypes.c_void_p),
        ("cosine", ctypes.c_void_p),
        ("sine", ctypes.c_void_p),
        ("final_norm", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """heads and kv_heads of head_dim; inner is the MLP width."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    epsilon: float

    def supported(self) -> bool:
        """Whether the vector loops divide evenly: they have no tails."""
        return self.hidden % 32 == 0 and self.inner % 32 == 0 and self.head_dim % 64 == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Norm weights [hidden] float32, and matrices: qkv [(heads + 2 kv_heads) head_dim, hidden],
    output [hidden, heads head_dim], gate_up [2 inner, hidden], down [hidden, inner]."""

    input_norm: Tensor
    post_norm: Tensor
    matrices: Mapping[str, Matrix]


class NativeLlama:
    """Layers and final norm over packed rows, int8 activations, float32 residual, keys and values.

    Prefill, decode and verify are one code path: a token's hidden state has the same bits in whatever chunk or batch
    it is computed, on any number of threads.
    """

    def __init__(self, lib: ctypes.CDLL, geometry: Geometry, layers: Sequence[Layer], final_norm: Tensor):
        assert geometry.supported(), geometry
        for layer in layers:
            _assert_layer(layer, geometry)
        _assert_plain(final_norm, geometry.hidden)
        self._lib, self._width, self._half = lib, geometry.hidden, geometry.head_dim // 2
        self._page_shape = (geometry.kv_heads, PAGE, geometry.head_dim)
        # The C structures hold bare pointers; the tensors behind them live as long as this object.
        layers = _in_one_buffer(layers)
        self._owners = (layers, final_norm)
        self._geometry = _CGeometry(
            len(layers),
            geometry.hidden,
            geometry.heads,
            geometry.kv_heads,
            geometry.head_dim,
            geometry.inner,
            geometry.epsilon,
        )
        self._layers = (_CLayer * len(layers))(*(_c_layer(layer) for layer in layers))
        self._final_norm = final_norm

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        query_start: Sequence[int],
        context: Sequence[int],
        block_table: Tensor,
        kv: Sequence[KVPages],
    ) -> Tensor:
        """Embeddings x [N, hidden] -> hidden states [N, hidden] after the final norm; x holds the residual after.

        cos, sin [N, head_dim / 2] float32; block_table [R, P] int32. Writes keys and values of the N tokens into the
        pages, then attends to them and to the `context` tokens before them.
        """
        n, rows = x.shape[0], len(context)
        _assert_plain(x, n, self._width)
        _assert_plain(cos, n, self._half)
        _assert_plain(sin, n, self._half)
        _assert_rows(query_start, context, block_table, n)
        assert len(kv) == len(self._layers), len(kv)
        pages = (_CPages * len(kv))(*(self._c_pages(layer) for layer in kv))
        hidden = torch.empty_like(x)
        step = _CStep(
            n,
            rows,
            block_table.shape[1],
            (ctypes.c_int32 * (rows + 1))(*query_start),
            (ctypes.c_int32 * rows)(*context),
            block_table.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            self._final_norm.data_ptr(),
            x.data_ptr(),
            hidden.data_ptr(),
        )
        self._lib.longlane_llama(
            ctypes.byref(self._geometry), self._layers, pages, ctypes.byref(step), torch.get_num_threads()
        )
        return hidden

    def _c_pages(self, kv: KVPages) -> _CPages:
        for plane in (kv.k, kv.v):
            _assert_plain(plane, kv.pages, *self._page_shape)
        return _CPages(kv.k.data_ptr(), kv.v.data_ptr())


def _assert_plain(tensor: Tensor, *shape: int) -> None:
    assert tensor.shape == shape, (tensor.shape, shape)
    assert tensor.dtype == torch.float32, tensor.dtype
    assert tensor.is_contiguous()


def _assert_rows(query_start: Sequence[int], context: Sequence[int], block_table: Tensor, n: int) -> None:
    rows, pages = block_table.shape
    assert block_table.dtype == torch.int32, block_table.dtype
    assert block_table.is_contiguous()
    assert len(query_start) == rows + 1, (query_start, rows)
    assert query_start[-1] == n, (query_start, n)
    for start, stop, cached in zip(query_start, query_start[1:], context, strict=False):
        assert start < stop, query_start
        assert cached + stop - start <= PAGE * pages, (cached, stop - start, pages)


def _assert_layer(layer: Layer, g: Geometry) -> None:
    query = g.heads * g.head_dim
    shapes = {
        "qkv": (query + 2 * g.kv_heads * g.head_dim, g.hidden),
        "output": (g.hidden, query),
        "gate_up": (2 * g.inner, g.hidden),
        "down": (g.hidden, g.inner),
    }
    assert {name: matrix.shape for name, matrix in layer.matrices.items()} == shapes
    _assert_plain(layer.input_norm, g.hidden)
    _assert_plain(layer.post_norm, g.hidden)


def _in_one_buffer(layers: Sequence[Layer]) -> list[Layer]:
    """The matrices behind each other in the order they are read."""
    memory = buffer(sum(m.data.numel() for layer in layers for m in layer.matrices.values()))
    placed, offset = [], 0
    for layer in layers:
        moved = {}
        for name in MATRICES:
            matrix = layer.matrices[name]
            panels = _interleave(matrix.data) if name == "gate_up" else matrix.data
            moved[name] = replace(
                matrix, data=memory[offset : offset + panels.numel()].view(panels.shape).copy_(panels)
            )
            offset += panels.numel()
        placed.append(replace(layer, matrices=moved))
    return placed


def _interleave(panels: Tensor) -> Tensor:
    """Panels in the order of `Llama::gated`: four of gate, then the four of up that meet them."""
    gate, up = panels.reshape(2, -1, 4, *panels.shape[1:])
    return torch.stack((gate, up), dim=1).reshape(panels.shape)


def _c_layer(layer: Layer) -> _CLayer:
    matrices = [layer.matrices[name].ctype() for name in MATRICES]
    return _CLayer(layer.input_norm.data_ptr(), layer.post_norm.data_ptr(), *matrices)

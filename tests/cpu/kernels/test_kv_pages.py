"""Coded pages: what one row appended over several steps is what it gathers, whatever the neighbours do."""

import pytest
import torch

from longlane.kernels import attention, kv_codec
from longlane.kernels.attention import naive
from longlane.kernels.kv_codec import codes
from longlane.kernels.ragged import Ragged, ragged
from longlane.kernels.sizes import CODE_BITS

HEADS, DIM = 2, 64
TABLES = torch.tensor([[3, 7, 1], [5, 2, 0]], dtype=torch.int32)


def rows(lengths: tuple[int, int], context: tuple[int, int]) -> Ragged:
    return ragged((0, lengths[0], sum(lengths)), context, TABLES, torch.tensor([1, 2]))


@pytest.mark.parametrize("codec", sorted(CODE_BITS))
@pytest.mark.parametrize("first", [1, 63, 64, 65])
def test_gathered_is_what_was_appended(codec: str, first: int) -> None:
    gen = torch.Generator().manual_seed(first)
    pages = kv_codec.allocate(codec, 8, HEADS, DIM)
    for plane in pages.planes():
        plane.fill_(255 if plane.dtype == torch.uint8 else float("nan"))
    lengths = [(first, 2), (66, 3)]
    whole: list[list[torch.Tensor]] = [[], []]
    context = (0, 0)
    for step in lengths:
        k = torch.randn(sum(step), HEADS, DIM, generator=gen)
        kv_codec.append(pages, k, -k, rows(step, context))
        whole[0].append(k[: step[0]])
        whole[1].append(k[step[0] :])
        context = (context[0] + step[0], context[1] + step[1])
    for row, length in enumerate(context):
        want = torch.cat(whole[row]).transpose(0, 1)
        k, v = kv_codec.gather(pages, TABLES[row], length, torch.float32)
        expected = codes.decode_k(codec, *codes.encode_k(codec, want), torch.float32)
        expected_v = codes.decode_v(codec, *codes.encode_v(codec, -want), torch.float32)
        rotated_k, rotated_v = codec in codes.ROTATED_K, codec in codes.ROTATED_V
        torch.testing.assert_close(k, codes.rotate(codec, expected) if rotated_k else expected)
        torch.testing.assert_close(v, codes.rotate(codec, expected_v) if rotated_v else expected_v)


@pytest.mark.parametrize("codec", sorted(CODE_BITS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_over_coded_pages_is_the_oracles(codec: str, dtype: torch.dtype) -> None:
    gen = torch.Generator().manual_seed(0)
    pages = kv_codec.allocate(codec, 8, HEADS, DIM)
    k, v = (torch.randn(70, HEADS, DIM, generator=gen, dtype=dtype) for _ in range(2))
    step = rows((65, 5), (0, 0))
    kv_codec.append(pages, k, v, step)
    q = torch.randn(70, 2 * HEADS, DIM, generator=gen, dtype=dtype)
    got = attention.attend(q, pages, step, scale=0.125)
    torch.testing.assert_close(got, naive.attend(q, pages, step, scale=0.125), rtol=1e-5, atol=1e-5)

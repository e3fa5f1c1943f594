"""Rotary tables against transformers, for text and for three-axis positions."""

import pytest
import torch
from transformers import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding

from longlane.layers.rope import Rope

SECTIONS = (11, 11, 10)


@pytest.fixture(scope="module")
def reference():
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": list(SECTIONS)}
    return Qwen3_5TextRotaryEmbedding(Qwen3_5TextConfig(head_dim=256, rope_parameters=rope))


def tables(reference, positions):
    cos, sin = reference(torch.zeros(1), positions.view(-1, 1, positions.shape[-1]))
    return cos[0, :, :32], sin[0, :, :32]


@pytest.mark.parametrize("axes", [1, 3])
def test_tables_equal_transformers(reference, axes):
    positions = torch.randint(0, 4000, (axes, 65), generator=torch.Generator().manual_seed(0))
    rope = Rope(64, 1e7, torch.float32, torch.device("cpu"), SECTIONS)
    for ours, theirs in zip(rope(positions if axes == 3 else positions[0]), tables(reference, positions), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-4)


def test_equal_axes_are_text():
    positions = torch.arange(130)
    rope = Rope(64, 1e7, torch.float64, torch.device("cpu"), SECTIONS)
    for text, three in zip(rope(positions), rope(positions.expand(3, -1)), strict=True):
        assert torch.equal(text, three)


def test_far_positions_keep_the_differences_of_near_ones():
    rope = Rope(64, 1e7, torch.float32, torch.device("cpu"), SECTIONS)
    (near_c, near_s), (far_c, far_s) = rope(torch.tensor([3, 8])), rope(torch.tensor([262135, 262140]))
    for c, s in ((near_c, near_s), (far_c, far_s)):
        torch.testing.assert_close(c[0] * c[1] + s[0] * s[1], rope(torch.tensor([5]))[0][0], rtol=0, atol=1e-6)

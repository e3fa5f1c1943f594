"""Models from every tensor of an artifact's inventory in its stored format, scaled down: both heads, MTP, experts."""

import pytest
import torch

from longlane.artifact.formats import decode
from longlane.models.registry import build
from support.stored_model import DENSE, MOE, run, stored


@pytest.mark.parametrize("mode", ["groupwise-int", "int8"])
@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_stored_formats_compute_what_they_decode_to(config, mode):
    weights = stored(config, mode)
    decoded = {name: w if isinstance(w, torch.Tensor) else decode(w) for name, w in weights.items()}
    reference = run(build(config, decoded, dtype=torch.float64), torch.float64)
    exact = run(build(config, weights, dtype=torch.float64), torch.float64)
    torch.testing.assert_close(exact, reference, rtol=1e-9, atol=1e-10)
    # The fast routes round activations to eight bits, which now and then chooses another expert.
    allowed = 0.4 if config is MOE else 0.1
    for fast, full in zip(run(build(config, weights, packed=True), torch.float32), exact, strict=True):
        assert (fast - full).norm() < allowed * full.norm()

"""The Triton route of `append`, interpreted, against the CPU's codes."""

import pytest
import torch

from longlane.kernels.sizes import CODE_BITS
from support import route_checks
from support.interpreter import interpreted


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("codec", sorted(CODE_BITS))
def test_codes(codec: str, size: int) -> None:
    torch.manual_seed(size)
    route_checks.append_coded(interpreted("kv_codec"), codec, (3, 2), (62, 0), 2, size, "cpu", torch.float32)

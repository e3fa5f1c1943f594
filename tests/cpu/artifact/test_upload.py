"""Pieces through two buffers: the bytes arrive, whatever their number and whose they are."""

import pytest
import torch

from longlane.artifact.checkpoint import load_weights
from longlane.artifact.convert import Options, convert
from longlane.artifact.upload import Upload, placing
from longlane.kernels.linear import PackedWeight
from support.random_checkpoint import DENSE, write_checkpoint

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.bfloat16, torch.float32, torch.int32], ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (63,), (64,), (65,), (7, 130)], ids=str)
def test_every_byte_arrives(shape, dtype):
    upload = Upload(CPU, piece=64)
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8)
    tensor = bits.view(dtype).squeeze(-1)
    placed = upload(tensor)
    assert (placed.shape, placed.dtype) == (tensor.shape, dtype)
    assert placed.data_ptr() != tensor.data_ptr() or not tensor.numel()
    assert torch.equal(placed.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_a_tensor_that_is_not_contiguous_arrives_in_its_order():
    tensor = torch.arange(600).view(20, 30).T
    assert torch.equal(Upload(CPU, piece=100)(tensor), tensor)


def test_an_artifact_is_the_same_through_buffers_as_from_the_file(tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "hf", DENSE)
    convert(tmp_path / "hf", tmp_path / "a.ninfer", Options(), quiet=True)
    told: list[tuple[int, int]] = []
    _, wanted = load_weights(tmp_path / "a.ninfer", told=lambda done, total: told.append((done, total)))
    assert told[-1] == (told[-1][1],) * 2
    monkeypatch.setattr("longlane.artifact.checkpoint.placing", lambda device: Upload(CPU, piece=1000))
    _, found = load_weights(tmp_path / "a.ninfer")
    assert list(found) == list(wanted)
    for name, weight in wanted.items():
        pairs = [(weight, found[name])]
        if isinstance(weight, PackedWeight):
            pairs = [(getattr(weight, part), getattr(found[name], part)) for part in ("base", "scale")]
        for one, other in pairs:
            assert torch.equal(one, other), name
            assert one.data_ptr() != other.data_ptr(), name


def test_on_the_cpu_weights_stay_views_of_the_file():
    tensor = torch.zeros(3)
    assert placing("cpu")(tensor) is tensor

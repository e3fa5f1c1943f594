"""Hugging Face checkpoints: a configuration, side files, and tensors that are read a few rows at a time."""

import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, BinaryIO, NoReturn

import msgspec
import numpy as np
import torch
from torch import Tensor

from longlane.artifact.framing import describe_stranger
from longlane.artifact.side_files import check_file, json_object
from longlane.artifact.text_config import read_json
from longlane.errors import CheckpointError, counted

INDEX = "model.safetensors.index.json"
SIDE_FILES = (".json", ".jinja")
# Of the header of a file, as the format has it.
MOST_HEADER_BYTES = 100_000_000
Count = Annotated[int, msgspec.Meta(ge=0)]
SOURCE_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    dtype: str
    shape: list[Count]
    data_offsets: tuple[Count, Count]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """`offset` is where the values start in the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        return prod(self.shape[1:]) * SOURCE_DTYPES[self.dtype].itemsize


class Checkpoint:
    """A directory of safetensors files, lazily read.

    `config` is `config.json` as it stands; `tensors` maps every name to its file, dtype and shape. Rows are read when
    asked for and nothing stays mapped, so that a pass over a checkpoint never holds more than the rows in use.
    Raises CheckpointError naming the file and the cure.
    """

    def __init__(self, path: Path):
        self.path = path
        self.config = read_json(path / "config.json")
        self.tensors = _open_tensors(path)

    @property
    def side_files(self) -> list[Path]:
        """The configuration, the index, and what belongs to the tokenizer."""
        return sorted(file for file in self.path.iterdir() if file.suffix in SIDE_FILES and file.is_file())

    @property
    def weight_files(self) -> list[Path]:
        return sorted({info.file for info in self.tensors.values()})

    def rows(self, name: str, begin: int, end: int | None) -> Tensor:
        """Rows [begin, end) along the first axis, one or more, in the source's dtype; `end` None is the last."""
        info = self.tensors[name]
        begin, end, _ = slice(begin, end).indices(info.shape[0])
        buffer = bytearray((end - begin) * info.row_bytes)
        with info.file.open("rb") as file:
            file.seek(info.offset + begin * info.row_bytes)
            if file.readinto(buffer) != len(buffer):
                raise CheckpointError(f"{info.file}: tensor {name} ends early; the file was cut, fetch it again")
        return torch.frombuffer(buffer, dtype=SOURCE_DTYPES[info.dtype]).view(end - begin, *info.shape[1:])

    def gather(self, name: str, rows: Tensor) -> Tensor:
        """The given rows along the first axis, in the source's dtype."""
        info = self.tensors[name]
        mapped = np.memmap(info.file, np.uint8, "r", info.offset, (info.shape[0], info.row_bytes))
        return torch.from_numpy(mapped[rows.numpy()]).view(SOURCE_DTYPES[info.dtype]).view(-1, *info.shape[1:])

    def require(self, name: str) -> TensorInfo:
        if (info := self.tensors.get(name)) is None:
            raise CheckpointError(
                f"{self.path}: tensor {name} is missing from its safetensors files; the checkpoint is incomplete, "
                "fetch it again or save it again with every weight"
            )
        if info.dtype not in SOURCE_DTYPES:
            raise CheckpointError(
                f"{info.file}: tensor {name} has dtype {info.dtype}, a quantised checkpoint; "
                f"start from the original weights in one of {', '.join(SOURCE_DTYPES)}"
            )
        return info


def _open_tensors(path: Path) -> dict[str, TensorInfo]:
    if not os.path.lexists(path / INDEX):
        return _without_index(path)
    listed = read_json(path / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise CheckpointError(f"{path / INDEX} has no weight_map of tensor names to files; fetch the file again")
    tensors: dict[str, TensorInfo] = {}
    for name in sorted(set(listed.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{path / INDEX} names {name}, which is outside the directory; correct the index")
        if not os.path.exists(path / name):  # unlike `Path.exists` never an error, whatever the name
            count = sum(file == name for file in listed.values())
            raise CheckpointError(
                f"{path / name} is missing: the index puts {counted(count, 'tensor')} there; fetch that shard again"
            )
        found = _headers(path / name)
        wanted = {tensor for tensor, file in listed.items() if file == name}
        if differing := sorted(wanted ^ found.keys()):
            where = "only in the index" if differing[0] in wanted else "only in the file"
            many = counted(len(differing), "tensor")
            raise CheckpointError(
                f"{path / name} and {INDEX} disagree about {many} ({differing[0]} is {where}); "
                "fetch both again, or delete the index if the files are complete"
            )
        tensors |= found
    return tensors


def _without_index(path: Path) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for file in sorted(path.glob("*.safetensors")):
        found = _headers(file)
        if twice := sorted(tensors.keys() & found.keys()):
            other = tensors[twice[0]].file.name
            raise CheckpointError(f"{file} and {other} both hold {twice[0]}; keep one of the two, or add an index")
        tensors |= found
    if not tensors:
        raise CheckpointError(f"{path} holds no *.safetensors file; save the checkpoint in that format")
    return tensors


def _headers(file: Path) -> dict[str, TensorInfo]:
    """What a safetensors file holds: its tensors lie one after the other, from the header to the end of the file."""
    check_file(file)
    try:
        with file.open("rb") as opened:
            start, stored = _header(file, opened)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}); check the path and its permissions") from None
    end, size = 0, file.stat().st_size - start
    for name, entry in sorted(stored.items(), key=lambda item: item[1].data_offsets):
        first, last = entry.data_offsets
        known = SOURCE_DTYPES.get(entry.dtype)
        if first != end or last < first or (known and last - first != prod(entry.shape) * known.itemsize):
            _damaged(file, f"tensor {name} is said to lie at bytes {first:,} to {last:,}, which is not its place")
        end = last
        if end > size:
            _damaged(file, f"tensor {name} ends {counted(end - size, 'byte')} after the file")
    if end < size:
        _damaged(file, f"no tensor is in {counted(size - end, 'byte')} at its end")
    return {
        name: TensorInfo(file, entry.dtype, tuple(entry.shape), start + entry.data_offsets[0])
        for name, entry in stored.items()
    }


def _header(file: Path, opened: BinaryIO) -> tuple[int, dict[str, _Stored]]:
    """Where the data begins, and what is said of it."""
    size, head = file.stat().st_size, opened.read(64)
    if stranger := describe_stranger(head):
        raise CheckpointError(f"{file} is {stranger[0]}; {stranger[1]}")
    length = int.from_bytes(head[:8], "little")
    if len(head) < 8 or length > min(size - 8, MOST_HEADER_BYTES):
        _damaged(file, f"its header of {counted(length, 'byte')} does not fit into a file of {size}")
    opened.seek(8)
    header = json_object(opened.read(length), f"{file}: its header")
    header.pop("__metadata__", None)
    try:
        return 8 + length, msgspec.convert(header, dict[str, _Stored])
    except msgspec.ValidationError as error:
        _damaged(file, f"its header lists no tensors ({error})")


def _damaged(file: Path, problem: str) -> NoReturn:
    raise CheckpointError(f"{file} is not a whole safetensors file: {problem}; fetch that file again")

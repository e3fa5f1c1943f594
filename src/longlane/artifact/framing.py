"""The first bytes of artifact files: magic numbers, headers, and what a file that is no artifact looks like."""

import struct
from typing import NamedTuple

MAGIC = b"NINFER\0"
PART_MAGIC = b"NINPRT\0\x03"
VERSIONS = (1, 2, 3)
PAGE = 4096
HEADER_BYTES = {1: 16, 2: 16, 3: 32}
# A directory of 1,190 objects takes 300 KB. The bound keeps a damaged length from being read as one.
MAX_DIRECTORY_BYTES = 256 << 20


class Header(NamedTuple):
    """Version, length of the directory, and the id that the files of a version 3 set share."""

    version: int
    json_bytes: int
    artifact_id: bytes


def pack_header(version: int, json_bytes: int, artifact_id: bytes) -> bytes:
    return MAGIC + bytes([version]) + struct.pack("<Q", json_bytes) + (artifact_id if version == 3 else b"")


def pack_part_header(index: int, artifact_id: bytes) -> bytes:
    return PART_MAGIC + struct.pack("<Q", index) + artifact_id


def unpack_header(head: bytes) -> Header:
    """`head`: at least the header's bytes, magic already recognised."""
    return Header(head[7], struct.unpack_from("<Q", head, 8)[0], head[16:32])


def describe(head: bytes) -> tuple[str, str] | None:
    """What a file that starts with `head` is, and what to do with it; None for a container this build reads."""
    if head.startswith(MAGIC) and len(head) > 7:
        if head[7] in VERSIONS:
            return None
        return f"artifact of container version {head[7]}; this build reads 1, 2 and 3", "upgrade Longlane"
    if head.startswith(b"NINPRT\0"):
        return "a continuation part of a split artifact", "open the entry file, the name without '.part-NNNN'"
    if known := describe_stranger(head):
        return known
    if len(head) > 8 and head[8:9] == b"{":
        return "a safetensors file", "pass the directory it is in, with its config.json"
    return (
        "no artifact (wrong magic number)",
        "name an artifact (it starts with NINFER), a Hugging Face directory or a GGUF file",
    )


def describe_stranger(head: bytes) -> tuple[str, str] | None:
    """As `describe`, of files that hold no weights this build reads."""
    return next(((kind, fix) for magic, kind, fix in _KNOWN if head.startswith(magic)), None)


_KNOWN = (
    (b"GGUF", "a GGUF file", "convert it first with 'longlane convert'"),
    (b"PK\x03\x04", "a zip or PyTorch pickle file", "pass a directory of safetensors to 'longlane convert'"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself", "fetch it with 'git lfs pull'"),
    (b"<", "a web page, not a model", "the download failed: fetch it again"),
    (b"\x1f\x8b", "a gzip file", "unpack it first"),
)

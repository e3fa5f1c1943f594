"""Artifact files put together by hand from the container description, without the writer under test."""

import json
import struct
from pathlib import Path
from typing import Any

PAGE = 4096
RESOURCE = b'{"model": "tokenizer"}'
MATRIX = bytes(range(64)) * 4 + struct.pack("<4e", 1.0, 0.5, 0.25, 0.0)
VECTOR = struct.pack("<3f", 1.0, -2.0, 3.5)
UUID = bytes(range(16))


def align(value: int, step: int) -> int:
    return -(-value // step) * step


def payload() -> bytes:
    """A resource at 0, a q4 [2, 100] matrix at 256, an fp32 vector of 3 at 768."""
    data = bytearray(768 + len(VECTOR))
    data[: len(RESOURCE)] = RESOURCE
    data[256 : 256 + len(MATRIX)] = MATRIX
    data[768:] = VECTOR
    return bytes(data)


def objects_v2() -> list[dict[str, Any]]:
    return [
        {
            "name": "frontend/tokenizer.json",
            "kind": "resource",
            "encoding": "raw-bytes-v1",
            "offset": 0,
            "bytes": len(RESOURCE),
        },
        {
            "name": "text/matrix",
            "kind": "tensor",
            "shape": [2, 100],
            "format": "Q4G64_F16S",
            "layout": "row-split-k128-v1",
            "offset": 256,
            "bytes": len(MATRIX),
        },
        {
            "name": "text/vector",
            "kind": "tensor",
            "shape": [3],
            "format": "FP32",
            "layout": "contiguous-le-v1",
            "offset": 768,
            "bytes": len(VECTOR),
        },
    ]


def directory_v2() -> dict[str, Any]:
    return {"identity": {"model_id": "a-model", "weights_id": "groupwise-int"}, "objects": objects_v2()}


def directory_v1() -> dict[str, Any]:
    return {"model_id": "a-model", "objects": objects_v2()}


def directory_v3(payload_bytes: int = 780) -> dict[str, Any]:
    resource, matrix, vector = objects_v2()
    objects = [
        {"id": "r.tok", **resource, "encoding": "raw_bytes_v1"},
        {"id": "w.m", **matrix, "format": "q4_g64_fp16", "layout": "row_split_k128_v1"},
        {"id": "w.v", **vector, "format": "fp32", "layout": "contiguous_le_v1"},
    ]
    for entry in objects:
        del entry["name"]
    return {
        "components": {
            "text": {"config": {"architectures": ["Other"]}, "resources": {"tokenizer.json": "r.tok"}},
            "mtp": {"config": {}, "target": "text"},
        },
        "objects": objects,
        "bindings": {
            "text/matrix": {"object": "w.m"},
            "text/second_row": {"parts": [{"object": "w.m", "range": [100, 200]}]},
            "text/vector": {"object": "w.v"},
        },
        "uses": [
            {
                "parameter": "text/matrix",
                "input": "text/in",
                "activation_policy": "AllowA4",
                "auxiliaries": {"activation_input_divisor": {"object": "w.v"}},
            }
        ],
        "files": [{"path": None, "payload_bytes": payload_bytes}],
        "metadata": {"name": "by hand"},
        "provenance": {"made": "in a test"},
    }


def build(version: int, directory: Any, data: bytes | None = None) -> bytes:
    """One file: header, JSON, zeros to a page, payload."""
    text = directory if isinstance(directory, bytes) else json.dumps(directory).encode()
    head = b"NINFER\0" + bytes([version]) + struct.pack("<Q", len(text)) + (UUID if version == 3 else b"")
    head += text
    return head.ljust(align(len(head), PAGE), b"\0") + (payload() if data is None else data)


def valid(version: int) -> bytes:
    return build(version, {1: directory_v1, 2: directory_v2, 3: directory_v3}[version]())


def write_split(folder: Path, first: int, name: str = "m.ninfer") -> Path:
    """A version 3 set of two files, cut after `first` payload bytes (a multiple of 4096 padded into the payload)."""
    data = payload().ljust(first, b"\0") + b"tail"
    directory = directory_v3(first)
    directory["files"].append({"path": f"{name}.part-0001", "payload_bytes": 4})
    directory["objects"].append(
        {"id": "r.tail", "kind": "resource", "encoding": "raw_bytes_v1", "offset": first - 2, "bytes": 6}
    )
    (folder / name).write_bytes(build(3, directory, data[:first]))
    part = b"NINPRT\0\x03" + struct.pack("<Q", 1) + UUID
    (folder / f"{name}.part-0001").write_bytes(part.ljust(PAGE, b"\0") + data[first:])
    return folder / name

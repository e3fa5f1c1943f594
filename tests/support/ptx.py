"""Just enough PTX to run straight-line code of 32-bit moves, shifts, `lop3` and `fma.rn.bf16x2` on arrays."""

import re

import numpy as np
import torch

_STATEMENT = re.compile(r"([\w.]+)\s+(.*)")


def run(program: str, outputs: int, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """Outputs `$0`.. of an inline-assembly block, inputs from `$outputs` on; everything uint32."""
    values = {f"${outputs + i}": word.astype(np.uint32) for i, word in enumerate(inputs)}

    def read(name: str) -> np.ndarray:
        return np.uint32(int(name, 0)) if name[0].isdigit() else values[name]

    for statement in program.strip().strip("{}").split(";"):
        match = _STATEMENT.match(statement.strip())
        if not match or match[1] == ".reg":
            continue
        opcode, (target, *operands) = match[1], match[2].split(", ")
        values[target] = _execute(opcode, [read(name) for name in operands])
    return [values[f"${i}"] for i in range(outputs)]


def halves(word: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Low and high bfloat16 of uint32 words, as float32."""
    return (word << np.uint32(16)).view(np.float32), (word & np.uint32(0xFFFF0000)).view(np.float32)


def _execute(opcode: str, operands: list[np.ndarray]) -> np.ndarray:
    match opcode:
        case "mov.b32":
            return operands[0]
        case "shr.u32":
            return operands[0] >> operands[1]
        case "shl.b32":
            return operands[0] << operands[1]
        case "lop3.b32":
            return _lop3(*operands)
        case "fma.rn.bf16x2":
            low, high = (_round(a * b + c) for a, b, c in zip(*map(halves, operands), strict=True))
            return high << np.uint32(16) | low
    raise AssertionError(f"no such opcode here: {opcode}")


def _lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Bit k of `table` is the result for the input bits (a, b, c) = binary k."""
    out = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
    for k in range(8):
        if int(table) >> k & 1:
            out |= (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
    return out


def _round(value: np.ndarray) -> np.ndarray:
    tensor = torch.from_numpy(np.atleast_1d(value).astype(np.float32)).to(torch.bfloat16)
    return tensor.view(torch.int16).numpy().astype(np.uint16).astype(np.uint32).reshape(np.shape(value))

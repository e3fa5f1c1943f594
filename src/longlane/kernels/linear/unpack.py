"""PTX that turns packed words into pairs of bfloat16 codes, exact and without a table.

A bfloat16 has seven fraction bits, so `0x4300 | u` is 128 + u for u < 128: one `lop3` extracts a pair, one `fma` takes
128 and the code's offset away. int8 has eight bits: its low seven make 128 + (c & 127), its sign 128 or 256, and the
difference is c. Inputs are a lane's words of one block, outputs its 16 pairs in the order that `inline_asm_elementwise`
needs with pack=4: output j = 4 kt + 2 kh + r8 in registers 2 j (b = 0) and 2 j + 1 (b = 1).
"""

_ONE, _MINUS_ONE, _MAGIC = "0x3f803f80", "0xbf80bf80", "0x43004300"
# bfloat16 pairs of -(128 + offset).
_BIAS = {"q4": "0xc308c308", "q5": "0xc310c310", "q6": "0xc320c320"}
_AND_OR = "0xea"  # (a & b) | c


def _output(pair: int) -> str:
    """Register of pair (b, kt, kh, r8)."""
    b, j = divmod(pair, 8)
    return f"${2 * j + b}"


def _program(lines: list[str], registers: str) -> str:
    return "{\n.reg .b32 " + registers + ";\n" + "\n".join(lines) + "\n}"


def _extract(register: str, word: str, shift: int, mask: str) -> list[str]:
    """register = 128 + field."""
    if shift == 0:
        return [f"lop3.b32 {register}, {word}, {mask}, {_MAGIC}, {_AND_OR};"]
    return [f"shr.u32 t, {word}, {shift};", f"lop3.b32 {register}, t, {mask}, {_MAGIC}, {_AND_OR};"]


def _merge(register: str, word: str, shift: int, mask: str) -> list[str]:
    """register |= (word >> shift) & mask, shift negative to the left."""
    if shift == 0:
        source, lines = word, []
    else:
        source, lines = "t", [f"{'shr.u32' if shift > 0 else 'shl.b32'} t, {word}, {abs(shift)};"]
    return [*lines, f"lop3.b32 {register}, {source}, {mask}, {register}, {_AND_OR};"]


def _finish(kind: str) -> list[str]:
    return [f"fma.rn.bf16x2 ${r}, ${r}, o, m;" for r in range(16)]


def _constants(kind: str) -> list[str]:
    return [f"mov.b32 o, {_ONE};", f"mov.b32 m, {_BIAS[kind]};"]


def _q4() -> str:
    lines = _constants("q4")
    for word in range(4):
        for j in range(4):
            lines += _extract(_output(4 * word + j), f"${16 + word}", 4 * j, "0x000f000f")
    return _program(lines + _finish("q4"), "t, o, m")


def _q5() -> str:
    lines = _constants("q5")
    for word in range(4):
        for j in range(3):
            lines += _extract(_output(4 * word + j), f"${16 + word}", 5 * j, "0x001f001f")
    for word in range(3):
        lines += _extract(_output(4 * word + 3), "$20", 5 * word, "0x001f001f")
    last = _output(15)
    lines += _extract(last, "$16", 15, "0x00010001")
    for bit in range(1, 5):
        lines += _merge(last, f"${16 + bit}", 15 - bit, f"0x{1 << bit:04x}{1 << bit:04x}")
    return _program(lines + _finish("q5"), "t, o, m")


def _q6() -> str:
    lines = _constants("q6")
    for word in range(4):
        more = f"${20 + word // 2}"
        lines += _extract(_output(4 * word), f"${16 + word}", 0, "0x003f003f")
        lines += _extract(_output(4 * word + 1), f"${16 + word}", 6, "0x003f003f")
        lines += _extract(_output(4 * word + 2), more, 6 * (word % 2), "0x003f003f")
        lines += _extract(_output(4 * word + 3), f"${16 + word}", 12, "0x000f000f")
        lines += _merge(_output(4 * word + 3), more, 8 + 2 * (word % 2), "0x00300030")
    return _program(lines + _finish("q6"), "t, o, m")


def _q8() -> str:
    lines = [f"mov.b32 m, {_MINUS_ONE};"]
    for plane in range(2):
        for word in range(4):
            source = f"${16 + 4 * plane + word}"
            for j in range(2):
                pair = _output(4 * word + 2 * plane + j)
                lines += _extract(pair, source, 8 * j, "0x007f007f")
                lines += [f"lop3.b32 s, {'t' if j else source}, 0x00800080, {_MAGIC}, {_AND_OR};"]
                lines += [f"fma.rn.bf16x2 {pair}, s, m, {pair};"]
    return _program(lines, "t, s, m")


ASSEMBLY = {"q4": _q4(), "q5": _q5(), "q6": _q6(), "q8": _q8()}
# Words that go in: four; five or six with the extra ones; two planes of four.
INPUTS = {"q4": 4, "q5": 5, "q6": 6, "q8": 8}
CONSTRAINTS = {kind: ",".join(["=&r"] * 16 + ["r"] * count) for kind, count in INPUTS.items()}

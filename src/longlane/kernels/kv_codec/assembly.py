"""Assembly that turns a register of two 16-bit words into registers of two bfloat16, one a plane: the cards pay for
each instruction of a decode step that reads 256K tokens, and the compiler would work on one element at a time.

Small integers become bfloat16 without a conversion: 0x4300 | u is 128 + u, and lop3 with 0x6a is (a & b) ^ c, with 0xea
(a & b) | c. Only instructions that every card from sm_80 has.
"""

# Four codes of 4 bits: with its top bit flipped one is 0 .. 15, the code plus 8.
NIBBLES = """{
.reg .b32 x, one, base;
mov.b32 one, 0x3F803F80;
mov.b32 base, 0xC308C308;
lop3.b32 $0, $4, 0x000F000F, 0x43084308, 0x6a;
fma.rn.bf16x2 $0, $0, one, base;
shr.u32 x, $4, 4;
lop3.b32 $1, x, 0x000F000F, 0x43084308, 0x6a;
fma.rn.bf16x2 $1, $1, one, base;
shr.u32 x, $4, 8;
lop3.b32 $2, x, 0x000F000F, 0x43084308, 0x6a;
fma.rn.bf16x2 $2, $2, one, base;
shr.u32 x, $4, 12;
lop3.b32 $3, x, 0x000F000F, 0x43084308, 0x6a;
fma.rn.bf16x2 $3, $3, one, base;
}"""

# Two codes of 8 bits: 128 + the low seven bits, less 128, or 256 where the sign is set.
BYTES = """{
.reg .b32 x, one, base;
mov.b32 one, 0x3F803F80;
lop3.b32 $0, $2, 0x007F007F, 0x43004300, 0x6a;
lop3.b32 base, $2, 0x00800080, 0xC300C300, 0x6a;
fma.rn.bf16x2 $0, $0, one, base;
shr.u32 x, $2, 8;
lop3.b32 $1, x, 0x007F007F, 0x43004300, 0x6a;
lop3.b32 base, x, 0x00800080, 0xC300C300, 0x6a;
fma.rn.bf16x2 $1, $1, one, base;
}"""

# Two E4M3 numbers: exponent and mantissa under bfloat16's exponent, whose bias is 120 more. 0x7B80 is 2**120.
E4M3 = """{
.reg .b32 x, y, factor, zero;
mov.b32 factor, 0x7B807B80;
mov.b32 zero, 0x80008000;
shl.b32 x, $2, 4;
lop3.b32 x, x, 0x07F007F0, 0x00000000, 0xea;
shl.b32 y, $2, 8;
lop3.b32 x, y, 0x80008000, x, 0xea;
fma.rn.bf16x2 $0, x, factor, zero;
shr.u32 x, $2, 4;
lop3.b32 x, x, 0x07F007F0, 0x00000000, 0xea;
lop3.b32 x, $2, 0x80008000, x, 0xea;
fma.rn.bf16x2 $1, x, factor, zero;
}"""

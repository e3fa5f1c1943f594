"""Every Triton and Gluon kernel compiles for the cards we promise and stays within their shared memory. In a process
of its own, since the interpreter that other tests choose is chosen for good."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
from longlane.kernels.advance import triton as advance
from longlane.kernels.attention import Rotation, long, prepare, short, triton as attention
from longlane.kernels.gdn import Record
from longlane.kernels.gdn import chunks, convolution, short as short_gdn, triton as gdn
from longlane.kernels.kv_codec import decode, triton as kv_codec
from longlane.kernels.sizes import CODE_BITS
from longlane.kernels.kv_codec.pages import allocate
from longlane.kernels.launch import DeviceProperties
from longlane.kernels.layout import triton as layout
from longlane.kernels.linear import GROUP, PackedWeight, cuts, expand, gather, gluon, tiles
from longlane.kernels.norm_rope import triton as norm_rope
from longlane.kernels.sampling import triton as sampling
from support.compile_only import compiling
from support.rows import make_rows

major, minor, shared = map(int, sys.argv[1:])
card = DeviceProperties(sms=66, shared_bytes=shared << 10, capability=(major, minor))
bf16 = torch.bfloat16


def zeros(*shape, dtype=bf16):
    return torch.zeros(shape, dtype=dtype)


modules = [attention, chunks, convolution, decode, gather, short_gdn, kv_codec, layout, long, norm_rope, prepare]
modules += [sampling, short]
with compiling(card, modules) as compiled:
    for kind in ("q4", "q5", "q6", "q8", "bf16"):
        for n, k, paired in ((5120, 6144, False), (34816, 5120, True)):
            data = torch.empty(n // 16, k // 64, tiles.BLOCK[kind], dtype=torch.int32, device="meta")
            for columns in (1, 16, 32):
                cut = cuts.plan(tiles.Tiles(kind, (n, k), data, paired), columns, card.shared_bytes)
                small = torch.zeros(cut.row_blocks, k // 64, tiles.BLOCK[kind], dtype=torch.int32)
                part = tiles.Tiles(kind, (16 * len(small), k), small, paired)
                shares = (cuts.parts(part),) if cuts.parts(part) > 1 else ()
                gluon.stream(zeros(columns, k), [part], [zeros(*shares, columns, part.outputs)], card, [cut])
        if kind != "bf16":
            expand.expand(tiles.Tiles(kind, (16, 512), torch.zeros(1, 8, tiles.BLOCK[kind], dtype=torch.int32)))
    beside = []
    for kind, n in (("q4", 4096), ("q5", 12288), ("bf16", 128)):
        data = torch.zeros(n // 16, 8, tiles.BLOCK[kind], dtype=torch.int32)
        beside.append(tiles.Tiles(kind, (n, 512), data))
    for columns in (4, 8, 32):
        gluon.stream(zeros(columns, 512), beside, [zeros(columns, part.outputs) for part in beside], card)
    weight = torch.ones(256)
    for lengths, context in (((1, 1), (0, 70)), ((4, 4), (9, 9)), ((70,), (5,))):
        rows = make_rows(lengths, context)
        n = rows.tokens
        for codec in ("bf16", *CODE_BITS):
            pages = allocate(codec, 20, 4, 256)
            kv_codec.append(pages, zeros(n, 4, 256), zeros(n, 4, 256), rows)
            attention.attend(zeros(n, 24, 256), pages, rows, scale=0.1)
            if n < 70:
                rotation = Rotation(torch.zeros(n, 32), torch.zeros(n, 32), weight, weight, 1e-6)
                q, k, gate, v = zeros(n, 56, 256).split([24, 4, 24, 4], dim=1)
                attention.mix(q, k, v, rotation, pages, rows, scale=0.1, gate=gate)
        record = Record(zeros(n, 10240), zeros(n, 10240), zeros(n, 48), zeros(n, 48))
        gates = (record.a, record.b, torch.zeros(48), torch.zeros(48))
        state, history = torch.zeros(4, 48, 128, 128), zeros(4, 4, 10240)
        for kept in (True, False):
            gdn.mix(record.x, *gates[:2], torch.zeros(4, 10240), *gates[2:], state, history, rows, advance=kept)
        gdn.fold(record, torch.ones(rows.rows, dtype=torch.int32), *gates[2:], state, history, rows)
        norm_rope.rms_norm(zeros(n, 5120), torch.ones(5120), 1e-6)
        norm_rope.add_rms_norm(zeros(n, 5120), zeros(n, 5120), torch.ones(5120), 1e-6)
        norm_rope.gated_rms_norm(zeros(n, 48, 128), zeros(n, 48, 128), torch.ones(128), 1e-6)
        angle = torch.zeros(n, 32)
        norm_rope.qk_norm_rope(zeros(n, 24, 256), zeros(n, 4, 256), angle, angle, weight, weight, 1e-6)
        norm_rope.swiglu(zeros(n, 512))
        norm_rope.sigmoid_gate(zeros(n, 512), zeros(n, 512))
    ids, frequency = zeros(6, dtype=torch.int64), zeros(32, dtype=torch.float64)
    inputs, table = zeros(3, 3, dtype=torch.int32), zeros(3, 9, dtype=torch.int32)
    for drafts in (None, (inputs[2], ids.view(3, 2))):
        layout.begin(inputs[0], inputs[1], inputs[:2].T, table, ids, drafts)
    layout.lay_out(inputs[0], table, 2)
    advance.advance(*inputs, table[:, :3], ids[:3], frequency[:3])
    layout.angles(ids, frequency, ids, torch.float32)
    for base, high, minimum, name in ((32, 16, None, "q6_g64_fp16"), (16, 0, True, "q4_1_g32_fp16")):
        low, scale = zeros(8, 4, base, dtype=torch.uint8), zeros(8, 4, dtype=torch.float16)
        more = zeros(8, 4, high, dtype=torch.uint8) if high else None
        weight = PackedWeight(name, (8, 4 * GROUP[name]), low, scale, more, minimum and scale)
        gather.gather(weight, ids, bf16)
    logits = zeros(3, 248320, dtype=torch.float32)
    sampling.greedy(logits, ids[:3], zeros(3, dtype=torch.float64))
    sampling.draw_columns(logits, torch.zeros(3), zeros(5, 3, dtype=torch.float64))
for kernel in compiled:
    print(kernel.metadata.name, kernel.metadata.shared)
"""


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("major", "minor", "shared"), [(8, 0, 163), (8, 6, 99), (8, 9, 99), (9, 0, 227), (12, 0, 99)], ids=str
)
def test_compiles(major: int, minor: int, shared: int) -> None:
    arguments = [sys.executable, "-c", PROGRAM, str(major), str(minor), str(shared)]
    environment = {"PYTHONPATH": "tests:src", "PATH": "/usr/bin:/bin", "HOME": "/tmp"}
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "_stream" in done.stdout
    assert "_select" in done.stdout

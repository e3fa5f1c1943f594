"""Numeric formats against a bit-level oracle in plain Python, written from `docs/formats.md`."""

import math
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longlane.artifact.container import Artifact, ArtifactWriter, Component, Entry, Part
from longlane.artifact.floats import Fp8RowWeight, Nvfp4Weight
from longlane.artifact.formats import (
    LAYOUT,
    LayoutError,
    Stored,
    check_scales,
    concat_rows,
    decode,
    encode,
    encoded_bytes,
    format_of,
    from_bytes,
    load,
    slice_rows,
    to_bytes,
)
from longlane.errors import ArtifactError, CheckpointError
from longlane.kernels.linear.weight import PackedWeight

# format: bits, group, positive limit, negative limit, base bytes a group, high bytes a group
GROUPED = {
    "q4_g64_fp16": (4, 64, 7, -8, 32, 0),
    "q5_g64_fp16": (5, 64, 15, -16, 32, 8),
    "q6_g64_fp16": (6, 64, 31, -32, 32, 16),
    "q8_g32_fp16": (8, 32, 127, -127, 32, 0),
    "t2_g128_fp16": (2, 128, 1, -1, 32, 0),
}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def pack(weight: Stored) -> bytes:
    return b"".join(buffer.tobytes() for buffer in to_bytes(weight))


def f16(data: bytes, offset: int) -> float:
    return struct.unpack_from("<e", data, offset)[0]


def round_up(value: int, step: int) -> int:
    return (value + step - 1) // step * step


def unpack_grouped(data: bytes, format: str, n: int, k: int) -> list[list[float]]:
    """Every value, bit by bit."""
    bits, group, _, _, base_bytes, high_bytes = GROUPED[format]
    groups = round_up(k, 128) // group
    high_at = round_up(n * groups * base_bytes, 256)
    scale_at = high_at + round_up(n * groups * high_bytes, 256)
    assert len(data) == scale_at + 2 * n * groups
    rows = []
    for row in range(n):
        values = []
        for column in range(k):
            g, lane = divmod(column, group)
            index = row * groups + g
            low_bits = bits if bits in (2, 8) else 4
            at = lane * low_bits
            code = data[index * base_bytes + at // 8] >> at % 8 & (1 << low_bits) - 1
            for extra in range(bits - low_bits):
                bit = lane * (bits - low_bits) + extra
                code |= (data[high_at + index * high_bytes + bit // 8] >> bit % 8 & 1) << (low_bits + extra)
            code -= (1 << bits) if code >> (bits - 1) else 0
            values.append(f16(data, scale_at + 2 * index) * code)
        rows.append(values)
    return rows


def encode_group(values: list[float], format: str) -> tuple[float, list[int]]:
    """The reference encoder, one rounding at a time."""
    _, _, top, low, _, _ = GROUPED[format]
    peak = np.float32(max(abs(x) for x in values))
    if peak == 0:
        return 0.0, [0] * len(values)
    scale = np.float16(peak / np.float32(top))
    scale = scale if scale > 0 else np.float16(2.0**-24)
    inverse = np.float32(1) / np.float32(scale)
    return float(scale), [min(max(round(float(np.float32(x) * inverse)), low), top) for x in values]


@pytest.mark.parametrize("format", GROUPED)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (2, 130), (3, 63), (1, 65), (2, 128), (3, 257)])
def test_grouped_encoder_and_packing_follow_the_scalar_rules(format: str, n: int, k: int) -> None:
    torch.manual_seed(n * 1000 + k)
    source = torch.randn(n, k) * torch.logspace(-3, 3, n).unsqueeze(1)
    weight = encode(source, format)
    group = GROUPED[format][1]
    expected = []
    for row in source.tolist():
        values = []
        for start in range(0, k, group):
            scale, codes = encode_group(row[start : start + group], format)
            values += [scale * code for code in codes]
        expected.append(values)
    assert unpack_grouped(pack(weight), format, n, k) == expected
    assert decode(weight).tolist() == expected


@pytest.mark.parametrize("format", GROUPED)
def test_padding_lanes_groups_and_gaps_are_zero(format: str) -> None:
    _, group, _, _, base_bytes, _ = GROUPED[format]
    weight = encode(torch.full((1, 130), 3.0), format)
    assert isinstance(weight, PackedWeight)
    first_padded = -(-130 // group)
    assert not weight.base[0, first_padded:].any()
    assert (weight.scale[0, first_padded:].view(torch.int16) == 0).all()
    data = pack(weight)
    end = 256 // group * base_bytes
    assert data[end : round_up(end, 256)] == bytes(round_up(end, 256) - end)


@pytest.mark.parametrize(
    ("format", "shape", "size"),
    [
        ("q4_g64_fp16", (7168, 5120), 19_496_960),
        ("q5_g64_fp16", (7168, 5120), 24_084_480),
        ("q5_g64_fp16", (2, 130), 528),
        ("nvfp4", (14336, 5120), 41_287_684),
        ("fp8_e4m3fn_row_bf16", (14336, 5120), 73_428_992),
        ("bf16", (), 2),
        ("int32", (3, 5), 60),
        ("q4_1_g32_fp16", (1, 32), 514),
    ],
)
def test_encoded_sizes(format: str, shape: tuple[int, ...], size: int) -> None:
    assert encoded_bytes(format, LAYOUT[format], shape) == size


def test_planes_of_the_published_q5_example_lie_at_256_and_512() -> None:
    source = torch.zeros(2, 130)
    source[:, 0], source[:, 1] = 15.0, -15.0
    data = pack(encode(source, "q5_g64_fp16"))
    assert data[0] == 0x1F  # 15 = 0b01111 in the low nibble, -15 = 0b10001 in the high one
    assert data[256] == 0b10  # only lane 1 has its fifth bit set
    assert data[512:514] == struct.pack("<e", 1.0)


def test_hand_packed_bytes() -> None:
    """One group of each format with known codes, checked against bytes worked out by hand."""
    q6 = torch.zeros(1, 64)
    q6[0, :4] = torch.tensor([31.0, -31.0, 16.0, -1.0])
    data = pack(encode(q6, "q6_g64_fp16"))
    # Codes 0b011111, 0b100001, 0b010000, 0b111111.
    assert data[:2] == bytes([0x1F, 0xF0])
    assert data[256] == 0b11_01_10_01
    ternary = torch.zeros(1, 128)
    ternary[0, :5] = torch.tensor([2.0, -2.0, 0.0, 2.0, -2.0])
    assert pack(encode(ternary, "t2_g128_fp16"))[:2] == bytes([0b01_00_11_01, 0b11])
    wide = torch.zeros(1, 32)
    wide[0, :3] = torch.tensor([127.0, -127.0, 1.0])
    assert pack(encode(wide, "q8_g32_fp16"))[:3] == bytes([127, 129, 1])


@pytest.mark.parametrize("format", GROUPED)
def test_halves_round_to_even_after_multiplying_by_the_reciprocal(format: str) -> None:
    _, group, top, _, _, _ = GROUPED[format]
    source = torch.zeros(1, group)
    source[0, :3] = torch.tensor([float(top), 0.5, -0.5])
    assert decode(encode(source, format))[0, :3].tolist() == [float(top), 0.0, 0.0]
    if top > 2:
        source[0, :5] = torch.tensor([float(top), 1.5, -1.5, 2.5, -2.5])
        assert decode(encode(source, format))[0, :5].tolist() == [float(top), 2.0, -2.0, 2.0, -2.0]


def test_the_reciprocal_is_normative_where_a_division_would_differ() -> None:
    """Find values where x * (1 / s) and x / s round to different codes; the encoder must follow the first."""
    scale = torch.linspace(0.5, 2, 4001).half().float()
    steps = torch.arange(-7, 7).float() + 0.5
    x = scale.unsqueeze(1) * steps
    x = torch.cat((x, torch.nextafter(x, x * 2), torch.nextafter(x, x * 0)), dim=1)
    by_reciprocal = (x * (1 / scale).unsqueeze(1)).round()
    by_division = (x / scale.unsqueeze(1)).round()
    rows, columns = (by_reciprocal != by_division).nonzero(as_tuple=True)
    assert len(rows) > 10
    source = torch.zeros(len(rows), 64)
    source[:, 0], source[:, 1] = scale[rows] * 7, x[rows, columns]
    weight = encode(source, "q4_g64_fp16")
    assert isinstance(weight, PackedWeight)
    exact = weight.scale[:, 0].float() == scale[rows]
    codes = decode(weight)[:, 1] / scale[rows]
    assert exact.sum() > 10
    assert torch.equal(codes[exact], by_reciprocal[rows, columns][exact].clamp(-8, 7))


@pytest.mark.parametrize("format", GROUPED)
def test_tiny_groups_keep_the_smallest_positive_scale(format: str) -> None:
    source = torch.full((1, GROUPED[format][1]), 1e-38)
    weight = encode(source, format)
    assert isinstance(weight, PackedWeight)
    assert weight.scale.view(torch.int16)[0, 0] == 0x0001
    assert not decode(weight).any()


def test_subnormal_scales_are_kept_exactly() -> None:
    source = torch.full((1, 64), 7 * 3 * 2.0**-24)
    weight = encode(source, "q4_g64_fp16")
    assert isinstance(weight, PackedWeight)
    assert weight.scale.view(torch.int16)[0, 0] == 3
    assert torch.equal(decode(weight), source)


@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=32, max_size=32))
@settings(max_examples=60, deadline=None)
def test_q8_never_writes_minus_128(values: list[float]) -> None:
    weight = encode(torch.tensor([values]), "q8_g32_fp16")
    assert isinstance(weight, PackedWeight)
    assert not (weight.base == 0x80).any()


@pytest.mark.parametrize("format", [*GROUPED, "q4_1_g32_fp16", "nvfp4", "fp8_e4m3fn_row_bf16"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused_by_place(format: str, bad: float) -> None:
    source = torch.zeros(128, 128)
    source[5, 77] = bad
    with pytest.raises(CheckpointError, match="row 5, column 77"):
        encode(source, format)


@pytest.mark.parametrize("format", [*GROUPED, "q4_1_g32_fp16"])
def test_values_beyond_the_scale_are_refused(format: str) -> None:
    with pytest.raises(CheckpointError):
        encode(torch.full((1, 128), 3e38), format)


def test_chunked_encoding_is_the_same_as_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    source = torch.randn(7, 160)
    whole = pack(encode(source, "q6_g64_fp16"))
    monkeypatch.setattr("longlane.artifact.formats.CHUNK", 320)
    assert pack(encode(source, "q6_g64_fp16")) == whole


def test_affine_blocks_bit_by_bit() -> None:
    torch.manual_seed(3)
    source = torch.randn(3, 96) + 0.7
    data = pack(encode(source, "q4_1_g32_fp16"))
    scale_at = round_up(3 * 3 * 16, 256)
    minimum_at = scale_at + 256
    assert len(data) == minimum_at + 3 * 3 * 2
    decoded = decode(encode(source, "q4_1_g32_fp16"))
    for row in range(3):
        for column in range(96):
            index, lane = row * 3 + column // 32, column % 32
            code = data[index * 16 + lane // 2] >> 4 * (lane % 2) & 15
            scale, minimum = f16(data, scale_at + 2 * index), f16(data, minimum_at + 2 * index)
            assert decoded[row, column] == np.float32(np.float32(scale) * np.float32(code)) + np.float32(minimum)
            assert abs(float(source[row, column]) - (scale * code + minimum)) <= 0.51 * scale + 1e-3
    flat = encode(torch.full((1, 32), -2.5), "q4_1_g32_fp16")
    assert (decode(flat) == -2.5).all()


def e4m3(byte: int) -> float:
    exponent, fraction = byte >> 3 & 15, byte & 7
    value = fraction * 2.0**-9 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return -value if byte >> 7 else value


def test_nvfp4_bit_by_bit() -> None:
    torch.manual_seed(4)
    n, k = 256, 128
    source = torch.randn(n, k) * torch.logspace(-2, 2, n).unsqueeze(1)
    weight = encode(source, "nvfp4")
    data = pack(weight)
    scale_at = n * k // 2
    (divisor,) = struct.unpack_from("<f", data, scale_at + n * k // 16)
    decoded = decode(weight)
    for row in range(0, n, 7):
        for column in range(0, k, 3):
            code = data[(row * k + column) // 2] >> 4 * (column % 2) & 15
            g = column // 16
            tile = ((row // 128) * (k // 64) + g // 4) * 512
            at = scale_at + tile + (row % 32) * 16 + (row % 128) // 32 * 4 + g % 4
            value = E2M1[code & 7] * (-1 if code & 8 else 1) * e4m3(data[at]) / divisor
            assert float(decoded[row, column]) == pytest.approx(value, rel=1e-6, abs=0)
    assert float((decoded - source).norm() / source.norm()) < 0.12


def test_nvfp4_codes_are_nearest_with_ties_to_even() -> None:
    """A block that peaks at 6 with a divisor of 448 has scale 448 and codes that are the values themselves."""
    source = torch.zeros(128, 64)
    source[0, :12] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -5.0, 5.01])
    expected = [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 0.0, -1.0, -4.0, 6.0]
    assert decode(encode(source, "nvfp4"))[0, :12].tolist() == expected


def test_fp8_rows_bit_by_bit() -> None:
    torch.manual_seed(5)
    source = torch.randn(5, 70)
    source[1] = 0
    data = pack(encode(source, "fp8_e4m3fn_row_bf16"))
    scale_at = round_up(5 * 70, 256)
    assert len(data) == scale_at + 10
    decoded = decode(encode(source, "fp8_e4m3fn_row_bf16"))
    for row in range(5):
        (scale,) = struct.unpack("<f", b"\0\0" + data[scale_at + 2 * row : scale_at + 2 * row + 2])
        for column in range(70):
            code = data[row * 70 + column]
            assert code & 0x7F != 0x7F
            assert float(decoded[row, column]) == np.float32(e4m3(code)) * np.float32(scale)
            assert (
                abs(float(source[row, column]) - e4m3(code) * scale)
                <= abs(float(source[row, column])) / 16 + scale / 512
            )
    tiny = encode(torch.tensor([[1e-45, 0.0]]), "fp8_e4m3fn_row_bf16")
    assert isinstance(tiny, Fp8RowWeight)
    assert tiny.scale.view(torch.int16).tolist() == [1]
    assert decode(tiny).isfinite().all()


def example(format: str) -> Stored:
    if format == "int32":
        return encode(torch.arange(-7, 8).view(3, 5) * 100_000_000, format)
    return encode(torch.randn(128, 192, generator=torch.Generator().manual_seed(1)), format)


@pytest.mark.parametrize("format", LAYOUT)
def test_bytes_and_back_share_memory(format: str) -> None:
    weight = example(format)
    assert format_of(weight) == format
    shape = tuple(weight.shape)
    data = np.frombuffer(pack(weight), np.uint8)
    assert len(data) == encoded_bytes(format, LAYOUT[format], shape)
    back = from_bytes(data, format, LAYOUT[format], shape)
    assert torch.equal(decode(back), decode(weight))
    assert pack(back) == data.tobytes()
    planes = [back] if isinstance(back, torch.Tensor) else [back.scale]
    assert all(data.ctypes.data <= plane.data_ptr() < data.ctypes.data + len(data) for plane in planes)


@pytest.mark.parametrize("format", ["fp32", "q4_g64_fp16", "nvfp4"])
def test_bytes_at_an_odd_address_are_copied(format: str) -> None:
    data = np.frombuffer(b"x" + pack(example(format)), np.uint8)[1:]
    assert torch.equal(decode(from_bytes(data, format, LAYOUT[format], (128, 192))), decode(example(format)))


def test_direct_words_keep_every_bit() -> None:
    words = torch.tensor([0x7FC1, -0x8000, 0x0001, 0x7F80, -0x0040], dtype=torch.int16).view(torch.bfloat16)
    assert pack(encode(words, "bf16")) == words.view(torch.uint8).numpy().tobytes()
    with pytest.raises(CheckpointError, match="int32"):
        encode(torch.tensor([1 << 40]), "int32")


@pytest.mark.parametrize("format", [*GROUPED, "q4_1_g32_fp16", "bf16", "fp8_e4m3fn_row_bf16"])
def test_row_slices_are_tensors_of_their_own(format: str) -> None:
    weight = example(format)
    assert not isinstance(weight, Nvfp4Weight)
    if isinstance(weight, Fp8RowWeight):
        assert torch.equal(decode(concat_rows([weight, weight])), decode(weight).repeat(2, 1))
        return
    parts = [slice_rows(weight, begin, end) for begin, end in ((0, 1), (1, 63), (63, 128))]
    assert torch.equal(decode(parts[1]), decode(weight)[1:63])
    assert pack(concat_rows(parts)) == pack(weight)


def test_formats_and_shapes_that_do_not_fit_are_refused() -> None:
    for format, layout, shape in [
        ("q3", "row_split_k128_v1", (2, 2)),
        ("q4_g64_fp16", "contiguous_le_v1", (2, 2)),
        ("q4_g64_fp16", "row_split_k128_v1", (2, 2, 2)),
        ("q4_g64_fp16", "row_split_k128_v1", (0, 2)),
        ("q4_1_g32_fp16", "row_split_affine_v1", (2, 33)),
        ("nvfp4", "block_scale_k16_m128x4_v1", (64, 64)),
        ("bf16", "contiguous_le_v1", (1,) * 17),
    ]:
        with pytest.raises(LayoutError):
            encoded_bytes(format, layout, shape)


def broken(weight: Stored, words: dict[str, int]) -> Stored:
    for plane, word in words.items():
        tensor = getattr(weight, plane)
        tensor.view(torch.uint8 if tensor.dtype == torch.uint8 else torch.int16).flatten()[-1] = word
    return weight


@pytest.mark.parametrize(
    ("format", "words"),
    [
        ("q4_g64_fp16", {"scale": 0x7C00}),
        ("q8_g32_fp16", {"scale": 0x7E01}),
        ("q6_g64_fp16", {"scale": -0x8000}),
        ("t2_g128_fp16", {"scale": -0x4400}),
        ("q4_1_g32_fp16", {"scale": 0x7C00}),
        ("q4_1_g32_fp16", {"minimum": 0x7E00}),
        ("nvfp4", {"scale": 0x7F}),
        ("nvfp4", {"scale": 0x81}),
        ("fp8_e4m3fn_row_bf16", {"scale": 0x7F80}),
    ],
)
def test_scales_that_no_encoder_writes_are_refused_by_name(format: str, words: dict[str, int]) -> None:
    weight = example(format)
    check_scales(weight, "file: object 'x'")
    with pytest.raises(ArtifactError, match="object 'x'") as error:
        check_scales(broken(weight, words), "file: object 'x'")
    assert "\n" not in error.value.message


def test_load_reads_whole_objects_ranges_and_joined_parts(tmp_path: Path) -> None:
    stored = {"a": example("q5_g64_fp16"), "b": example("q5_g64_fp16"), "n": example("nvfp4"), "v": example("bf16")}
    parameters = {
        "whole": [Part("a")],
        "rows": [Part("a", (192, 4 * 192))],
        "joined": [Part("a", (0, 192)), Part("b", (2 * 192, 5 * 192))],
        "float": [Part("n")],
        "ragged": [Part("a", (0, 100))],
        "mixed": [Part("a"), Part("v")],
        "elements": [Part("v", (192, 384))],
    }
    path = tmp_path / "m.ninfer"
    entries = [Entry.tensor(name, format_of(weight), tuple(weight.shape)) for name, weight in stored.items()]
    components = {"text": Component(config={})}
    with ArtifactWriter(path, entries=entries, components=components, parameters=parameters) as writer:
        for name, weight in stored.items():
            writer.write(name, to_bytes(weight))
    with Artifact.open(path) as artifact:
        assert torch.equal(decode(load(artifact, "whole")), decode(stored["a"]))
        assert torch.equal(decode(load(artifact, "rows")), decode(stored["a"])[1:4])
        joined = torch.cat((decode(stored["a"])[:1], decode(stored["b"])[2:5]))
        assert torch.equal(decode(load(artifact, "joined")), joined)
        as_bf16 = load(artifact, "float")
        assert isinstance(as_bf16, torch.Tensor)
        assert torch.equal(as_bf16, decode(stored["n"]).bfloat16())
        assert torch.equal(decode(load(artifact, "elements")), decode(stored["v"])[1:2])
        for name in ("ragged", "mixed", "absent"):
            with pytest.raises(ArtifactError, match=name):
                load(artifact, name)


def test_load_names_the_object_with_a_broken_scale(tmp_path: Path) -> None:
    path = tmp_path / "m.ninfer"
    weight = broken(example("q4_g64_fp16"), {"scale": 0x7C00})
    entries = [Entry.tensor("text/w", "q4_g64_fp16", tuple(weight.shape))]
    with ArtifactWriter(path, entries=entries, components={"text": Component(config={})}) as writer:
        writer.write("text/w", to_bytes(weight))
    with Artifact.open(path) as artifact, pytest.raises(ArtifactError, match=r"m\.ninfer: object 'text/w'"):
        load(artifact, "text/w")


def test_rotated_weights_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.ninfer"
    uses = [{"parameter": "w", "input": "x", "auxiliaries": {"hadamard_signs": {"object": "w"}}}]
    entries = [Entry.tensor("w", "bf16", (4,))]
    with ArtifactWriter(path, entries=entries, components={"text": Component(config={})}, uses=uses) as writer:
        writer.write("w", bytes(8))
    with Artifact.open(path) as artifact, pytest.raises(ArtifactError, match="Hadamard"):
        load(artifact, "w")

"""What memory is reckoned from: pages, the bytes of keys and values in each `--kv-dtype`, and what bounds a card's
attention. No torch, so that a plan or a refusal does not wait for it."""

PAGE = 64  # tokens

RAW_BYTES = {"float64": 8, "float32": 4, "bf16": 2}
GROUP = 64  # values that share one float16 scale

# Code bits per value of K and V.
CODE_BITS = {
    "int8": (8, 8),
    "fp8": (8, 8),
    "rk8v4": (8, 4),
    "rk4v4": (4, 4),
    "rk4v4-e8": (4, 4),
    "rk2v4-e8": (2, 4),
}

CODECS = (*RAW_BYTES, *CODE_BITS)

# Parts into which a card divides the history of a short row, at most.
PARTS = 128
# Pages of coded history that a card's prefill step has as plain values at a time, over all rows.
SEGMENT = 256


def divides(codec: str, head_dim: int) -> bool:
    """Whether a head has whole groups of what the codec scales together."""
    return codec in RAW_BYTES or head_dim % GROUP == 0


def scale_groups(codec: str, head_dim: int) -> int:
    """Scales of a coded vector: one a group of 64; fp8 scales the whole row."""
    return 1 if codec == "fp8" else head_dim // GROUP


def vector_bytes(codec: str, head_dim: int) -> tuple[int, int]:
    """Bytes of K and of V for one token and one KV head, scales included. Source: `docs/kv-codecs.md`."""
    if codec in RAW_BYTES:
        size = RAW_BYTES[codec] * head_dim
        return size, size
    assert divides(codec, head_dim), f"coded KV needs a head of whole groups of {GROUP}, got {head_dim}"
    scales = 2 * scale_groups(codec, head_dim)
    k_bits, v_bits = CODE_BITS[codec]
    return head_dim * k_bits // 8 + scales, head_dim * v_bits // 8 + scales

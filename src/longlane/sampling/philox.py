"""Counter-based random numbers: the number of a position is a function of (seed, position) and of nothing else.

No generator state exists, so a draw cannot depend on what else ran, on how a request was batched, paused or drafted,
or on the device.
"""

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low, high = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & _WORD, (low >> 32) ^ c3 ^ k1, low & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """A float64 in [0, 1) with 53 random bits. `seed` counts modulo 2**64."""
    words = philox4x32((position & _WORD, position >> 32, 0, 0), (seed & _WORD, (seed >> 32) & _WORD))
    return ((words[0] << 21) | (words[1] >> 11)) / (1 << 53)

import statistics

import pytest

from longlane.sampling.philox import philox4x32, uniform

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers_of_random123(counter, key, expected):
    assert philox4x32(counter, key) == expected


def test_numbers_are_uniform_and_differ_by_seed_and_position():
    numbers = [uniform(seed, position) for seed in range(50) for position in range(200)]
    assert len(set(numbers)) == len(numbers)
    assert all(0 <= number < 1 for number in numbers)
    buckets = [sum(int(number * 16) == bucket for number in numbers) for bucket in range(16)]
    chi_square = sum((count - 625) ** 2 / 625 for count in buckets)
    assert chi_square < 37.7  # 0.1 % of 15 degrees of freedom
    lagged = statistics.correlation(numbers[:-1], numbers[1:])
    assert abs(lagged) < 0.04


def test_seed_counts_modulo_two_to_the_64th():
    assert uniform(-1, 5) == uniform(2**64 - 1, 5)
    assert uniform(2**40, 5) != uniform(0, 5)

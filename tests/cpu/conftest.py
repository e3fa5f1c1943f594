"""Settings of a run without a GPU."""

import os

import pytest

# Triton chooses between compiler and interpreter once, when anything first imports it. What needs
# the compiler runs in a process of its own.
os.environ.setdefault("TRITON_INTERPRET", "1")


# A timeout inside of a hypothesis test is replayed, passes, and is reported as a flaky failure, so that one must not
# come from a busy machine alone.
NIGHTLY_TIMEOUT_S = 3600


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.timeout(NIGHTLY_TIMEOUT_S))

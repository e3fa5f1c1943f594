"""Settings of a run without a GPU."""

import os

# Triton chooses between compiler and interpreter once, when anything first imports it. What needs
# the compiler runs in a process of its own.
os.environ.setdefault("TRITON_INTERPRET", "1")

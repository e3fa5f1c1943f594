"""What every benchmark of a card asks first."""

import sys

import torch

USAGE_ERROR = 2


def need_card() -> None:
    """Ends the program in one line where there is no NVIDIA card."""
    if not torch.cuda.is_available():
        print(f"{sys.argv[0]} needs an NVIDIA card", file=sys.stderr)
        sys.exit(USAGE_ERROR)

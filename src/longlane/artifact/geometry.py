"""Text configurations of the released models, Hugging Face style."""

from typing import Any

GEOMETRIES: dict[str, dict[str, Any]] = {}

"""`inspect` says that this build can run a model where it is served, and only there, whatever its config.json says."""

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from longlane.artifact.inspect import summarize_directory
from longlane.cli.inspect import servable
from longlane.cli.session import open_session
from longlane.config import EngineConfig, ServerConfig
from longlane.engine import startup
from longlane.errors import CheckpointError, LonglaneError
from support.random_checkpoint import DENSE, MOE, write_checkpoint

NULLS = dict.fromkeys(("text_config", "vision_config", "quantization_config", "rope_scaling", "hidden_size"))
ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 0]}
FULL = DENSE | {"rope_parameters": ROPE, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
FULL |= {"hidden_act": "silu", "eos_token_id": 1}
ABSURD = [None, "8", True, 0, -1, 3, 10**30, float("nan"), [8, 8, 8, 8]]


def places(document: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in document.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from places(value, (*path, key))


def changed(config: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    *parents, key = place
    holder = made = deepcopy(config)
    for parent in parents:
        holder = holder[parent]
    holder[key] = value
    return made


def serve(path: Path) -> None:
    """Up to an engine that has answered a first request."""
    config = EngineConfig(model=str(path), device="cpu", dtype="float32", threads=1)
    state = open_session(config, ServerConfig(), Console(quiet=True))
    startup.load(state.engine_config, lambda loading: None)


def refusal(path: Path) -> str | None:
    """What both say."""
    found = summarize_directory(path, servable).problems
    try:
        serve(path)
    except LonglaneError as error:
        assert found == [error.message]
        assert isinstance(error, CheckpointError)
        assert str(path) in error.message
        assert ";" in error.message, "no cure"
        return error.message
    assert found == []
    return None


@pytest.mark.parametrize(
    ("config", "null"), [(FULL, "rms_norm_eps"), (FULL | MOE, "num_experts_per_tok")], ids=["dense", "moe"]
)
def test_every_member_may_have_any_value(config: dict[str, Any], null: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, config)
    assert refusal(tmp_path) is None
    everything = config | {name: config.get(name) for name in NULLS}
    # Of the mixture, what it has alone.
    at = [place for place in places(everything) if config is FULL or place[0] not in FULL]
    refused: dict[tuple[str, ...], str | None] = {}
    for place in at:
        for value in ABSURD:
            (tmp_path / "config.json").write_text(json.dumps(changed(everything, place, value)))
            refused[(*place, repr(value))] = refusal(tmp_path)
    assert refused[null, "None"]
    assert sum(message is not None for message in refused.values()) > len(refused) // 2

"""Model preset < server flag < request field < --greedy."""

from typing import Any

import pytest

from longlane.api.sampling import SamplingDefaults
from longlane.api.schemas import CompletionRequest
from longlane.config import ServerConfig
from longlane.errors import CheckpointError


def resolve(generation: dict[str, Any], config: dict[str, Any], request: dict[str, Any]) -> Any:
    defaults = SamplingDefaults.of(generation, ServerConfig(**config))
    return defaults.resolve(CompletionRequest(model="M", prompt="x", **request), 100)


@pytest.mark.parametrize(
    ("generation", "config", "request_fields", "temperature"),
    [
        ({}, {}, {}, 1.0),
        ({"temperature": 0.6}, {}, {}, 0.6),
        ({"temperature": 0.6, "do_sample": False}, {}, {}, 0.0),
        ({"temperature": 0.6}, {"temperature": 0.7}, {}, 0.7),
        ({"temperature": 0.6}, {"temperature": 0.7}, {"temperature": 0.0}, 0.0),
        ({"temperature": 0.6}, {"temperature": 0.0}, {"temperature": 0.5}, 0.5),
        ({"temperature": 0.6}, {"temperature": 0.7, "greedy": True}, {"temperature": 0.5}, 0.0),
        ({"temperature": None, "top_k": None}, {}, {}, 1.0),
    ],
)
def test_precedence(
    generation: dict[str, Any], config: dict[str, Any], request_fields: dict[str, Any], temperature: float
) -> None:
    assert resolve(generation, config, request_fields).temperature == temperature


def test_every_preset_field_has_the_three_levels() -> None:
    for name, value in {
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": 0.5,
    }.items():
        assert getattr(resolve({name: value}, {}, {}), name) == value
        assert getattr(resolve({name: 0}, {name: value}, {}), name) == value
        assert getattr(resolve({name: 0}, {name: 0}, {name: value}), name) == value
    name = "repetition_penalty"
    assert resolve({name: 1.1}, {}, {}).repetition_penalty == 1.1
    assert resolve({name: 1.1}, {name: 1.2}, {}).repetition_penalty == 1.2
    assert resolve({name: 1.1}, {name: 1.2}, {name: 1.3}).repetition_penalty == 1.3


def test_a_server_seed_is_for_requests_without_one() -> None:
    assert resolve({}, {"seed": 5}, {}).seed == 5
    assert resolve({}, {"seed": 5}, {"seed": 0}).seed == 0
    assert 0 <= resolve({}, {}, {}).seed < 2**53


def test_a_preset_that_is_no_number_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"generation_config.*top_k"):
        resolve({"top_k": "many"}, {}, {})

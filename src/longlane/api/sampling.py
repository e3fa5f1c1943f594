"""Which sampling a request gets: model preset < server flag < request field < `--greedy`."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from longlane.api.schemas import MAX_SEED, MIN_SEED, GenerationFields
from longlane.config import ServerConfig
from longlane.errors import CheckpointError, RequestError
from longlane.types import SamplingParams

PRESET_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
# Seeds are drawn small enough for readers of the log that keep numbers as doubles.
DRAWN_SEED_BITS = 53


@dataclass(frozen=True)
class SamplingDefaults:
    """What applies where a request says nothing. `seed` None means a new one for each request."""

    values: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    greedy: bool = False

    @classmethod
    def of(cls, generation: Mapping[str, Any], config: ServerConfig) -> "SamplingDefaults":
        """From the parsed generation_config.json and the server's flags; raises `CheckpointError`."""
        values = {name: generation[name] for name in PRESET_FIELDS if generation.get(name) is not None}
        if generation.get("do_sample") is False:
            values["temperature"] = 0.0
        try:
            msgspec.convert(values, SamplingParams)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"generation_config.json: {error}") from None
        flags = {name: getattr(config, name) for name in PRESET_FIELDS}
        values |= {name: value for name, value in flags.items() if value is not None}
        return cls(values, config.seed, config.greedy)

    def resolve(self, request: GenerationFields, vocab_size: int) -> SamplingParams:
        """Concrete sampling of the first choice; choice i uses seed + i."""
        given = {name: getattr(request, name) for name in PRESET_FIELDS}
        values = {**self.values, **{name: value for name, value in given.items() if value is not None}}
        values["top_k"] = max(values.get("top_k", 0), 0)
        if self.greedy:
            values["temperature"] = 0.0
        return SamplingParams(**values, logit_bias=_logit_bias(request, vocab_size), seed=self._seed(request.seed))

    def _seed(self, given: int | None) -> int:
        seed = self.seed if given is None else given
        if seed is None:
            return secrets.randbits(DRAWN_SEED_BITS)
        if not MIN_SEED <= seed < MAX_SEED:
            raise RequestError(f"seed: {seed} does not fit in 64 bits", param="seed")
        return seed % MAX_SEED


def _logit_bias(request: GenerationFields, vocab_size: int) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in (request.logit_bias or {}).items():
        # Python refuses to parse thousands of digits, so their number is looked at first.
        if not (key.isascii() and key.isdigit() and len(key) < 20 and int(key) < vocab_size):
            message = f"logit_bias: {key!r} is not a token id below {vocab_size}"
            raise RequestError(message, param="logit_bias")
        bias[int(key)] = value
    return bias

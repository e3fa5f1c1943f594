"""The text half of a model: its tokenizer, chat template, stop tokens and preferred sampling."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longlane.errors import CheckpointError, RequestError
from longlane.text.control import Shield
from longlane.text.template import ChatTemplate, Message
from longlane.text.tokenizer import Tokenizer

RESERVED_OPTIONS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


@dataclass(frozen=True)
class Frontend:
    """`generation` is the parsed generation_config.json; `stop_ids` end an answer and are never shown."""

    tokenizer: Tokenizer
    shield: Shield
    template: ChatTemplate | None
    generation: Mapping[str, Any]
    stop_ids: tuple[int, ...]

    @classmethod
    def load(
        cls, get: Callable[[str], bytes | None], config: Mapping[str, Any], template: str | None = None
    ) -> "Frontend":
        """From the resources of a model (`get(role)`) and its config; `template` replaces the model's own.

        Raises `CheckpointError` when the tokenizer is missing or a resource cannot be read.
        """
        definition = get("tokenizer")
        if definition is None:
            raise CheckpointError("the model has no tokenizer (tokenizer.json); convert it again with one")
        tokenizer_config = _json(get("tokenizer_config"), "tokenizer_config.json")
        generation = _json(get("generation_config"), "generation_config.json")
        tokenizer = Tokenizer(definition, tokenizer_config)
        source = template or _decoded(get("chat_template"))
        return cls(
            tokenizer=tokenizer,
            shield=Shield(tokenizer.control_tokens),
            template=ChatTemplate(source, tokenizer.special_strings) if source else None,
            generation=generation,
            stop_ids=_stop_ids(tokenizer, generation, config),
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None = None,
        prefill: str = "",
        options: Mapping[str, Any] | None = None,
        limit: int | None = None,
    ) -> list[int]:
        """Token ids of a conversation, ending where the assistant's answer begins (after `prefill`, if any).

        Nothing in `messages`, `tools`, `prefill` or `options` can become a control token. Raises `RequestError` for a
        text hopelessly longer than `limit` tokens; one that is only longer is for whoever knows the exact bound.
        """
        if self.template is None:
            raise RequestError("this model has no chat template; use /v1/completions", code="invalid_prompt")
        if taken := RESERVED_OPTIONS & (options or {}).keys():
            raise RequestError(f"{min(taken)} cannot be set here", code="invalid_prompt", param="chat_template_kwargs")
        foreign = [list(messages), tools, dict(options or {}), prefill]
        try:
            mark = self.shield.choose_mark(foreign)
            turns, covered_tools, covered_options, covered_prefill = self.shield.cover(foreign, mark)
        except RecursionError:
            raise RequestError("messages or options are nested too deeply", code="invalid_prompt") from None
        text = self.template.render(turns, tools=covered_tools, **covered_options) + covered_prefill
        self._check_length(text, limit, "messages")
        return self.tokenizer.encode_rendered(text, mark)

    def encode_prompt(self, text: str, limit: int | None = None) -> list[int]:
        """Token ids of a raw prompt, none of them a control token that the text spells. `limit` as in `encode_chat`."""
        self._check_length(text, limit, "prompt")
        return self.tokenizer.encode_prompt(text)

    def _check_length(self, text: str, limit: int | None, param: str) -> None:
        if limit is not None and self.tokenizer.surely_exceeds(text, limit):
            message = f"the prompt has far more tokens than prompt and answer together may have, {limit}"
            raise RequestError(message, code="context_length_exceeded", param=param)


def _json(data: bytes | None, name: str) -> dict[str, Any]:
    if data is None:
        return {}
    try:
        value = json.loads(data)
    except ValueError as error:
        raise CheckpointError(f"{name}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{name}: expected an object, got {type(value).__name__}")
    return value


def _decoded(template: bytes | None) -> str | None:
    try:
        return None if template is None else template.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"chat template: not UTF-8 ({error})") from None


def _stop_ids(tokenizer: Tokenizer, generation: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[int, ...]:
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = {*(eos if isinstance(eos, list) else [eos]), tokenizer.id_of(tokenizer.special_strings.get("eos_token", ""))}
    return tuple(sorted(token for token in ids if isinstance(token, int)))

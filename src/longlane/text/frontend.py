"""The text half of a model: its tokenizer, chat template, stop tokens and preferred sampling."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longlane.artifact.side_files import json_object
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
        cls,
        get: Callable[[str], bytes | None],
        config: Mapping[str, Any],
        template: str | None = None,
        source: Path = Path(),
    ) -> "Frontend":
        """From the resources of a model (`get(role)`) and its config; `template` replaces the model's own. `source` is
        what the model was read from, for errors.

        Raises `CheckpointError` when the tokenizer is missing or a resource cannot be read.
        """
        definition = get("tokenizer")
        if definition is None:
            raise CheckpointError(
                f"{source / 'tokenizer.json'} is missing; fetch it, or convert the model again with it"
            )
        tokenizer_config, generation = (
            _settings(get(role), source / f"{role}.json") for role in ("tokenizer_config", "generation_config")
        )
        tokenizer = Tokenizer(definition, tokenizer_config, source)
        text = _decoded(get("chat_template"), source) if template is None else template
        return cls(
            tokenizer=tokenizer,
            shield=Shield(tokenizer.control_tokens),
            template=ChatTemplate(text, tokenizer.special_strings) if text else None,
            generation=generation,
            stop_ids=_stop_ids(tokenizer, generation, config, source),
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


def _settings(data: bytes | None, name: Path) -> dict[str, Any]:
    return {} if data is None else json_object(data, name)


def _decoded(template: bytes | None, source: Path) -> str | None:
    try:
        return None if template is None else template.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{source}: byte {error.start} of its chat template is not UTF-8; fetch it again, or give --chat-template"
        ) from None


def _stop_ids(
    tokenizer: Tokenizer, generation: Mapping[str, Any], config: Mapping[str, Any], source: Path
) -> tuple[int, ...]:
    eos = generation.get("eos_token_id", config.get("eos_token_id"))
    listed = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(type(id) is int and id >= 0 for id in listed):
        raise CheckpointError(
            f"{source}: eos_token_id is {eos!r}, no token ids; fetch its generation_config.json again"
        )
    own = tokenizer.id_of(tokenizer.special_strings.get("eos_token", ""))
    return tuple(sorted({*listed, *([] if own is None else [own])}))

"""The thinking budget of an answer: which one applies, and what the engine needs to keep it."""

from collections.abc import Sequence

from longlane.api.schemas import ChatRequest, agreed
from longlane.config import ServerConfig
from longlane.errors import RequestError, counted
from longlane.text.frontend import Frontend
from longlane.types import ThinkingBudget

START, END = "<think>", "</think>"
# The sentence with which Qwen's models have been taught to end a thought early.
EARLY_STOP = (
    "\n\nConsidering the limited time by the user, I have to give the solution based on the thinking directly now.\n"
)
AFTER_END = "\n\n"
# A budget that no answer reaches: thoughts are counted and not ended.
UNLIMITED = 2**53


def asked_budget(request: ChatRequest) -> int | None:
    """The budget that the request itself sets, by whichever name."""
    given = {
        "thinking_budget": request.thinking_budget,
        "thinking_token_budget": request.thinking_token_budget,
        "thinking.budget_tokens": request.thinking.budget_tokens if request.thinking else None,
    }
    budget: int | None = agreed("thinking_budget", given)
    return budget


def thinking_budget(
    request: ChatRequest, config: ServerConfig, frontend: Frontend, prompt: Sequence[int], max_tokens: int
) -> ThinkingBudget | None:
    """None where the model has no thoughts, or the prompt has closed them. Without any budget they are only counted.

    Raises `RequestError` 400 for a budget of the request's own that cannot be kept: by a model without thoughts, or
    within `max_tokens` with the forced close and a token of the answer behind it.
    """
    asked = asked_budget(request)
    start_id, end_id = frontend.tokenizer.id_of(START), frontend.tokenizer.id_of(END)
    if start_id is None or end_id is None:
        if asked is None:
            return None
        message = "thinking_budget: this model has no thinking block"
        raise RequestError(message, code="unsupported_parameter", param="thinking_budget")
    turn = _open_turn(prompt, frontend.stop_ids)
    if end_id in turn:
        return None
    encode = frontend.tokenizer.encode_text
    forced_ids = [*encode(EARLY_STOP), end_id, *encode(AFTER_END)]
    if asked is not None and max_tokens and (needed := asked + len(forced_ids) + 1) > max_tokens:
        raise RequestError(
            f"thinking_budget: {counted(asked, 'token')}, {len(forced_ids)} to close the thoughts and one to answer "
            f"need max_tokens of {needed} or more, not {max_tokens}",
            code="thinking_budget_capacity_insufficient",
            param="thinking_budget",
        )
    tokens = config.default_thinking_budget if asked is None else asked
    return ThinkingBudget(
        tokens=UNLIMITED if tokens is None else tokens,
        start_id=start_id,
        end_id=end_id,
        forced_ids=forced_ids,
        open=start_id in turn,
    )


def limit_of(budget: ThinkingBudget | None) -> int | None:
    """The budget as a log shows it."""
    return None if budget is None or budget.tokens == UNLIMITED else budget.tokens


def _open_turn(prompt: Sequence[int], ends: Sequence[int]) -> Sequence[int]:
    """What stands behind the last end of a message: the beginning of the answer."""
    start = next((i for i in range(len(prompt), 0, -1) if prompt[i - 1] in ends), 0)
    return prompt[start:]

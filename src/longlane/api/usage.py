"""The numbers of a reply: what was used, and how long it took. Each is counted or measured; rates are derived here."""

from collections.abc import Callable, Sequence
from typing import Any

from longlane.api.generation import Ended, Job, Opened
from longlane.api.thinking import limit_of
from longlane.types import Timings


class Tally:
    """Collects the events of one request until it can say what it used."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._opened: dict[int, Opened] = {}
        self.ended: dict[int, Ended] = {}

    def see(self, event: object) -> None:
        if isinstance(event, Opened):
            self._opened[event.index] = event
        elif isinstance(event, Ended):
            self.ended[event.index] = event

    @property
    def admitted(self) -> bool:
        return bool(self._opened)

    @property
    def prompt_tokens(self) -> int:
        """Each prompt once, however many choices it has."""
        return sum(len(self._job.requests[i].token_ids) for i in self._job.first_choices)

    @property
    def cached_tokens(self) -> int:
        return sum(self._opened[i].admitted.cached_tokens for i in self._job.first_choices if i in self._opened)

    @property
    def reuse(self) -> str:
        """Where the first prompt's cached part came from, or why there is none."""
        return self._opened[0].admitted.reuse if 0 in self._opened else "none"

    @property
    def completion_tokens(self) -> int:
        return sum(ended.completion_tokens for ended in self.ended.values())

    @property
    def thinking_budget(self) -> int | None:
        return limit_of(self._job.requests[0].thinking)

    @property
    def thinking_tokens(self) -> int | None:
        """Tokens of thoughts, forced ones aside; None where the answers had no place for any."""
        return self._thinking(lambda timings: timings.thinking_tokens)

    @property
    def control_tokens(self) -> int | None:
        """Tokens that were forced to close thoughts."""
        return self._thinking(lambda timings: timings.control_tokens)

    def _thinking(self, count: Callable[[Timings], int]) -> int | None:
        if self._job.requests[0].thinking is None:
            return None
        return sum(count(ended.timings) for ended in self.ended.values())

    def usage(self) -> dict[str, Any]:
        thinking, control = self.thinking_tokens, self.control_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": (thinking or 0) + (control or 0)},
            "model_thinking_tokens": thinking,
            "thinking_budget": self.thinking_budget,
        }

    def timings(self) -> dict[str, Any]:
        return timings(list(self.ended.values())) | {"cache_reuse": self.reuse}


def timings(choices: Sequence[Ended]) -> dict[str, Any]:
    """The `timings` object. Of several choices counts and milliseconds are sums, so rates are those of one lane.

    What was not measured is null: the time to the first token of an answer without any, the decode rate of a single
    token.
    """
    all_timings = [ended.timings for ended in choices]
    prompt_n = sum(t.computed_prefill_tokens for t in all_timings)
    prompt_s = sum(t.prefill_s for t in all_timings)
    predicted_n = sum(ended.tokens for ended in choices)
    # The time from the first token to the last holds one interval less than tokens.
    intervals = sum(max(0, ended.tokens - 1) for ended in choices)
    spans = [t.decode_s for t in all_timings if t.decode_s is not None]
    firsts = [t.ttft_s for t in all_timings if t.ttft_s is not None]
    predicted_s = sum(spans)
    drafted = sum(t.drafted_tokens for t in all_timings)
    result = {
        "cache_n": sum(t.cached_tokens for t in all_timings),
        "prompt_n": prompt_n,
        "prompt_ms": prompt_s * 1e3 if prompt_n else None,
        "prompt_per_token_ms": _ratio(prompt_s * 1e3, prompt_n),
        "prompt_per_second": _ratio(prompt_n, prompt_s),
        "predicted_n": predicted_n,
        "predicted_ms": predicted_s * 1e3 if spans else None,
        "predicted_per_token_ms": _ratio(predicted_s * 1e3, intervals),
        "predicted_per_second": _ratio(intervals, predicted_s),
        "queue_ms": max(t.queue_s for t in all_timings) * 1e3,
        "ttft_ms": min(firsts) * 1e3 if firsts else None,
    }
    if drafted:
        result |= {"draft_n": drafted, "draft_n_accepted": sum(t.accepted_tokens for t in all_timings)}
    return result


def milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"


def rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} t/s"


def _ratio(value: float, by: float) -> float | None:
    return value / by if value > 0 and by > 0 else None

"""What a request is refused for before it costs anything. Every refusal names the bound and what would be right.

No torch here: the API asks too, before it does any work of its own.
"""

from longlane.errors import EngineError, LonglaneError, RequestError, counted
from longlane.types import Failed, Request


def is_overloaded(running: int, waiting: int, lanes: int, max_pending: int) -> bool:
    """Whether one more request would wait behind more than `max_pending`."""
    return running + waiting >= lanes + max_pending


def check_queue(running: int, waiting: int, lanes: int, max_pending: int) -> None:
    """Raises `EngineError` (429) when one more request would be too many."""
    if is_overloaded(running, waiting, lanes, max_pending):
        raise EngineError(
            f"this server answers {counted(running, 'request')} and has {waiting} waiting, which is all it takes "
            f"(--max-concurrency {lanes}, --max-pending-requests {max_pending}); try again later",
            code="server_overloaded",
            status=429,
        )


def check_request(request: Request, vocab_size: int) -> None:
    """Raises `RequestError` (400) for a prompt or a limit that cannot be served."""
    if not request.token_ids:
        raise RequestError("the prompt has no tokens; at least one is needed", code="invalid_prompt")
    if min(request.token_ids) < 0 or max(request.token_ids) >= vocab_size:
        raise RequestError(f"the prompt has token ids outside 0 to {vocab_size - 1}", code="invalid_prompt")
    if request.max_tokens < 0:
        raise RequestError(f"max_tokens is {request.max_tokens}; it must be 0 or more", param="max_tokens")


def timed_out(waited_s: float) -> EngineError:
    return EngineError(
        f"no lane became free within {waited_s:.1f} s (pending_timeout_ms of the request, or --pending-timeout-ms); "
        "try again later",
        code="request_queue_timeout",
    )


def failure(id: str, error: LonglaneError) -> Failed:
    """`error` as the last message of a request."""
    return Failed(id=id, message=error.message, code=error.code, status=error.status, param=error.param)

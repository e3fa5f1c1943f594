"""From the logits of a run of columns to the tokens that stand: the one place where tokens are chosen.

Each column draws from its own filtered distribution with the random number of its position, exactly as plain decode
would. A draft is accepted if it is the token so drawn. That is exact token for token, not only in distribution, and
a draft d is accepted with probability p(d), as in rejection sampling from a one-hot proposal. See `docs/sampling.md`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from longlane.errors import EngineError
from longlane.kernels import sampling
from longlane.sampling.logprobs import token_logprobs
from longlane.sampling.philox import uniform
from longlane.sampling.state import RowState
from longlane.types import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Decision:
    """What a run decided.

    token_ids: to publish, in order; a stop id is withheld. accepted: drafts that belong to the state, which therefore
    advances over accepted + 1 input tokens; the last token decided is the next input and is not in the state yet.
    logprobs: one entry per published token, where the request asked for them.
    """

    token_ids: list[int]
    accepted: int
    finish: FinishReason | None
    stop_id: int | None
    logprobs: list[TokenLogprobs] | None


def decide(logits: Tensor, drafts: Sequence[int], row: RowState) -> Decision:
    """logits [len(drafts) + 1, V]: column i follows the i-th draft (column 0 the last token). Advances `row`.

    Raises EngineError where no token can be chosen: logits with NaN or infinity, or every token masked. The tokens
    before that column stay in `row`, which is of no use then.
    """
    assert logits.shape[0] == len(drafts) + 1, (logits.shape, len(drafts))
    logits = _plain_float(logits)[:, : row.vocab_size]
    best = _best(logits) if _is_plain_greedy(row) else None
    return _run(logits, drafts, row, best)


def decide_rows(
    logits: Tensor,
    drafts: Sequence[Sequence[int]],
    rows: Sequence[RowState],
    *,
    starts: Sequence[int] | None = None,
    best: list[tuple[int, float]] | None = None,
) -> list[Decision | EngineError]:
    """`decide` for many rows: row r has len(drafts[r]) + 1 columns of logits from starts[r] on, or packed in order. A
    row that cannot be decided yields its error, the others are not touched by it. Plain greedy rows share one reduction
    and one transfer, or `best`: lowest id of the largest logit and that logit, of every column of `logits`.
    """
    if starts is None:
        starts = [0, *accumulate(len(run) + 1 for run in drafts)][:-1]
    assert logits.shape[0] >= starts[-1] + len(drafts[-1]) + 1, (logits.shape, starts, drafts)
    logits = _plain_float(logits)
    if best is None and len({row.vocab_size for row in rows}) == 1 and any(_is_plain_greedy(row) for row in rows):
        best = _best(logits[:, : rows[0].vocab_size])
    out: list[Decision | EngineError] = []
    for start, run, row in zip(starts, drafts, rows, strict=True):
        span = slice(start, start + len(run) + 1)
        shared = best[span] if best is not None and _is_plain_greedy(row) else None
        try:
            out.append(_run(logits[span, : row.vocab_size], run, row, shared))
        except EngineError as error:
            out.append(error)
    return out


def _run(logits: Tensor, drafts: Sequence[int], row: RowState, best: list[tuple[int, float]] | None) -> Decision:
    decided: list[int] = []
    logprobs: list[TokenLogprobs] | None = None if row.request.top_logprobs is None else []
    for column in range(len(drafts) + 1):
        if row.forcing:
            drawn = -1
        elif best is not None:
            drawn = _finite(*best[column], row)
        else:
            drawn = _choose(logits[column], row)
        token = row.take(drawn)
        decided.append(token)
        if logprobs is not None and row.stop_id is None:
            logprobs.append(token_logprobs(logits[column], token, row.request.top_logprobs or 0))
        if row.finish or column == len(drafts) or token != drafts[column]:
            break
    published = decided if row.stop_id is None else decided[:-1]
    return Decision(published, len(decided) - 1, row.finish, row.stop_id, logprobs)


def _choose(logits: Tensor, row: RowState) -> int:
    """The token drawn from [V] logits by the parameters of `row`."""
    adjusted = row.penalties.apply(logits) if row.penalties else logits
    allowed = row.mask(row.generated) if row.mask else None
    if allowed is not None:
        # masked_fill must not hide a fault of the model under the mask.
        adjusted = torch.where(allowed | adjusted.isnan(), adjusted, -math.inf)
    params = row.params
    if params.temperature == 0:
        return _finite(*_best(adjusted[None])[0], row)
    peak = float(adjusted.max())
    _finite(0, peak, row)
    return sampling.draw(
        adjusted,
        uniform(params.seed, row.position),
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
    )


def _is_plain_greedy(row: RowState) -> bool:
    return row.params.temperature == 0 and row.penalties is None and row.mask is None


def _best(logits: Tensor) -> list[tuple[int, float]]:
    """Per column of [T, V]: the lowest id of the largest logit, and that logit (NaN if any is)."""
    ids = logits.argmax(dim=1)
    values = logits.gather(1, ids[:, None])[:, 0]
    return list(zip(ids.tolist(), values.tolist(), strict=True))


def _finite(token: int, peak: float, row: RowState) -> int:
    if math.isfinite(peak):
        return token
    cause = "every token is masked" if peak == -math.inf else "the model computed logits that are not finite"
    raise EngineError(
        f"no token can be chosen at position {row.position} of request {row.request.id}: {cause}",
        code="undecidable_token",
        status=500,
    )


def _plain_float(logits: Tensor) -> Tensor:
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()

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

# Parameters of `draw_rows` for a column that nobody draws from.
_GREEDY = (0.0, 0.0, 0.0, 1.0, 0.0)


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
    [result] = decide_rows(logits, [drafts], [row])
    if isinstance(result, EngineError):
        raise result
    return result


def decide_rows(
    logits: Tensor,
    drafts: Sequence[Sequence[int]],
    rows: Sequence[RowState],
    *,
    starts: Sequence[int] | None = None,
    best: list[tuple[int, float]] | None = None,
    drawn: Tensor | None = None,
) -> list[Decision | EngineError]:
    """`decide` for many rows of one vocabulary: row r has len(drafts[r]) + 1 columns of logits from starts[r] on, or
    packed in order. A row that cannot be decided yields its error, the others are not touched by it.

    Rows without penalties and masks share one transfer from the device for greedy and one for sampled ones, unless they
    are there: `best` is the lowest id of the largest logit and that logit, of every column of `logits`; `drawn` is what
    `draw_ahead` returned.
    """
    if starts is None:
        starts = [0, *accumulate(len(run) + 1 for run in drafts)][:-1]
    assert logits.shape[0] >= starts[-1] + len(drafts[-1]) + 1, (logits.shape, starts, drafts)
    size = rows[0].vocab_size
    assert all(row.vocab_size == size for row in rows), [row.vocab_size for row in rows]
    logits = _plain_float(logits)
    if drawn is None:
        drawn = draw_ahead(logits, drafts, rows, starts=starts)
    if drawn is not None:
        # Greedy rows too: what has temperature 0 is drawn greedily.
        ids, peaks = drawn.tolist()
        best = list(zip(map(int, ids), peaks, strict=True))
    elif best is None and any(_is_plain(row) for row in rows):
        best = _best(logits[:, :size])
    out: list[Decision | EngineError] = []
    for start, run, row in zip(starts, drafts, rows, strict=True):
        span = slice(start, start + len(run) + 1)
        try:
            out.append(_run(logits[span, :size], run, row, best[span] if best and _is_plain(row) else None))
        except EngineError as error:
            out.append(error)
    return out


def draw_ahead(
    logits: Tensor,
    drafts: Sequence[Sequence[int]],
    rows: Sequence[RowState],
    *,
    starts: Sequence[int] | None = None,
) -> Tensor | None:
    """Draw every column of the rows that can be drawn before the column in front of it is decided: those with neither
    penalties nor a mask. Arguments as for `decide_rows`. Nothing waits for the device.

    Returns [2, columns] float64 on the device of the logits, tokens and largest logits; None where no row samples.
    """
    if not any(_is_plain(row) and row.params.temperature > 0 for row in rows):
        return None
    if starts is None:
        starts = [0, *accumulate(len(run) + 1 for run in drafts)][:-1]
    columns = [_GREEDY] * logits.shape[0]
    for start, run, row in zip(starts, drafts, rows, strict=True):
        params = row.params
        if _is_plain(row) and params.temperature > 0:
            for column in range(len(run) + 1):
                u = uniform(params.seed, row.position + column)
                columns[start + column] = (u, params.temperature, params.top_k, params.top_p, params.min_p)
    logits = _plain_float(logits)[:, : rows[0].vocab_size]
    # From pinned memory a copy does not wait for what the device is still doing.
    parameters = torch.tensor(columns, dtype=torch.float64, pin_memory=logits.is_cuda)
    parameters = parameters.to(logits.device, non_blocking=True).T.contiguous()
    ids = sampling.draw_rows(logits, parameters)
    return torch.stack((ids.double(), logits.amax(dim=1).double()))


def _run(logits: Tensor, drafts: Sequence[int], row: RowState, chosen: list[tuple[int, float]] | None) -> Decision:
    decided: list[int] = []
    logprobs: list[TokenLogprobs] | None = None if row.request.top_logprobs is None else []
    for column in range(len(drafts) + 1):
        if row.forcing:
            drawn = -1
        elif chosen is not None:
            drawn = _finite(*chosen[column], row)
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
    best, peak = _best(adjusted[None])[0]
    _finite(best, peak, row)
    if params.temperature == 0:
        return best
    u = uniform(params.seed, row.position)
    column = torch.tensor(
        [[u], [params.temperature], [params.top_k], [params.top_p], [params.min_p]], dtype=torch.float64
    )
    return int(sampling.draw_rows(adjusted[None], column.to(logits.device)))


def _is_plain(row: RowState) -> bool:
    return row.penalties is None and row.mask is None


def _best(logits: Tensor) -> list[tuple[int, float]]:
    """Per column of [T, V]: the lowest id of the largest logit, and that logit (NaN if any is)."""
    ids, peaks = sampling.greedy(logits)
    return list(zip(ids.tolist(), peaks.tolist(), strict=True))


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

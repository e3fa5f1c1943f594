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

# Uniform number, temperature, top_k, top_p, min_p.
ColumnParameters = tuple[float, float, float, float, float]
_GREEDY: ColumnParameters = (0.0, 0.0, 0.0, 1.0, 0.0)


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
    best: Sequence[tuple[int, float]] | None = None,
) -> list[Decision | EngineError]:
    """`decide` for many rows of one vocabulary: row r has len(drafts[r]) + 1 columns of logits from starts[r] on, or
    packed in order. A row that cannot be decided yields its error, the others are not touched by it.

    `best` is what the step has found already: of every column of `logits` the token that `column_parameters` of its row
    draw from it, and its largest logit. It is all that rows without penalties and mask need.
    """
    starts = [0, *accumulate(len(run) + 1 for run in drafts)][:-1] if starts is None else starts
    assert logits.shape[0] >= starts[-1] + len(drafts[-1]) + 1, (logits.shape, starts, drafts)
    size = rows[0].vocab_size
    assert all(row.vocab_size == size for row in rows), [row.vocab_size for row in rows]
    if logits.shape[1] > size or logits.dtype not in (torch.float32, torch.float64):
        logits = logits[:, :size] if logits.dtype == torch.float64 else logits[:, :size].float()
    if best is None or not all(map(_is_plain, rows)):
        best = _draw(logits, drafts, rows, starts)
    out: list[Decision | EngineError] = []
    for start, run, row in zip(starts, drafts, rows, strict=True):
        try:
            out.append(_run(logits, start, run, row, best))
        except EngineError as error:
            out.append(error)
    return out


def column_parameters(row: RowState, columns: int) -> list[ColumnParameters]:
    """What the next columns of `row` are drawn with, see `kernels.sampling.draw_rows`. It is known before it is known
    which drafts stand, since the random number of a position depends on nothing else."""
    params = row.params
    if params.temperature == 0:
        return [_GREEDY] * columns
    filters = (params.temperature, params.top_k, params.top_p, params.min_p)
    return [(uniform(params.seed, row.position + column), *filters) for column in range(columns)]


def _draw(
    logits: Tensor, drafts: Sequence[Sequence[int]], rows: Sequence[RowState], starts: Sequence[int]
) -> list[tuple[int, float]]:
    """(token, largest logit) of all columns at once, each as if the drafts in front of it stood: where they do not,
    nobody looks at it. One transfer from the device."""
    if not all(map(_is_plain, rows)):
        # Log probabilities are of the logits as they were.
        logits = logits.clone()
    columns = [_GREEDY] * logits.shape[0]
    for start, run, row in zip(starts, drafts, rows, strict=True):
        span = slice(start, start + len(run) + 1)
        columns[span] = column_parameters(row, len(run) + 1)
        if not _is_plain(row):
            logits[span] = _adjusted(logits[span], run, row)
    if all(column is _GREEDY for column in columns):
        ids, peaks = sampling.greedy(logits)
    else:
        # From pinned memory a copy does not wait for what the device is still doing.
        parameters = torch.tensor(columns, dtype=torch.float64, pin_memory=logits.is_cuda)
        ids, peaks = sampling.draw_rows(logits, parameters.to(logits.device, non_blocking=True).T.contiguous())
    tokens, largest = torch.stack((ids.double(), peaks.double())).tolist()
    return list(zip(map(int, tokens), largest, strict=True))


def _run(
    logits: Tensor, start: int, drafts: Sequence[int], row: RowState, chosen: Sequence[tuple[int, float]]
) -> Decision:
    """Of the columns from `start` on. Logits are looked at only where log probabilities are asked for."""
    decided: list[int] = []
    logprobs: list[TokenLogprobs] | None = None if row.request.top_logprobs is None else []
    for column in range(len(drafts) + 1):
        token = row.take(-1 if row.forcing else _finite(*chosen[start + column], row))
        decided.append(token)
        if logprobs is not None and row.stop_id is None:
            logprobs.append(token_logprobs(logits[start + column], token, row.request.top_logprobs or 0))
        if row.finish or column == len(drafts) or token != drafts[column]:
            break
    published = decided if row.stop_id is None else decided[:-1]
    return Decision(published, len(decided) - 1, row.finish, row.stop_id, logprobs)


def _adjusted(logits: Tensor, drafts: Sequence[int], row: RowState) -> Tensor:
    """[T, V] logits under the penalties and the mask of `row`, as they are after 0, 1, ... of the drafts."""
    out = row.penalties.apply(logits, drafts) if row.penalties else logits
    if row.mask:
        for column in range(len(drafts) + 1):
            allowed = row.mask([*row.generated, *drafts[:column]])
            if allowed is not None:
                # A mask must not hide a fault of the model under it.
                out[column] = torch.where(allowed | out[column].isnan(), out[column], -math.inf)
    return out


def _is_plain(row: RowState) -> bool:
    return row.penalties is None and row.mask is None


def _finite(token: int, peak: float, row: RowState) -> int:
    if math.isfinite(peak):
        return token
    cause = "every token is masked" if peak == -math.inf else "the model computed logits that are not finite"
    raise EngineError(
        f"no token can be chosen at position {row.position} of request {row.request.id}: {cause}",
        code="undecidable_token",
        status=500,
    )

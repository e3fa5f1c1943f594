"""The CPU route of Gated DeltaNet against its oracle, and what verify and fold promise."""

import pytest
import torch

from longlane.kernels.gdn import Record, cpu, naive
from longlane.kernels.ragged import Ragged
from support.rows import SHAPES, make_rows

VALUE_HEADS, KEY_HEADS, VALUE_DIM, KEY_DIM, TAPS = 6, 2, 24, 16, 4
CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Case:
    """Inputs of one step and caches whose unused slots, and those of rows that begin, are NaN."""

    def __init__(self, rows: Ragged, dtype: torch.dtype, kept: torch.dtype | None = None) -> None:
        torch.manual_seed(7)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.rows = rows
        self.x = torch.randn(rows.tokens, CHANNELS, dtype=dtype)
        self.a = torch.randn(rows.tokens, VALUE_HEADS, dtype=dtype)
        self.b = torch.randn(rows.tokens, VALUE_HEADS, dtype=dtype)
        self.weight = torch.randn(TAPS, CHANNELS, dtype=wide)
        self.a_log = torch.randn(VALUE_HEADS, dtype=wide)
        self.dt_bias = torch.randn(VALUE_HEADS, dtype=wide)
        self.state = torch.full((rows.rows + 2, VALUE_HEADS, VALUE_DIM, KEY_DIM), torch.nan, dtype=kept or wide)
        self.history = torch.full((rows.rows + 2, TAPS, CHANNELS), torch.nan, dtype=dtype)
        for slot, context in zip(rows.slots.tolist(), rows.context, strict=True):
            if context:
                self.state[slot] = torch.randn_like(self.state[slot])
                for position in range(max(0, context - TAPS + 1), context):
                    self.history[slot, position % TAPS] = torch.randn(CHANNELS)

    def run(self, route, advance: bool = True):
        """(convolved, mixed, state, history) after one step on copies of the caches."""
        state, history = self.state.clone(), self.history.clone()
        qkv = route.causal_conv(self.x, self.weight, history, self.rows, advance=advance)
        out = route.delta_rule(qkv, self.a, self.b, self.a_log, self.dt_bias, state, self.rows, advance=advance)
        return qkv, out, state, history


def assert_close(results, references, dtype):
    for result, reference in zip(results, references, strict=True):
        assert torch.equal(result.isnan(), reference.isnan())
        torch.testing.assert_close(
            result.nan_to_num(), reference.nan_to_num(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_step_equals_the_recurrence(shape, dtype):
    case = Case(make_rows(*SHAPES[shape]), dtype)
    assert_close(case.run(cpu), case.run(naive), dtype)


@pytest.mark.parametrize("rows", [((4,), (9,)), ((3, 3), (62, 127)), ((1, 1), (5, 6))], ids=str)
def test_verify_leaves_the_state_and_fold_advances_it_as_decode_does(rows):
    lengths, context = rows
    case = Case(make_rows(lengths, context), torch.float64)
    qkv, verified, state, history = case.run(cpu, advance=False)
    torch.testing.assert_close(state, case.state, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(history, case.history, rtol=0, atol=0, equal_nan=True)

    accepted = torch.tensor([lengths[0] - row for row in range(len(lengths))])
    record = Record(case.x, qkv, case.a, case.b)
    cpu.fold(record, accepted, case.a_log, case.dt_bias, state, history, case.rows)
    for row, count in enumerate(accepted.tolist()):
        decoded_state, decoded_history = case.state.clone(), case.history.clone()
        for column in range(count):
            one = make_rows((1,), (context[row] + column,))
            one.slots.copy_(case.rows.slots[row : row + 1])
            token = slice(lengths[0] * row + column, lengths[0] * row + column + 1)
            step = cpu.causal_conv(case.x[token], case.weight, decoded_history, one, advance=True)
            out = cpu.delta_rule(
                step, case.a[token], case.b[token], case.a_log, case.dt_bias, decoded_state, one, advance=True
            )
            torch.testing.assert_close(out, verified[token], rtol=1e-13, atol=1e-14)
        slot = case.rows.slots[row]
        torch.testing.assert_close(state[slot], decoded_state[slot], rtol=1e-13, atol=1e-14)
        assert torch.equal(history[slot].nan_to_num(7), decoded_history[slot].nan_to_num(7))


def test_fold_equals_its_oracle():
    lengths, context = (4, 4, 4), (70, 0, 3)
    case = Case(make_rows(lengths, context), torch.float64)
    record = Record(case.x, case.run(naive, advance=False)[0], case.a, case.b)
    accepted = torch.tensor([0, 4, 2])
    results = []
    for route in (cpu, naive):
        state, history = case.state.clone(), case.history.clone()
        # A row that folds nothing keeps its entry; the one that begins has none to keep.
        route.fold(record, accepted, case.a_log, case.dt_bias, state, history, case.rows)
        results.append((state, history))
    assert_close(*results, torch.float64)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_state_in_bfloat16_equals_the_recurrence(shape):
    case = Case(make_rows(*SHAPES[shape]), torch.float32, torch.bfloat16)
    assert_close(case.run(cpu), case.run(naive), torch.bfloat16)


def test_a_state_in_bfloat16_is_rounded_in_a_verified_run_as_in_decode():
    columns, accepted = 4, 3
    case = Case(make_rows((columns,), (70,)), torch.float64, torch.bfloat16)
    qkv, verified, folded, history = case.run(cpu, advance=False)
    record = Record(case.x, qkv, case.a, case.b)
    cpu.fold(record, torch.tensor([accepted]), case.a_log, case.dt_bias, folded, history, case.rows)
    decoded = case.state.clone()
    for column in range(accepted):
        one = make_rows((1,), (70 + column,))
        one.slots.copy_(case.rows.slots)
        token = slice(column, column + 1)
        gates = (case.a[token], case.b[token], case.a_log, case.dt_bias)
        out = cpu.delta_rule(qkv[token], *gates, decoded, one, advance=True)
        torch.testing.assert_close(out, verified[token], rtol=1e-13, atol=1e-14)
    assert torch.equal(folded.nan_to_num(), decoded.nan_to_num())


def test_strong_decay_stays_finite():
    case = Case(make_rows((128,), (64,)), torch.float32)
    case.a_log += 4
    assert_close(case.run(cpu), case.run(naive), torch.float32)

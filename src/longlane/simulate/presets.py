"""Cards as the published figures describe them. A preset is fitted to its figures, so there are no other numbers."""

from dataclasses import dataclass
from functools import cache

import numpy as np

from longlane.errors import ConfigError
from longlane.simulate.cost import FIXED_S, KV_BYTES, CostModel, decode_bytes, token_pairs

# Published acceptance of MTP3 over a mixed corpus, and tokens a round that follow: 1 + 3 x 0.487.
CORPUS = 2.461
# Attention over 131,072 tokens is as much work as the rest of a token: 48.7 GFLOP each.
DEPTH_OF_EQUAL_WORK = 131_072


@dataclass(frozen=True, slots=True)
class Decode:
    """A published rate: tokens per second of `rows` lanes at `depth`, each with `per_round` tokens a round."""

    label: str
    rate: float
    rows: int = 1
    drafts: int = 0
    depth: int = 0
    per_round: float = 1.0

    @property
    def seconds(self) -> float:
        return self.rows * self.per_round / self.rate


@dataclass(frozen=True, slots=True)
class Prefill:
    """A published rate: tokens per second over a whole prompt, in chunks of at most `chunk`."""

    label: str
    rate: float
    tokens: int
    chunk: int = 1024

    @property
    def seconds(self) -> float:
        return self.tokens / self.rate


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A card's figures. bandwidth: bytes per second of its memory. kv_tokens: the pool of a published setup.

    Where no figure tells a parameter, it is tied: keys and values are read like weights (`deep_decode` False), a chunk
    costs half a plain step (`chunk_sweep` False), depth costs what its share of the work says (`deep_prefill` False),
    and many columns cost nothing at once (`many_jump` False).
    """

    about: str
    bandwidth: float
    kv_tokens: int
    free_columns: int
    decode: tuple[Decode, ...]
    prefill: tuple[Prefill, ...]
    kv_bytes: int = KV_BYTES
    deep_decode: bool = False
    many_jump: bool = False
    deep_prefill: bool = True
    chunk_sweep: bool = False


CARDS = {
    "h200": Card(
        about="NVIDIA H200, llama.cpp with Q4_K/Q5_K weights of the same geometry, bf16 KV",
        bandwidth=4.62e12,
        kv_tokens=1_048_576,
        free_columns=1,
        kv_bytes=65_536,
        deep_decode=True,
        many_jump=True,
        deep_prefill=False,
        decode=(
            Decode("plain, shallow", 86.5),
            Decode("plain at 8,192", 84.2, depth=8192),
            Decode("plain at 65,536", 77.0, depth=65_536),
            Decode("4 columns", 191, rows=4),
            Decode("8 columns", 287, rows=8),
            Decode("16 columns", 624, rows=16),
        ),
        prefill=(Prefill("2,048 tokens", 2619, 2048, 2048), Prefill("8,192 tokens", 2702, 8192, 2048)),
    ),
    "4080s": Card(
        about="RTX 4080 Super 32 GB, NInfer forks, int8 KV",
        bandwidth=736e9,
        kv_tokens=524_288,
        free_columns=4,
        chunk_sweep=True,
        decode=(
            Decode("plain", 37.15),
            Decode("MTP3, 1 lane", 88.2, drafts=3, per_round=2.75),
            Decode("MTP3, 2 equal lanes", 142.4, rows=2, drafts=3, per_round=2.75),
        ),
        prefill=(
            Prefill("8,192 tokens, chunk 256", 1262, 8192, 256),
            Prefill("8,192 tokens, chunk 512", 1319, 8192, 512),
            Prefill("8,192 tokens, chunk 1,024", 1348, 8192),
            Prefill("8,192 tokens, chunk 2,048", 1360, 8192, 2048),
            Prefill("2,048 tokens", 1371, 2048),
            Prefill("63,000 tokens in 53 s", 63_000 / 53, 63_000),
            Prefill("127,000 tokens in 126 s", 127_000 / 126, 127_000),
            Prefill("200,000 tokens in 235 s", 200_000 / 235, 200_000),
            Prefill("258,640 tokens in 335 s", 258_640 / 335, 258_640),
        ),
    ),
    "4090": Card(
        about="RTX 4090 24 GB, NInfer forks, int8 KV",
        bandwidth=1008e9,
        kv_tokens=172_032,
        free_columns=4,
        deep_decode=True,
        decode=(
            Decode("plain, shallow", 50.5),
            Decode("plain at 131,072", 39.6, depth=131_072),
            Decode("MTP3, code", 148.6, drafts=3, per_round=3.43),
            Decode("MTP3, corpus", 106.5, drafts=3, per_round=CORPUS),
            Decode("MTP3, corpus, 2 lanes (about 1.5x)", 159.8, rows=2, drafts=3, per_round=CORPUS),
        ),
        prefill=(
            Prefill("2,048 tokens", 1938, 2048),
            Prefill("4,096 tokens", 1918, 4096),
            Prefill("32K tokens", 2027, 32_768),
            Prefill("64K tokens", 1857, 65_536),
            Prefill("128K tokens", 1581, 131_072),
            Prefill("192K tokens", 1381, 196_608),
            Prefill("256K tokens", 1228, 262_144),
        ),
    ),
    "3090": Card(
        about="RTX 3090 24 GB, NInfer forks, int8 KV",
        bandwidth=936e9,
        kv_tokens=180_224,
        free_columns=4,
        decode=(
            Decode("plain", 36.9),
            Decode("MTP2", 65.7, drafts=2, per_round=2.19),
            Decode("MTP3", 71.6, drafts=3, per_round=CORPUS),
            Decode("MTP3, whole wave, 1 lane", 61.8, drafts=3, per_round=2.12),
            Decode("MTP3, whole wave, 2 lanes", 77.1, rows=2, drafts=3, per_round=2.12),
            Decode("MTP3, whole wave, 4 lanes", 80.2, rows=4, drafts=3, per_round=2.12),
        ),
        prefill=(
            Prefill("1K tokens", 1008, 1024),
            Prefill("4K tokens", 995, 4096),
            Prefill("16K tokens", 947, 16_384),
            Prefill("51K tokens", 836, 52_224),
        ),
    ),
}


def card(name: str) -> Card:
    if name not in CARDS:
        raise ConfigError(f"--preset {name} is not known; one of {', '.join(CARDS)}")
    return CARDS[name]


@cache
def preset(name: str) -> CostModel:
    """The cost model that comes nearest to a card's figures: least squares of the relative errors.

    Raises ConfigError for an unknown name.
    """
    of = card(name)
    per_byte, per_kv_byte, many_s, column_s = _fit_decode(of)
    token_s, depth_s, chunk_s = _fit_prefill(of, FIXED_S + decode_bytes(1, 0) * per_byte)
    return CostModel(
        weight_rate=1 / per_byte,
        kv_rate=1 / per_kv_byte,
        many_s=many_s,
        column_s=column_s,
        free_columns=of.free_columns,
        token_s=token_s,
        depth_s=depth_s,
        chunk_s=chunk_s,
        kv_bytes=of.kv_bytes,
    )


def _fit_decode(of: Card) -> tuple[float, float, float, float]:
    """Seconds per byte of weights, per byte of keys and values, once for many columns, and per column of those."""
    rows = []
    for figure in of.decode:
        beyond = max(0, figure.rows * (figure.drafts + 1) - of.free_columns)
        row = [decode_bytes(figure.rows, figure.drafts), float(beyond)]
        row += [float(of.kv_bytes * figure.rows * figure.depth)] if of.deep_decode else []
        row += [float(beyond > 0)] if of.many_jump else []
        rows.append(row)
    seconds = [figure.seconds for figure in of.decode]
    weight, column, *rest = _solve(rows, [took - FIXED_S for took in seconds], seconds)
    return weight, rest[0] if of.deep_decode else weight, rest[-1] if of.many_jump else 0.0, column


def _fit_prefill(of: Card, plain_s: float) -> tuple[float, float, float]:
    """Seconds per token, per pair of tokens and per chunk."""
    rows = [
        [float(figure.tokens), token_pairs(0, figure.tokens), float(-(-figure.tokens // figure.chunk))]
        for figure in of.prefill
    ]
    weights = [figure.seconds for figure in of.prefill]
    if of.chunk_sweep:
        token, pair, chunk = _solve(rows, weights, weights)
        return token, pair, chunk
    chunk = plain_s / 2
    seconds = [figure.seconds - chunk * row[2] for figure, row in zip(of.prefill, rows, strict=True)]
    if of.deep_prefill:
        token, pair = _solve([row[:2] for row in rows], seconds, weights)
        return token, pair, chunk
    (token,) = _solve([[row[0] + row[1] / DEPTH_OF_EQUAL_WORK] for row in rows], seconds, weights)
    return token, token / DEPTH_OF_EQUAL_WORK, chunk


def _solve(rows: list[list[float]], seconds: list[float], weights: list[float]) -> list[float]:
    """Parameters with the least squares of errors relative to `weights`, in units that keep the columns comparable."""
    design = np.array(rows) / np.array(weights)[:, None]
    scale = np.abs(design).max(axis=0)
    found, *_ = np.linalg.lstsq(design / scale, np.array(seconds) / np.array(weights), rcond=None)
    return [float(value) for value in found / scale]


def fit_table(name: str) -> list[tuple[str, float, float]]:
    """Each figure of a card: label, published rate and the model's, in tokens per second."""
    of, model = card(name), preset(name)
    rows = []
    for figure in of.decode:
        seconds = model.decode_s([figure.depth] * figure.rows, figure.drafts)
        rows.append((f"decode: {figure.label}", figure.rate, figure.rows * figure.per_round / seconds))
    for prompt in of.prefill:
        seconds = model.prompt_s(prompt.tokens, prompt.chunk)
        rows.append((f"prefill: {prompt.label}", prompt.rate, prompt.tokens / seconds))
    return rows

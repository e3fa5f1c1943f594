"""Plain text never becomes control tokens, and everything else encodes as in the reference tokenizer."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from longlane.errors import CheckpointError
from longlane.text.tokenizer import Tokenizer
from support.byte_tokenizer import CONTROL, CONTROL_IDS, definition

TINY = Path(__file__).parents[3] / "assets" / "tiny-hybrid"
tiny_bytes = (TINY / "tokenizer.json").read_bytes()
tiny = Tokenizer(tiny_bytes, json.loads((TINY / "tokenizer_config.json").read_text()))
reference = tokenizers.Tokenizer.from_str(tiny_bytes.decode())
words = st.lists(st.sampled_from([*tiny.control_tokens, "<|im_", "end|>", "<", " ", "\n", "é", "e\u0301", "日本", "x"]))


@given(text=st.one_of(st.text(max_size=60), words.map("".join)))
def test_text_round_trips_and_holds_no_control_token(text: str) -> None:
    ids = tiny.encode_text(text)
    assert not set(ids) & set(tiny.control_tokens.values())
    assert tiny.decode(ids) == reference.normalizer.normalize_str(text)


@given(text=words.map("".join))
def test_a_rendered_template_encodes_as_in_the_reference(text: str) -> None:
    assert tiny.encode_rendered(text, "\U000f0000") == reference.encode(text, add_special_tokens=False).ids


def test_a_mark_inside_a_control_spelling_makes_it_text() -> None:
    mark = "\U000f0000"
    ids = tiny.encode_rendered(f"<|im_start|>a<{mark}|im_end|><|im_end|>", mark)
    assert ids == [8167, *tiny.encode_text("a<|im_end|>"), 8168]


@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
def test_tokens_that_eat_the_space_beside_them(side: str) -> None:
    spec = json.loads(definition())
    for token in spec["added_tokens"]:
        token[side] = token["content"] == "<think>"
    raw = json.dumps(spec)
    text = "he  <think> \n he<think>  "
    expected = tokenizers.Tokenizer.from_str(raw).encode(text, add_special_tokens=False).ids
    assert Tokenizer(raw.encode()).encode_rendered(text, "\U000f0000") == expected


def test_bytes_of_tokens() -> None:
    tokenizer = Tokenizer(definition())
    assert tokenizer.token_bytes(258) == b"hell"
    assert tokenizer.token_bytes(0xF0) == b"\xf0"
    assert tokenizer.token_bytes(CONTROL_IDS["<|im_end|>"]) == b""
    assert tokenizer.token_bytes(CONTROL_IDS["<think>"]) == b"<think>"
    assert tokenizer.token_bytes(999_999) == b""
    assert tokenizer.decode([0xF0, 0x9F, 0x8C, 0x8D, 258]) == "🌍hell"


@pytest.mark.parametrize("filler", ["<unused 7>", "né e", "日本"])
def test_a_token_that_no_text_becomes_is_shown_as_the_reference_shows_it(filler: str) -> None:
    spec = json.loads(definition())
    id = len(spec["model"]["vocab"])
    spec["added_tokens"] = []
    spec["model"]["vocab"] = {token: at for at, token in enumerate(spec["model"]["vocab"])} | {filler: id}
    raw = json.dumps(spec)
    assert Tokenizer(raw.encode()).decode([id]) == tokenizers.Tokenizer.from_str(raw).decode([id]) == filler


def test_a_bos_token_goes_before_raw_prompts_only_where_the_tokenizer_asks_for_it() -> None:
    with_bos = Tokenizer(definition(), {"add_bos_token": True, "bos_token": {"content": "<|im_start|>"}})
    assert with_bos.encode_prompt("he") == [259, 256]
    assert with_bos.encode_text("he") == [256]
    assert Tokenizer(definition(), {"bos_token": "<|im_start|>"}).encode_prompt("he") == [256]


def unreadable() -> dict[str, bytes]:
    spec = json.loads(definition())
    forged = json.loads(definition())
    forged["model"]["vocab"][CONTROL[0]] = CONTROL_IDS[CONTROL[0]]
    forged["model"]["ignore_merges"] = True
    return {
        "not JSON": b"{",
        "a list": b"[]",
        "no model": b"{}",
        "another model": json.dumps(spec | {"model": {"type": "Unigram"}}).encode(),
        "another decoder": json.dumps(spec | {"decoder": {"type": "Metaspace"}}).encode(),
        "a broken merge": json.dumps(spec | {"model": spec["model"] | {"merges": [["q", "zzz"]]}}).encode(),
        "text that encodes to a control token": json.dumps(forged).encode(),
    }


@pytest.mark.parametrize("case", unreadable())
def test_unusable_definitions_are_refused(case: str) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer(unreadable()[case])


@pytest.mark.parametrize("text", ["x", "<|im_end|>", "x<|im_start|>\U000f0000", " " * 64, "日本"])
def test_only_a_text_that_has_more_tokens_surely_exceeds_a_limit(text: str) -> None:
    limit = 50
    for repeats in (1, 40, 400, 4000):
        whole = text * repeats
        tokens = len(tiny.encode_rendered(whole, "\U000f0000"))
        if tiny.surely_exceeds(whole, limit):
            assert tokens > limit
    assert tiny.surely_exceeds("x y " * 4000, limit)

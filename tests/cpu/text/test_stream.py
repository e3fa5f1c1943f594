"""The text of a stream does not depend on how it was cut, and is never more than may be shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longlane.text.stream import StopMatcher, TextStream
from support.byte_tokenizer import CONTROL_IDS, tokenizer

TOKENIZER = tokenizer()
EMOJI = "我爱🌍👩‍👩‍👧é"


def match(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    matcher = StopMatcher(stops)
    sent = []
    for piece in pieces:
        sent.append(matcher.feed(piece))
        if matcher.stopped:
            return sent, matcher.stopped
    return [*sent, matcher.finish()], None


def naive_cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


letters = st.text("ab", max_size=30)


@given(text=letters, stops=st.lists(st.text("ab", min_size=1, max_size=6), max_size=4), data=st.data())
def test_any_chunking_stops_where_the_whole_text_does(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    sent, stopped = match(stops, pieces)
    assert ("".join(sent), stopped) == naive_cut(text, stops)


def test_what_may_become_a_stop_is_withheld_and_a_near_miss_is_delivered_whole() -> None:
    assert match(["DEFGHIJ"], ["xxDEF", "G", "HI", "J", "tail"]) == (["xx", "", "", ""], "DEFGHIJ")
    assert match(["DEFGHIJ"], ["xxDEF", "G", "HI", "K", "tail"]) == (["xx", "", "", "DEFGHIK", "tail", ""], None)


def test_the_first_stop_to_be_complete_wins_and_of_two_the_longer() -> None:
    assert match(["abcdef", "cd"], ["abcdef"]) == (["ab"], "cd")
    assert match(["cd", "bcd"], ["abcd"]) == (["a"], "bcd")


def test_a_failed_match_falls_back_to_a_shorter_one() -> None:
    assert match(["aab"], ["aa", "ab"]) == (["", "a"], "aab")


@given(text=st.text(max_size=40))
def test_text_comes_out_whole_from_single_bytes(text: str) -> None:
    stream = TextStream(TOKENIZER)
    pieces = [stream.feed(byte) for byte in text.encode()]
    assert "".join(pieces) + stream.finish() == text
    assert stream.received == stream.released == len(text)


def test_no_delta_holds_half_a_character() -> None:
    stream = TextStream(TOKENIZER)
    pieces = [stream.feed(byte) for byte in EMOJI.encode()]
    assert "�" not in "".join(pieces)
    assert [piece for piece in pieces if piece] == list(EMOJI)


@given(raw=st.binary(max_size=40))
def test_bytes_that_are_no_text_become_replacement_characters_as_in_the_whole(raw: bytes) -> None:
    stream = TextStream(TOKENIZER)
    text = "".join(stream.feed(byte) for byte in raw) + stream.finish()
    whole = raw.decode(errors="replace")
    assert whole.startswith(text)
    # What is missing at the end is a character that was cut off, or would have been one.
    assert set(whole[len(text) :]) <= {"�"}
    assert len(whole) - len(text) <= 3


def test_a_character_cut_off_at_the_end_is_dropped() -> None:
    stream = TextStream(TOKENIZER)
    assert "".join(stream.feed(byte) for byte in "a🌍".encode()[:-1]) + stream.finish() == "a"


def test_special_tokens_have_no_text_and_other_added_tokens_do() -> None:
    stream = TextStream(TOKENIZER, ["<|im_end|>"])
    ids = [ord("a"), CONTROL_IDS["<|im_end|>"], CONTROL_IDS["<think>"], ord("b")]
    assert "".join(map(stream.feed, ids)) == "a<think>b"
    assert stream.stopped is None


def test_a_stop_may_begin_and_end_inside_tokens() -> None:
    stream = TextStream(TOKENIZER, ["ello"])
    out = [stream.feed(token) for token in (ord("x"), 258, ord("o"), ord("y"))]
    assert out == ["x", "h", "", ""]
    assert stream.stopped == "ello"
    assert (stream.received, stream.released) == (7, 2)


@pytest.mark.parametrize("stops", [["a" * 1000], ["ab" * 500, "aab"]])
def test_long_stop_strings_cost_the_same_per_character(stops: list[str]) -> None:
    assert match(stops, ["a" * 999 + "c"] * 3)[1] is None

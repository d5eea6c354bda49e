"""Text comes out whole: no half characters, nothing past a stop string."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from model_worker.detokenizer import Detokenizer
from tests.tiny_models import byte_tokenizer


def tokens_of(text: str) -> list[int]:
    return byte_tokenizer().encode(text).ids


def single_token_tokenizer(text: str) -> Tokenizer:
    """Its only token is the whole text."""
    return Tokenizer(models.WordLevel({text: 0}, unk_token=text))


def pieces(text: str, stop: tuple[str, ...] = ()) -> tuple[list[str], Detokenizer]:
    detokenizer = Detokenizer(byte_tokenizer(), stop)
    parts = [detokenizer.push(token) for token in tokens_of(text)]
    return [*parts, detokenizer.flush()], detokenizer


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_the_pieces_add_up_to_the_text(text: str) -> None:
    parts, _ = pieces(text)
    assert "".join(parts) == byte_tokenizer().decode(tokens_of(text))


def test_a_character_cut_between_tokens_is_never_sent_in_part() -> None:
    detokenizer = Detokenizer(byte_tokenizer(), ())
    ids = tokens_of("ok 🎉")
    assert "".join(detokenizer.push(token) for token in ids[:-1]) == "ok "
    assert detokenizer.flush() == ""


def test_text_ends_before_a_stop_string_that_spans_tokens() -> None:
    parts, detokenizer = pieces("one STOP two", ("STOP",))
    assert "".join(parts) == "one "
    assert detokenizer.stopped
    assert detokenizer.matched == "STOP"


def test_of_two_stop_strings_that_begin_together_the_longer_matched() -> None:
    detokenizer = Detokenizer(single_token_tokenizer("abcd"), ("b", "bc"))
    assert (detokenizer.push(0), detokenizer.matched) == ("a", "bc")


@given(st.text("ab", max_size=12), st.integers(0, 12))
def test_stop_strings_are_looked_for_after_min_tokens(text: str, min_tokens: int) -> None:
    detokenizer = Detokenizer(byte_tokenizer(), ("ba",), min_tokens=min_tokens)
    parts = [detokenizer.push(token) for token in tokens_of(text)]
    later = text[min_tokens:]
    expected = text[:min_tokens] + (later[: later.index("ba")] if "ba" in later else later)
    assert "".join(parts) + detokenizer.flush() == expected
    assert detokenizer.stopped == ("ba" in later)


def test_a_possible_stop_is_held_until_it_is_none() -> None:
    detokenizer = Detokenizer(byte_tokenizer(), ("STOP",))
    sent = [detokenizer.push(token) for token in tokens_of("STOq")]
    assert sent == ["", "", "", "STOq"]


def test_what_was_held_is_flushed_when_the_text_ends() -> None:
    parts, detokenizer = pieces("abc ST", ("STOP",))
    assert "".join(parts) == "abc ST"
    assert not detokenizer.stopped


@given(st.text("abc", max_size=30), st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
def test_the_first_stop_string_to_complete_ends_the_text(text: str, stop: list[str]) -> None:
    parts, detokenizer = pieces(text, tuple(stop))
    ends = [end for end in range(len(text) + 1) if any(text[:end].endswith(string) for string in stop)]
    if not ends:
        assert "".join(parts) == text
        assert not detokenizer.stopped
    else:
        seen = text[: ends[0]]
        assert "".join(parts) == seen[: min(seen.find(string) for string in stop if string in seen)]
        assert detokenizer.stopped

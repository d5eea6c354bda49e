"""Tokens to text, a piece at a time, up to a stop string.

Knows the tokenizer's incremental decoder and stop strings. Text is handed out
only when it can no longer change: half a character or a possible beginning of
a stop string is held back.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class Detokenizer:
    """The text of one sequence. States: open, then stopped once a stop string was met.

    Stop strings are looked for in what comes after the first `min_tokens` tokens.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], *, min_tokens: int = 0) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(string for string in stop if string)
        self._beginnings = frozenset(
            string[:length] for string in self._stop for length in range(1, len(string))
        )
        self._longest_beginning = max(map(len, self._beginnings), default=0)
        self._tokens_before_stop = min_tokens
        self._held = ""
        self.matched: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string, `matched`, ended the text."""
        return self.matched is not None

    def push(self, token_id: int) -> str:
        """Text that `token_id` completed and that is safe to send; sets `matched` at a stop string."""
        piece = self._stream.step(self._tokenizer, token_id)
        self._tokens_before_stop -= 1
        if not piece or self.stopped:
            return ""
        if not self._stop or self._tokens_before_stop >= 0:
            return piece
        text = self._held + piece
        found = [(at, string) for string in self._stop if (at := text.find(string)) >= 0]
        if found:
            # Of two that begin at one place, the longer says more.
            cut, self.matched = min(found, key=lambda one: (one[0], -len(one[1])))
            self._held = ""
            return text[:cut]
        keep = self._possible_stop_length(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, now that no stop string can follow. Half a character is dropped."""
        held, self._held = self._held, ""
        return held

    def _possible_stop_length(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        for length in range(min(len(text), self._longest_beginning), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0

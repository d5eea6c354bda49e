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
    """The text of one sequence. States: open, then stopped once a stop string was met."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(string for string in stop if string)
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Text that `token_id` completed and that is safe to send; sets `stopped` at a stop string."""
        piece = self._stream.step(self._tokenizer, token_id)
        if not piece or self.stopped:
            return ""
        text = self._held + piece
        cut = min((at for at in (text.find(string) for string in self._stop) if at >= 0), default=-1)
        if cut >= 0:
            self.stopped = True
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
        longest = min(len(text), max((len(string) for string in self._stop), default=1) - 1)
        for length in range(longest, 0, -1):
            end = text[-length:]
            if any(string.startswith(end) for string in self._stop):
                return length
        return 0

"""Text that must match a JSON schema, a regular expression or a grammar: which tokens may come next.

Knows the vocabulary's bytes, compiled structures and how far a text is in one.
Does not know logits, sequences or requests.

Compiling happens in whatever thread a request is submitted from; stepping
happens in the engine's. What either may cost is limited by work, not by the
clock, so that an answer does not depend on how busy the machine is.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray
from tokenizers import Tokenizer

from model_worker.protocol import Grammar, JsonObject, JsonSchema, RefusalCode, Regex, Structure

MAX_CACHED_STRUCTURES = 64
COMPILE_WAIT_SECONDS = 10.0
"""How long a request waits for others' compilations before it is refused; one takes less than a second."""

_MAX_MESSAGE_CHARACTERS = 500
# The library's own limits let one hostile grammar hold up every sequence of a step for 70 ms of CPU time;
# with these the worst one tried took 20 ms, and schemas with 800 properties still fit.
_LIMITS: dict[str, Any] = {
    "max_items_in_row": 500,
    "step_max_items": 10_000,
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
# Enough for indented JSON. Without a bound a model can go on with blanks until max_tokens.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,40}"}


class StructureRefused(Exception):
    """The structure cannot be compiled; the message names the field."""

    def __init__(self, message: str, *, code: RefusalCode = "invalid_request") -> None:
        super().__init__(message)
        self.code = code


class StructureDeadEnd(Exception):
    """No token can follow, or finding those that can costs too much; the text so far is incomplete."""


class Vocabulary:
    """The bytes of every token id, as a matcher needs them. Loaded at first use: it takes about a second."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_token_ids = sorted(eos_token_ids)
        self.has_end = bool(eos_token_ids)
        self._loaded: LLTokenizer | None = None
        self._loading = threading.Lock()
        self.vocab_size = vocab_size

    def load(self) -> LLTokenizer:
        """Raises `StructureRefused` when the tokenizer's tokens have no bytes of their own."""
        with self._loading:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded

    def bytes_of(self, token: int) -> bytes:
        """What a token stands for; a special token's bytes are its name."""
        # The library marks special tokens by the byte 255 and drops that mark: of the token
        # for that byte alone, nothing is left.
        return self.load().decode_bytes([token]) or b"\xff"

    def _load(self) -> LLTokenizer:
        # A model can have more ids than its tokenizer, or fewer.
        size = max(self.vocab_size, self._tokenizer.get_vocab_size())
        try:
            return LLTokenizer(self._tokenizer.to_str(), n_vocab=size, eos_token=self._eos_token_ids or None)
        except ValueError as error:
            raise StructureRefused(
                f"structure, top_logprobs: this model's tokenizer does not offer them ({error})"
            ) from error


class StructureState:
    """How far one text is in its structure. States: open, then complete or dead; a function of the tokens."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    @property
    def is_complete(self) -> bool:
        """Whether the text matches and nothing can follow it."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def accept(self, token: int) -> None:
        """Goes on by a token, one of those allowed. Past a limit, the next `allowed` says so."""
        self._matcher.consume_token(token)

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens can follow, `[vocab]`, never none; the end-of-text tokens where the text may end.

        Raises `StructureDeadEnd`.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise StructureDeadEnd(_brief(self._matcher.get_error()))
        allowed = np.unpackbits(bits, bitorder="little", count=self._vocab_size).view(np.bool_)
        if not allowed.any():
            raise StructureDeadEnd("no token of this model can follow")
        return allowed


class StructureCompiler:
    """Compiles structures and keeps the last ones. Safe from any thread.

    A compiled structure is kept for its scope alone: its lazily built tables
    are shared by all texts that follow it, their size limit too.
    """

    def __init__(self, vocabulary: Vocabulary, *, max_cached: int = MAX_CACHED_STRUCTURES) -> None:
        self._vocabulary = vocabulary
        self._max_cached = max_cached
        self._cached: OrderedDict[tuple[str, Structure], LLMatcher] = OrderedDict()
        self._reading = threading.Lock()
        # One compilation at a time: the forward pass needs the other cores.
        self._compiling = threading.Lock()

    def start(self, scope: str, structure: Structure) -> StructureState:
        """The state of an empty text. Raises `StructureRefused`; blocks while it compiles."""
        matcher = self._recall(scope, structure)
        if matcher is None:
            if not self._compiling.acquire(timeout=COMPILE_WAIT_SECONDS):
                raise StructureRefused("structure: too many are being compiled", code="queue_full")
            try:
                # Another request may have brought it in the meantime.
                matcher = self._recall(scope, structure) or self._compile(structure)
                self._keep(scope, structure, matcher)
            finally:
                self._compiling.release()
        return StructureState(matcher.deep_copy(), self._vocabulary.vocab_size)

    def forget(self, scope: str, structure: Structure) -> None:
        """Lets go of one whose tables reached their limit, so that the next request starts afresh."""
        with self._reading:
            self._cached.pop((scope, structure), None)

    def _recall(self, scope: str, structure: Structure) -> LLMatcher | None:
        key = (scope, structure)
        with self._reading:
            if key in self._cached:
                self._cached.move_to_end(key)
            return self._cached.get(key)

    def _keep(self, scope: str, structure: Structure, matcher: LLMatcher) -> None:
        with self._reading:
            self._cached[scope, structure] = matcher
            while len(self._cached) > self._max_cached:
                self._cached.popitem(last=False)

    def _compile(self, structure: Structure) -> LLMatcher:
        if not self._vocabulary.has_end:
            raise StructureRefused("structure: this model has no end-of-text token to end it with")
        field = f"structure.{_FIELDS[type(structure)]}"
        try:
            grammar = _grammar_of(structure)
        except ValueError as error:  # JSON that is none
            raise StructureRefused(f"{field}: {_brief(str(error))}") from error
        limits = LLParserLimits(**_LIMITS)
        matcher = LLMatcher(self._vocabulary.load(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise StructureRefused(f"{field}: {_brief(matcher.get_error())}")
        try:
            # The first look is the dearest, and shows a structure that nothing matches.
            StructureState(matcher, self._vocabulary.vocab_size).allowed()
        except StructureDeadEnd as error:
            raise StructureRefused(
                f"{field}: no text matches, or finding one costs too much ({error})"
            ) from None
        return matcher


_FIELDS: dict[type[Structure], str] = {
    JsonObject: "type",
    JsonSchema: "json_schema",
    Regex: "pattern",
    Grammar: "lark",
}


def _grammar_of(structure: Structure) -> str:
    """The library's own notation. Raises `ValueError` for what is not JSON where JSON is due."""
    match structure:
        case JsonObject():
            return LLMatcher.grammar_from_json_schema({"type": "object"}, defaults=_JSON_OPTIONS)
        case JsonSchema(json_schema=schema):
            return LLMatcher.grammar_from_json_schema(schema, defaults=_JSON_OPTIONS)
        case Regex(pattern=pattern):
            return LLMatcher.grammar_from_regex(pattern)
        case Grammar(lark=lark):
            return LLMatcher.grammar_from_lark(lark)


def _brief(message: str) -> str:
    """One line of bounded length: the library quotes the input, however long it is."""
    line = " ".join(message.replace("<non-verbose/>", "").split())
    return line if len(line) <= _MAX_MESSAGE_CHARACTERS else line[:_MAX_MESSAGE_CHARACTERS] + " …"

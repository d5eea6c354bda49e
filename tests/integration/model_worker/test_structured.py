"""A structure admits what matches it and nothing else, and a bad one is refused by name."""

from __future__ import annotations

import functools
import json
import re
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from model_worker import structured
from model_worker.models import resolve_model_folder
from model_worker.protocol import Grammar, JsonObject, JsonSchema, Regex, Structure
from model_worker.settings import WorkerSettings
from model_worker.structured import (
    StructureCompiler,
    StructureDeadEnd,
    StructureRefused,
    StructureState,
    Vocabulary,
)
from tests.tiny_models import byte_tokenizer

END = 256
PERSON = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "é"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
)
SUMS = 'start: item ("+" item)*\nitem: /[0-9]{1,3}/ | "(" start ")"'


@functools.cache
def vocabulary(size: int = 257, eos: frozenset[int] = frozenset({END})) -> Vocabulary:
    return Vocabulary(byte_tokenizer(), vocab_size=size, eos_token_ids=eos)


def compiler(**options: int) -> StructureCompiler:
    return StructureCompiler(vocabulary(), **options)


def start(structure: Structure) -> StructureState:
    return compiler().start("aa", structure)


def tokens_of(text: str) -> list[int]:
    return byte_tokenizer().encode(text).ids


def admits(structure: Structure, text: str) -> bool:
    """Whether the whole text can be written and ended."""
    state = start(structure)
    for token in tokens_of(text):
        if not state.allowed()[token]:
            return False
        state.accept(token)
    return state.is_complete or bool(state.allowed()[END])


@settings(deadline=None)  # the first one loads the vocabulary
@given(st.from_regex(r"\A[ab]{1,3}(-[0-9]+)?\Z") | st.text("ab-01", max_size=6))
def test_a_regex_admits_exactly_its_language(text: str) -> None:
    pattern = "[ab]{1,3}(-[0-9]+)?"
    assert admits(Regex(pattern=pattern), text) == bool(re.fullmatch(pattern, text))


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ('{"name":"Ada","age":36,"tags":["a","é"]}', True),
        ('{ "name": "Ada",\n  "age": 36, "tags": [] }', True),
        ('{"name":"Ada","age":151,"tags":[]}', False),
        ('{"name":"Ada","age":36}', False),
        ('{"name":"Ada","age":36,"tags":["b"]}', False),
        ('{"name":"a name too long","age":3,"tags":[]}', False),
        ('{"name":"Ada","age":36,"tags":[]} and more', False),
    ],
)
def test_a_schema_admits_what_it_describes(text: str, matches: bool) -> None:
    assert admits(JsonSchema(json_schema=PERSON), text) == matches


PRINTABLE = st.text(st.characters(exclude_categories=["C"]), max_size=5)


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        PRINTABLE,
        st.none() | st.booleans() | st.integers() | PRINTABLE | st.lists(st.floats(0, 1), max_size=2),
    )
)
def test_a_json_object_can_have_any_members(value: dict[str, object]) -> None:
    assert admits(JsonObject(), json.dumps(value, ensure_ascii=False))
    assert admits(JsonObject(), json.dumps(value, ensure_ascii=False, indent=2))
    assert not admits(JsonObject(), json.dumps([value]))


def test_a_grammar_can_nest() -> None:
    assert admits(Grammar(lark=SUMS), "((1+22)+(333))+4")
    assert not admits(Grammar(lark=SUMS), "(1+2")


def test_blanks_in_json_come_to_an_end() -> None:
    assert not admits(JsonObject(), '{"a":' + " " * 100 + "1}")


def test_a_text_that_nothing_can_follow_is_complete_without_an_end_token() -> None:
    state = start(Regex(pattern="ab*"))
    state.accept(tokens_of("a")[0])
    assert not state.is_complete
    assert set(np.flatnonzero(state.allowed())) == {tokens_of("b")[0], END}
    closed = start(Regex(pattern="ab"))
    for token in tokens_of("ab"):
        closed.accept(token)
    assert closed.is_complete


def test_texts_of_one_structure_do_not_disturb_each_other() -> None:
    shared = compiler()
    first, second = (shared.start("aa", Regex(pattern="[0-9]{2}x")) for _ in range(2))
    first.accept(tokens_of("1")[0])
    first.accept(tokens_of("2")[0])
    assert np.flatnonzero(first.allowed()).tolist() == tokens_of("x")
    assert sorted(np.flatnonzero(second.allowed())) == sorted(tokens_of("0123456789"))


def test_ids_past_the_tokenizer_are_never_allowed() -> None:
    wide = StructureCompiler(vocabulary(size=300)).start("aa", Regex(pattern=".+")).allowed()
    assert wide.shape == (300,)
    assert not wide[257:].any()


def test_a_model_without_an_end_has_bytes_but_no_structures() -> None:
    endless = vocabulary(eos=frozenset())
    assert endless.bytes_of(tokens_of("!")[0]) == b"!"
    with pytest.raises(StructureRefused, match="no end-of-text token"):
        StructureCompiler(endless).start("aa", JsonObject())


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        (JsonSchema(json_schema="{"), "structure.json_schema: "),
        (JsonSchema(json_schema="[]"), "structure.json_schema: "),
        (JsonSchema(json_schema='{"not": {"type": "string"}}'), "structure.json_schema: Unimplemented"),
        (JsonSchema(json_schema='{"type": "integer", "minimum": 5, "maximum": 4}'), "Unsatisfiable"),
        (JsonSchema(json_schema='{"$ref": "#"}'), "structure.json_schema: no text matches"),
        (JsonSchema(json_schema='{"$ref": "https://elsewhere.example/schema"}'), "does not fetch"),
        (JsonSchema(json_schema='{"items":' * 5000 + "{}" + "}" * 5000), "recursion limit"),
        (Regex(pattern="a("), "structure.pattern: .*unclosed group"),
        (Regex(pattern="(?=a)b"), "structure.pattern: .*look-around"),
        (Regex(pattern=r"[^\s\S]"), "structure.pattern: no text matches"),
        (Regex(pattern="(" * 30000 + "a" + ")" * 30000), "structure.pattern: "),
        (Grammar(lark="start: missing"), 'structure.lark: .*unknown name: "missing"'),
        (Grammar(lark="start: start"), "structure.lark: no text matches"),
        (Grammar(lark="start: " + "(" * 30000 + '"a"' + ")" * 30000), "structure.lark: .*deeply nested"),
    ],
)
def test_what_cannot_be_compiled_is_refused_and_the_field_is_named(
    structure: Structure, message: str
) -> None:
    with pytest.raises(StructureRefused, match=message) as refused:
        start(structure)
    assert refused.value.code == "invalid_request"
    assert len(str(refused.value)) < 600


def test_a_tokenizer_without_bytes_refuses_structures() -> None:
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="b"))
    bare = Vocabulary(words, vocab_size=2, eos_token_ids=frozenset({1}))
    with pytest.raises(StructureRefused, match="tokenizer does not offer"):
        StructureCompiler(bare).start("aa", JsonObject())


def test_a_text_that_costs_too_much_is_a_dead_end_and_the_next_starts_afresh(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(structured._LIMITS, "max_items_in_row", 60)
    ambiguous = Grammar(lark='start: start start | "a"')
    one = compiler()
    with pytest.raises(StructureDeadEnd, match="items"):
        exhaust(one.start("aa", ambiguous))
    one.forget("aa", ambiguous)
    assert one.start("aa", ambiguous).allowed().any()


def exhaust(state: StructureState) -> None:
    for _ in range(200):
        state.allowed()
        state.accept(tokens_of("a")[0])


def test_only_the_last_structures_are_kept_each_for_its_scope() -> None:
    one = compiler(max_cached=2)
    first, second = Regex(pattern="a"), Regex(pattern="b")
    for scope, structure in [("aa", first), ("bb", first), ("aa", first), ("aa", second)]:
        one.start(scope, structure)
    assert list(one._cached) == [("aa", first), ("aa", second)]


def test_a_cached_structure_does_not_wait_for_a_compilation_and_others_wait_no_longer_than_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(structured, "COMPILE_WAIT_SECONDS", 0.01)
    one = compiler()
    one.start("aa", Regex(pattern="a"))
    with one._compiling:
        assert one.start("aa", Regex(pattern="a")).allowed().any()
        with pytest.raises(StructureRefused, match="too many are being compiled") as refused:
            one.start("aa", Regex(pattern="b"))
    assert refused.value.code == "queue_full"
    assert one.start("aa", Regex(pattern="b")).allowed().any()


def test_many_threads_compile_and_step_at_once() -> None:
    one = compiler(max_cached=3)
    failures: list[Exception] = []

    def work(seed: int) -> None:
        try:
            for round_ in range(10):
                letter = "abcde"[(seed + round_) % 5]
                state = one.start("aa", Regex(pattern=f"{letter}{{3}}"))
                for token in tokens_of(letter * 3):
                    assert np.flatnonzero(state.allowed()).tolist() == [token]
                    state.accept(token)
                assert state.is_complete
        except (AssertionError, StructureRefused, StructureDeadEnd) as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_real_tokenizer_writes_what_the_schema_describes() -> None:
    worker = WorkerSettings()
    folder = resolve_model_folder(worker.model, worker.models_folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    end = tokenizer.token_to_id("<|im_end|>")
    one = StructureCompiler(Vocabulary(tokenizer, vocab_size=size, eos_token_ids=frozenset({end})))
    rng = np.random.default_rng(0)
    for _ in range(20):
        state = one.start("aa", JsonSchema(json_schema=PERSON))
        written: list[int] = []
        while not state.is_complete:
            written.append(int(rng.choice(np.flatnonzero(state.allowed()))))
            state.accept(written[-1])
        value = json.loads(tokenizer.decode(written))
        assert set(value) == {"name", "age", "tags"}
        assert len(value["name"]) <= 12
        assert 0 <= value["age"] <= 150
        assert set(value["tags"]) <= {"a", "é"}
        assert len(value["tags"]) <= 3


def test_the_bytes_of_a_token_can_be_half_a_character() -> None:
    assert b"".join(map(vocabulary().bytes_of, tokens_of("é"))) == "é".encode()
    assert vocabulary().bytes_of(tokens_of("é")[0]) == "é".encode()[:1]
    assert vocabulary().bytes_of(END) == b"<|end|>"


def test_every_byte_has_its_token() -> None:
    assert sorted(map(vocabulary().bytes_of, range(256))) == [bytes([byte]) for byte in range(256)]

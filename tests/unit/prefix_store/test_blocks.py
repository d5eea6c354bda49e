"""Names of blocks: chained, keyed, and the same everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array

import pytest
import xxhash

from prefix_store.blocks import BlockNamer, token_bytes, token_ids, with_adapter
from tests.unit.prefix_store.support import BLOCK, make_namer, prompt, tokens

SCRIPT = """
from array import array
from prefix_store.blocks import BlockNamer
namer = BlockNamer(seed=7, model_fingerprint="model", dtype="float32", kv_codec="raw", block_size=4)
print(b"".join(namer.chain(namer.root("aa"), array("I", range(12)))).hex())
"""


def names_of(namer: BlockNamer, scope: str = "aa") -> list[bytes]:
    return namer.chain(namer.root(scope), array("I", range(12)))


def test_a_name_is_the_hash_of_the_name_before_and_the_tokens() -> None:
    namer = make_namer()
    for num_blocks in (0, 1, 2, 127, 128, 129, 300):
        ids = prompt(1, num_blocks * BLOCK)
        name, expected = namer.root("aa"), []
        for start in range(0, len(ids), BLOCK):
            block = b"".join(token.to_bytes(4, "little") for token in ids[start : start + BLOCK])
            name = xxhash.xxh3_128_digest(name + block, 7)
            expected.append(name)
        assert namer.chain(namer.root("aa"), ids) == expected


def test_an_incomplete_block_has_no_name() -> None:
    namer = make_namer()
    assert len(namer.chain(namer.root("aa"), prompt(1, 2 * BLOCK + 3))) == 2


def test_names_are_those_of_the_first_release() -> None:
    """Written down: a change of names would empty every tier and confuse every router."""
    assert [name.hex() for name in names_of(make_namer())] == [
        "e000caf83b020660e10b78dab19c887f",
        "2ff4f4b692ed220dba3dd823518eb328",
        "a739a9ff107a7596faf7e0f54f60df1d",
    ]


def test_an_adapters_scope_has_the_names_of_a_namer_for_that_adapter() -> None:
    names = names_of(make_namer(), with_adapter("aa", "poet"))
    assert names == names_of(make_namer(adapter="poet"))
    assert not set(names) & {*names_of(make_namer()), *names_of(make_namer(), with_adapter("aa", "lawyer"))}


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_another_process_gives_the_same_names(hash_seed: str) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    answer = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, env=environment
    )
    assert answer.stdout.strip() == b"".join(names_of(make_namer())).hex()


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 8},
        {"model_fingerprint": "other"},
        {"dtype": "bfloat16"},
        {"kv_codec": "int8"},
        {"block_size": 2},
        {"adapter": "lora"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_the_keys_and_values_depend_on_changes_every_name(change: dict[str, object]) -> None:
    assert not set(names_of(make_namer())) & set(names_of(make_namer(**change)))


def test_a_scope_changes_every_name() -> None:
    namer = make_namer()
    assert not set(names_of(namer, "aa")) & set(names_of(namer, "bb"))


def test_fields_do_not_run_into_one_another() -> None:
    one = make_namer(model_fingerprint="ab", dtype="c")
    other = make_namer(model_fingerprint="a", dtype="bc")
    assert one.root("aa") != other.root("aa")


def test_the_first_block_behind_a_public_prefix_depends_on_the_scope() -> None:
    namer = make_namer()
    public = namer.chain(namer.root(""), prompt(1, BLOCK))[-1]
    assert namer.enter_scope(public, "aa") != namer.enter_scope(public, "bb")
    assert namer.enter_scope(public, "aa") != namer.root("aa")


def test_token_ids_survive_as_bytes() -> None:
    ids = tokens(0, 1, 2**32 - 1)
    assert token_bytes(ids) == b"\0\0\0\0\1\0\0\0\xff\xff\xff\xff"
    assert token_ids(token_bytes(ids)) == ids
    assert token_bytes(ids, 1, 2) == b"\1\0\0\0"


def test_other_arrays_than_uint32_are_refused() -> None:
    with pytest.raises(TypeError, match="array"):
        token_bytes(array("q", [1]))


@pytest.mark.parametrize("change", [{"seed": -1}, {"seed": 2**64}, {"block_size": 0}])
def test_impossible_settings_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        make_namer(**change)

"""What a file of receipts proves, with the public key alone."""

import io
import itertools
import json
from hashlib import sha256

import msgspec
import pytest
import rfc8785
from cryptography.hazmat.primitives.asymmetric import ed25519
from hypothesis import given, settings
from hypothesis import strategies as st

from billing.errors import InvalidReceiptKey
from billing.receipt_keys import PublicKey, SigningKey, decode_key_set, encode_key_set
from billing.receipts import Receipt, canonical, sign, verify
from billing.usage import TokenClass
from tests.unit.billing.builders import receipt_after, signed_chain

KEY = SigningKey(ed25519.Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
KEYS = {KEY.public.id: KEY.public}
CHAIN = signed_chain(KEY, 3)


def as_file(signed) -> bytes:
    return b"".join(one.document.encode() + b"\n" for one in signed)


def check(file: bytes, keys=KEYS):
    return verify(io.BytesIO(file), keys)


def reasons(file: bytes, keys=KEYS) -> list[str]:
    return [flaw.reason for flaw in check(file, keys).flaws]


def forged(**changes) -> bytes:
    """A receipt that is signed as it should be, and says something that does not add up."""
    receipt = msgspec.structs.replace(receipt_after(None, key=KEY), **changes)
    return as_file([sign(receipt, KEY)])


def test_a_sound_file_is_accepted_and_tells_how_far_it_goes():
    found = check(as_file(CHAIN))
    assert not found.flaws
    assert found.num_receipts == 3
    [chain] = found.chains.values()
    assert (chain.first, chain.last, chain.digest) == (1, 3, CHAIN[-1].digest)


def test_a_file_may_begin_in_the_middle_of_a_chain_and_hold_several_chains():
    other = signed_chain(KEY, 2, tenant=7)
    mixed = [CHAIN[1], other[0], CHAIN[2], other[1]]
    assert not check(as_file(mixed)).flaws
    assert len(check(as_file(mixed)).chains) == 2


@given(place=st.integers(0, len(as_file(CHAIN)) - 1), byte=st.integers(1, 255))
@settings(max_examples=1_000, deadline=None)
def test_a_file_with_one_byte_changed_is_refused(place, byte):
    file = bytearray(as_file(CHAIN))
    file[place] ^= byte
    assert check(bytes(file)).flaws


@pytest.mark.slow
def test_no_bit_of_a_receipt_can_be_changed():
    whole = as_file(CHAIN[:1])
    for place in range(len(whole)):
        for bit in range(8):
            file = bytearray(whole)
            file[place] ^= 1 << bit
            assert check(bytes(file)).flaws, (place, bit)


@given(data=st.data())
@settings(deadline=None)
def test_receipts_that_are_left_out_repeated_or_moved_are_found(data):
    chain = signed_chain(KEY, 5)
    numbers = st.lists(st.integers(0, 4), min_size=2, max_size=6)
    order = data.draw(numbers)
    follows = all(later == earlier + 1 for earlier, later in itertools.pairwise(order))
    assert (not reasons(as_file([chain[number] for number in order]))) == follows


def test_a_receipt_from_another_chain_of_the_same_tenant_does_not_follow():
    other = signed_chain(KEY, 3, output=99)
    assert reasons(as_file([CHAIN[0], other[1]])) == ["it does not follow from receipt 1 as it stands here"]


@pytest.mark.parametrize("cut", [b"", as_file(CHAIN)[:-1], as_file(CHAIN)[:-100], as_file(CHAIN) + b"\n"])
def test_a_file_that_is_empty_or_cut_off_or_has_more_is_refused(cut):
    assert check(cut).flaws


def test_the_flaw_names_the_receipt_and_the_line():
    file = as_file(CHAIN).replace(b'"sequence":2', b'"sequence":7')
    [flaw, *_] = check(file).flaws
    assert flaw.line == 2
    assert str(CHAIN[1].receipt.request_id) in flaw.subject
    assert "signature" in flaw.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt_tokens": 31}, "prompt_tokens"),
        ({"cached_tokens": 21}, "cached_tokens"),
        ({"written_tokens": 1}, "written_tokens"),
        ({"tier": "disk"}, "tier"),
        ({"tier": None}, "tier"),
        ({"amount_pusd": 1}, "amount_pusd"),
        ({"list_amount_pusd": 1}, "list_amount_pusd"),
        ({"amount_without_cache_pusd": 1}, "amount_without_cache_pusd"),
        ({"saved_pusd": 1}, "saved_pusd"),
        ({"amount": "1.00"}, "amount is not"),
        ({"saved": "1.00"}, "saved is not"),
        ({"lines": ()}, "lines"),
        ({"tokens": {TokenClass.INPUT: 30}}, "token class"),
        ({"sequence": 0}, "begins no chain"),
        ({"previous": "1" * 64}, "begins no chain"),
    ],
)
def test_a_signed_receipt_that_does_not_add_up_is_refused(changes, reason):
    assert any(reason in one for one in reasons(forged(**changes)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"amount_pusd": 1}, "the amount is not quantity times unit"),
        ({"list_amount_pusd": 1}, "the list amount is not quantity times unit"),
        ({"unit_pusd": 1}, "the unit is not the list unit less the discount"),
        ({"discount_basis_points": 1}, "the unit is not the list unit less the discount"),
    ],
)
def test_a_line_that_is_not_the_product_of_its_parts_is_refused(changes, reason):
    first, *others = receipt_after(None, key=KEY).lines
    lines = (msgspec.structs.replace(first, **changes), *others)
    assert f"{first.token_class}: {reason}" in reasons(forged(lines=lines))


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"{}\n",
        b"[]\n",
        b"null\n",
        b'{"signature":5}\n',
        b'{"signature":"zz"}\n',
        b"[" * 5_000 + b"\n",
        b'"\\ud800"\n',
        b"\xff\n",
        b"9" * 5_000 + b"\n",
        b" " * 100_000 + b"\n",
    ],
)
def test_what_is_no_receipt_is_refused_and_not_fallen_over(line):
    assert check(line).flaws


def test_the_same_values_in_another_form_are_refused():
    values = json.loads(CHAIN[0].document)
    for other in (
        json.dumps(values),
        json.dumps(dict(reversed(values.items())), separators=(",", ":")),
        CHAIN[0].document.upper(),
        CHAIN[0].document.replace('"sequence":1,', '"sequence":1,"sequence":1,'),
        CHAIN[0].document.replace('"sequence":1,', '"sequence":1.0,'),
    ):
        assert check(other.encode() + b"\n").flaws


def test_a_receipt_is_not_accepted_under_another_key():
    other = SigningKey.new()
    assert "not among the public keys" in reasons(as_file(CHAIN), {other.public.id: other.public})[0]
    assert "was changed" in reasons(as_file(CHAIN), {KEY.public.id: other.public})[0]


names = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | names,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abz_09", max_size=4), inner),
)


@given(values)
def test_the_canonical_form_is_that_of_rfc_8785(value):
    assert canonical(value).encode() == rfc8785.dumps(value)


@given(st.integers())
def test_integers_of_any_size_are_written_in_full(number):
    assert json.loads(canonical({"n": number})) == {"n": number}


def test_a_receipt_is_a_document_of_rfc_8785():
    for one in CHAIN:
        assert rfc8785.dumps(json.loads(one.document)) == one.document.encode()
        assert one.digest == sha256(one.document.encode()).digest()


def test_a_key_set_is_read_back():
    keys = [KEY.public, SigningKey.new().public]
    assert [key.raw for key in decode_key_set(encode_key_set(keys)).values()] == [key.raw for key in keys]


def test_a_key_id_is_the_thumbprint_of_rfc_8037():
    raw = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a"
    assert PublicKey(bytes.fromhex(raw)).id == "kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k"


def changed_set(**changes) -> bytes:
    document = json.loads(encode_key_set([KEY.public]))
    document["keys"][0] |= changes
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"{}",
        b'{"keys":[]}',
        b'{"keys":[{"kty":"RSA"}]}',
        changed_set(kid="mine"),
        changed_set(crv="X25519"),
        changed_set(x="!"),
        changed_set(x="AAAA"),
        changed_set(x="é" * 43),
    ],
)
def test_what_is_no_set_of_keys_under_their_own_ids_is_refused(document):
    with pytest.raises(InvalidReceiptKey):
        decode_key_set(document)


def test_a_private_key_is_read_back_from_pem_and_never_shown():
    assert SigningKey.from_pem(KEY.as_pem().encode()).public.id == KEY.public.id
    assert repr(KEY) == f"SigningKey({KEY.public.id})"


@pytest.mark.parametrize(
    "pem", [b"", b"nonsense", b"-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n"]
)
def test_what_is_no_private_key_is_refused(pem):
    with pytest.raises(InvalidReceiptKey):
        SigningKey.from_pem(pem)


def test_every_field_of_a_receipt_is_in_its_document():
    assert set(json.loads(CHAIN[0].document)) == {*Receipt.__struct_fields__, "signature"}

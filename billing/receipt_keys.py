"""Keys that receipts are signed with, and how their public halves are published.

Knows Ed25519 (RFC 8032), JSON Web Keys (RFC 8037) and thumbprints (RFC 7638). Does not know
receipts, files or tables.

A key's id is its own thumbprint, so nobody can publish another key under it.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from billing.errors import InvalidReceiptKey

KEY_BYTES: Final = 32
SIGNATURE_BYTES: Final = 64


class _Jwk(msgspec.Struct, frozen=True, kw_only=True):
    kty: str
    crv: str
    x: str
    kid: str


class _Jwks(msgspec.Struct, frozen=True, kw_only=True):
    keys: list[_Jwk]


class PublicKey:
    """Who can tell whether a receipt was signed here, and nothing else."""

    __slots__ = ("_key", "id", "raw")

    def __init__(self, raw: bytes) -> None:
        """`raw` are the 32 bytes of RFC 8032. Raises InvalidReceiptKey."""
        try:
            self._key = Ed25519PublicKey.from_public_bytes(raw)
        except ValueError as error:
            raise InvalidReceiptKey("a public key has 32 bytes") from error
        self.raw: Final = raw
        self.id: Final = _thumbprint(raw)

    def has_signed(self, message: bytes, signature: bytes) -> bool:
        try:
            self._key.verify(signature, message)
        except InvalidSignature:
            return False
        return True

    def as_jwk(self) -> Mapping[str, str]:
        return {**_required_members(self.raw), "kid": self.id, "use": "sig", "alg": "EdDSA"}


class SigningKey:
    """The private half. It leaves the process as PEM alone, for a file that nobody else can read."""

    __slots__ = ("_key", "public")

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public: Final = PublicKey(key.public_key().public_bytes_raw())

    def __repr__(self) -> str:
        return f"SigningKey({self.public.id})"

    @classmethod
    def new(cls) -> SigningKey:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_pem(cls, pem: bytes) -> SigningKey:
        """PKCS #8 without a password, as `openssl genpkey -algorithm ed25519` writes it.

        Raises InvalidReceiptKey.
        """
        try:
            key = serialization.load_pem_private_key(pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise InvalidReceiptKey("not a private key in PEM without a password") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise InvalidReceiptKey("not an Ed25519 key")
        return cls(key)

    def as_pem(self) -> str:
        return self._key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ).decode("ascii")

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)


def encode_key_set(keys: Iterable[PublicKey]) -> bytes:
    """A JSON Web Key Set (RFC 7517)."""
    return json.dumps({"keys": [key.as_jwk() for key in keys]}, indent=2).encode() + b"\n"


def decode_key_set(document: bytes) -> Mapping[str, PublicKey]:
    """Keys by their ids. Raises InvalidReceiptKey unless all are Ed25519 keys under their own ids."""
    try:
        listed = msgspec.json.decode(document, type=_Jwks).keys
    except msgspec.MsgspecError as error:
        raise InvalidReceiptKey(f"not a set of public keys: {error}") from error
    keys = [_decode_jwk(one) for one in listed]
    if not keys:
        raise InvalidReceiptKey("the set holds no key")
    return {key.id: key for key in keys}


def _decode_jwk(jwk: _Jwk) -> PublicKey:
    if (jwk.kty, jwk.crv) != ("OKP", "Ed25519"):
        raise InvalidReceiptKey(f"key {jwk.kid}: not an Ed25519 key")
    try:
        key = PublicKey(base64.urlsafe_b64decode(jwk.x + "=="))
    except ValueError as error:
        raise InvalidReceiptKey(f"key {jwk.kid}: not base64url") from error
    if key.id != jwk.kid:
        raise InvalidReceiptKey(f"key {jwk.kid}: its id is not its thumbprint, {key.id}")
    return key


def _required_members(raw: bytes) -> Mapping[str, str]:
    return {"crv": "Ed25519", "kty": "OKP", "x": _base64url(raw)}


def _thumbprint(raw: bytes) -> str:
    members = json.dumps(_required_members(raw), sort_keys=True, separators=(",", ":"))
    return _base64url(hashlib.sha256(members.encode()).digest())


def _base64url(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode("ascii")

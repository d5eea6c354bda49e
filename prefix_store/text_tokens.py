"""Text to tokens, by a tokenizer file.

Knows two kinds of files: `tokenizer.json` of the tokenizers library, and a list
of ranks, one base64 token and its rank a line, such as the `tokenizer.model` of
Llama 3. Does not know models: what a file does not say (how Llama 3 cuts text
into words) is written here.
"""

from __future__ import annotations

import base64
import binascii
from array import array
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from prefix_store.traces import Encode

MAX_FILE_BYTES = 256 * 2**20

_LLAMA_3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class TokenizerUnusable(ValueError):
    """A file that no tokenizer can be made of."""


def load_encode(path: Path) -> Encode:
    """The encoder of a file, which puts the begin-of-text token first where the file's model does.

    Raises `TokenizerUnusable`.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise TokenizerUnusable(f"{path}: larger than {MAX_FILE_BYTES} bytes")
        data = path.read_bytes()
    except OSError as error:
        raise TokenizerUnusable(f"{path}: {error.strerror}") from error
    if data.lstrip().startswith(b"{"):
        return _encode_of_json(path, data)
    return _encode_of_ranks(_ranks(path, data))


def _encode_of_json(path: Path, data: bytes) -> Encode:
    try:
        tokenizer = Tokenizer.from_str(data.decode())
    except Exception as error:  # the library raises nothing narrower
        raise TokenizerUnusable(f"{path}: {error}") from error
    return lambda text: array("I", tokenizer.encode(text).ids)


def _encode_of_ranks(ranks: Mapping[bytes, int]) -> Encode:
    """Byte-pair encoding by rank. The begin-of-text token is the first after those of the file."""
    letter_of = _letter_of_byte()

    def spelt(token: bytes) -> str:
        return "".join(letter_of[byte] for byte in token)

    tokenizer = Tokenizer(
        models.BPE(
            vocab={spelt(token): rank for token, rank in ranks.items()},
            merges=[(spelt(left), spelt(right)) for left, right in _merges(ranks)],
            ignore_merges=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_LLAMA_3_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    begin_of_text = len(ranks)
    return lambda text: array("I", [begin_of_text, *tokenizer.encode(text).ids])


def _ranks(path: Path, data: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        fields = line.split()
        try:
            token, rank = fields
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise TokenizerUnusable(f"{path}, line {number}: not a token in base64 and its rank") from error
    if sorted(ranks.values()) != list(range(len(ranks))) or any(
        bytes([byte]) not in ranks for byte in range(256)
    ):
        raise TokenizerUnusable(f"{path}: ranks must count from 0 and name every byte")
    return ranks


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every pair of tokens that makes a token, in order of what they make, then of the left one."""
    found = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = ranks.get(token[:cut]), ranks.get(token[cut:])
            if left is not None and right is not None:
                found.append((rank, left, right, token[:cut], token[cut:]))
    return [(left, right) for _, _, _, left, right in sorted(found)]


def _letter_of_byte() -> list[str]:
    """The byte-level alphabet: bytes that print stand for themselves, others for letters from 256 on."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printing else next(spare)) for byte in range(256)]

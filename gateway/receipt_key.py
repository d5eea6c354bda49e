"""Where the key that signs receipts is kept.

Knows two files: the operator's (`HEADSTART_RECEIPT_KEY_FILE`), and `receipt-key.pem` in the home
directory, made at first start. Does not know receipts. To rotate, put another key in the file's place
and restart: the former one's public half stays published.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from billing.errors import InvalidReceiptKey
from billing.receipt_keys import SigningKey
from gateway.secrets import SecretUnusable, create_private_file, read_secret_file, require_private
from gateway.settings import Settings

RECEIPT_KEY_FILE_NAME: Final = "receipt-key.pem"


def load_receipt_key(settings: Settings) -> SigningKey:
    """Raises `SecretUnusable`."""
    if settings.receipt_key_file is not None:
        return _load(settings.receipt_key_file)
    path = settings.home / RECEIPT_KEY_FILE_NAME
    if not path.exists():
        create_private_file(path, lambda: SigningKey.new().as_pem())
    require_private(path)
    return _load(path)


def _load(path: Path) -> SigningKey:
    try:
        return SigningKey.from_pem(read_secret_file(path))
    except InvalidReceiptKey as error:
        raise SecretUnusable(f"{path}: {error}; make one with openssl genpkey -algorithm ed25519") from error

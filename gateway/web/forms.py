"""Posted forms: their fields, and the proof that a page of ours asked for them.

Knows the body's limits and the two kinds of proof. Does not know what the
fields mean.

A form inside a session carries the session's own token. The sign-in form has no session yet: a
cookie holds a random nonce, the form an HMAC of it (a signed double submit), so that another
site can neither make up the pair nor plant a cookie of its own choice.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from collections.abc import Mapping
from typing import Final
from urllib.parse import parse_qsl

from starlette.requests import ClientDisconnect, Request

MAX_FORM_BYTES: Final = 4096
MAX_FIELDS: Final = 8
FORM_TYPE: Final = "application/x-www-form-urlencoded"
_NONCE_BYTES: Final = 32


class BadForm(Exception):
    """Not a form of ours: wrong type, too large, too slow or unreadable. The message says which."""


async def read_form(
    request: Request, *, timeout_seconds: float, max_bytes: int = MAX_FORM_BYTES
) -> Mapping[str, str]:
    """The fields of a urlencoded body; of a repeated one the last. Raises `BadForm`."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != FORM_TYPE:
        raise BadForm(f"a form is sent as {FORM_TYPE}")
    try:
        async with asyncio.timeout(timeout_seconds):
            body = await _read(request, max_bytes)
        return dict(parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=MAX_FIELDS))
    except TimeoutError:
        raise BadForm("the form did not arrive in time") from None
    except ClientDisconnect:
        raise BadForm("the form did not arrive") from None
    except ValueError:
        raise BadForm("the form cannot be read") from None


async def _read(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise BadForm(f"the form is larger than {max_bytes} bytes")
    return bytes(body)


def new_nonce() -> str:
    """For the cookie that goes with a sign-in form."""
    return secrets.token_urlsafe(_NONCE_BYTES)


def sign_nonce(nonce: str, key: bytes) -> str:
    """For the hidden field of the same form: HMAC-SHA256, in hexadecimal."""
    return hmac.digest(key, nonce.encode("utf-8", "surrogatepass"), hashlib.sha256).hex()


def is_same(presented: str | None, expected: str) -> bool:
    """Compares in constant time. An absent value is never the same."""
    if presented is None:
        return False
    return hmac.compare_digest(
        presented.encode("utf-8", "surrogatepass"), expected.encode("utf-8", "surrogatepass")
    )

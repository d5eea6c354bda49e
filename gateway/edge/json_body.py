"""Why a JSON body could not be read, and which field is to blame.

Runs only after the fast decoder has refused, so it may be slow and thorough.
Knows JSON text, UTF-8 and paths. Does not know any dialect's fields.
"""

from __future__ import annotations

import json
import math
import re

from gateway.edge.errors import InvalidRequest

WHOLE_BODY = "body"
_ERROR_PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(?P<name>.*)`", re.DOTALL)
_MAX_ECHO = 100
_SURROGATE = re.compile("[\ud800-\udfff]")


def split_validation_message(text: str) -> tuple[str, str]:
    """Splits a msgspec validation message in its sentence and its path: `messages[0].content`,
    empty for the top.
    """
    found = _ERROR_PATH.search(text)
    if found is None:
        return text, ""
    return text[: found.start()], found["path"].replace("[...]", "")


def field_named_by(sentence: str, pattern_of: str) -> str | None:
    """The field that an "unknown" or "missing" sentence is about."""
    pattern = _UNKNOWN_FIELD if pattern_of == "unknown" else _MISSING_FIELD
    found = pattern.match(sentence)
    return found["name"][:_MAX_ECHO] if found else None


def explain_malformed(body: bytes) -> InvalidRequest:
    """The refusal for a body that is not JSON as RFC 8259 and RFC 7493 (no lone surrogates, no NaN)
    have it.
    """
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        return InvalidRequest(f"The body is not UTF-8: byte {error.start} is invalid.", param=WHOLE_BODY)
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        return InvalidRequest(f"The body is not JSON: {error.msg} at {where}.", param=WHOLE_BODY)
    except RecursionError:
        return too_deep()
    except ValueError:
        return InvalidRequest("The body holds a number with too many digits.", param=WHOLE_BODY)
    return _explain_value(document)


def too_deep() -> InvalidRequest:
    return InvalidRequest("The body is nested too deeply.", param=WHOLE_BODY)


def _explain_value(document: object) -> InvalidRequest:
    """Finds what the tolerant decoder let through. Iterative: the document may be as deep as the
    decoder allows. A path is made only for what has one to tell or to pass on.
    """
    pending: list[tuple[str, object]] = [("", document)]
    while pending:
        path, value = pending.pop()
        fault = _fault(value)
        if fault is not None:
            return InvalidRequest(fault, param=path or WHOLE_BODY)
        if isinstance(value, list):
            pending.extend((f"{path}[{index}]", item) for index, item in enumerate(value) if _matters(item))
        elif isinstance(value, dict):
            pending.extend(
                (f"{path}.{key}" if path else key, item) for key, item in value.items() if _matters(item)
            )
    return InvalidRequest("The body is not JSON.", param=WHOLE_BODY)


def _matters(value: object) -> bool:
    return isinstance(value, list | dict) or _fault(value) is not None


def _fault(value: object) -> str | None:
    """What is wrong with a value itself; its members are looked at by themselves."""
    if isinstance(value, str) and _SURROGATE.search(value):
        return "The text holds a lone surrogate, which is not Unicode."
    if isinstance(value, float) and not math.isfinite(value):
        return "The number is not finite."
    if isinstance(value, dict) and any(_SURROGATE.search(key) for key in value):
        return "A field's name holds a lone surrogate."
    return None

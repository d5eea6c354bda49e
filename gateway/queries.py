"""What a report's address asks for: names and values after the question mark.

Knows how a value is written and what it may be. Does not know what is done with it. Whatever
is not understood is refused by its name: a report of something else would look right.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, TypeVar
from uuid import UUID
from zoneinfo import ZoneInfo

from billing import calendar
from billing.calendar import zone_named
from billing.errors import UnknownZone
from billing.instants import MICROSECONDS_PER_SECOND, Microseconds
from gateway.edge.errors import InvalidRequest, UnknownParameter

LAST_SECOND: Final = calendar.LAST_INSTANT // MICROSECONDS_PER_SECOND
MAX_VALUES: Final = 100
"""Of one name, as in `models[]=a&models[]=b`."""
MAX_CHARACTERS: Final = 256
_MAX_DIGITS: Final = 12

T = TypeVar("T")
QueryItems = Sequence[tuple[str, str]]
"""Names and values, as they are written."""


class Query:
    """The values of each name, in order. `group_by[]` and `group_by` are one name."""

    def __init__(self, items: QueryItems, *, known: Collection[str]) -> None:
        """Raises `UnknownParameter` for any name that is not known."""
        self._values: dict[str, list[str]] = {}
        for written, value in items:
            name = written.removesuffix("[]")
            if name not in known:
                raise UnknownParameter(f"Unknown parameter: '{written}'.", param=written)
            self._values.setdefault(name, []).append(value)

    def one(self, name: str) -> str | None:
        """Raises `InvalidRequest` when it is given twice, or is too long."""
        values = self.many(name)
        if len(values) > 1:
            raise InvalidRequest(f"'{name}' is given more than once.", param=name)
        return values[0] if values else None

    def many(self, name: str) -> Sequence[str]:
        """All values of a name, each once. Raises `InvalidRequest` when they are too many or too long."""
        values = list(dict.fromkeys(self._values.get(name, ())))
        if len(values) > MAX_VALUES:
            raise InvalidRequest(f"'{name}' has more than {MAX_VALUES} values.", param=name)
        if any(len(value) > MAX_CHARACTERS for value in values):
            raise InvalidRequest(f"'{name}' is longer than {MAX_CHARACTERS} characters.", param=name)
        return values

    def instant(self, name: str, *, default: Microseconds) -> Microseconds:
        """Whole seconds since 1970."""
        text = self.one(name)
        if text is None:
            return default
        seconds = _integer(text)
        if seconds is None or seconds > LAST_SECOND:
            raise InvalidRequest(f"'{name}' must be whole seconds since 1970.", param=name)
        return Microseconds(seconds * MICROSECONDS_PER_SECOND)

    def integer(self, name: str, *, default: int, least: int, most: int) -> int:
        text = self.one(name)
        if text is None:
            return default
        value = _integer(text)
        if value is None or not least <= value <= most:
            raise InvalidRequest(f"'{name}' must be an integer between {least} and {most}.", param=name)
        return value

    def choices(self, name: str, allowed: Mapping[str, T]) -> Sequence[T]:
        """What each value stands for."""
        unknown = next((value for value in self.many(name) if value not in allowed), None)
        if unknown is not None:
            raise InvalidRequest(
                f"'{name}' cannot be '{unknown}'; it can be {', '.join(allowed)}.", param=name
            )
        return [allowed[value] for value in self.many(name)]

    def choice(self, name: str, allowed: Mapping[str, T], *, default: str) -> T:
        self.one(name)
        return next(iter(self.choices(name, allowed)), allowed[default])

    def ids(self, name: str, make: Callable[[UUID], T]) -> Sequence[T] | None:
        """None when the name is absent."""
        texts = self.many(name)
        try:
            return [make(UUID(text)) for text in texts] or None
        except ValueError as error:
            raise InvalidRequest(f"'{name}' must be ids, as keys and projects have.", param=name) from error

    def zone(self, name: str, *, default: str) -> ZoneInfo:
        try:
            return zone_named(self.one(name) or default)
        except UnknownZone as error:
            raise InvalidRequest(
                f"'{name}' must be an IANA time zone, as 'Asia/Kolkata'.", param=name
            ) from error


NO_OR_YES: Final = {"false": False, "true": True}
"""For `Query.choice`."""


def require_forwards(start: Microseconds, end: Microseconds) -> None:
    if end < start:
        raise InvalidRequest("'end_time' is before 'start_time'.", param="end_time")


def next_second(now: Microseconds) -> Microseconds:
    """The whole second after the instant: a period that ends there holds all that is known by now."""
    return Microseconds(now - now % MICROSECONDS_PER_SECOND + MICROSECONDS_PER_SECOND)


def _integer(text: str) -> int | None:
    """Digits alone, and few of them: int() of a very long string is slow."""
    is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
    return int(text) if is_number else None

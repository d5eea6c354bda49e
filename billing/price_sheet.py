"""A price book as an operator writes it, and the rules it must keep.

Knows YAML and the rules of loading. Does not know the database.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

import yaml

from billing.errors import InvalidPriceBook
from billing.usage import MAX_MODEL_CHARACTERS, TokenClass

ANY_MODEL: Final = "*"
"""The entry of a book that prices every model it does not name."""

CURRENCIES: Final = ("USD",)
MAX_UNIT_PUSD: Final = 10**12
"""A dollar per token; more is a slip of the unit."""
MAX_SHEET_CHARACTERS: Final = 4 * 1024 * 1024
MAX_BOOK_NAME_CHARACTERS: Final = 128
MAX_TENANT_CHARACTERS: Final = 128

_WHOLE_BASIS_POINTS: Final = 10_000
_OWN_PRICE: Final = (TokenClass.INPUT, TokenClass.OUTPUT)
_TIERS: Final = (TokenClass.READ_HOST, TokenClass.READ_DISK, TokenClass.READ_REMOTE)
"""Without a price of their own they cost what `read` costs."""
_READS: Final = (TokenClass.READ, *_TIERS)
_FROM_INPUT: Final = (
    TokenClass.READ,
    TokenClass.WRITE_AUTO,
    TokenClass.WRITE_5M,
    TokenClass.WRITE_1H,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceSheet:
    """One checked book: picodollars per token (per token-hour for pins), for the models it names.

    For everybody, or for the one tenant that it names.
    """

    name: str
    tenant: str | None
    currency: str
    units: Mapping[str, Mapping[TokenClass, int]]


def default_price_sheet() -> PriceSheet:
    """The book that comes with the package (`billing/default_prices.yaml`)."""
    return parse_price_sheet(resources.files("billing").joinpath("default_prices.yaml").read_text("utf-8"))


def load_price_sheet(path: Path) -> PriceSheet:
    """Raises InvalidPriceBook, also when the file cannot be read."""
    try:
        source = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidPriceBook(f"{path}: {error}") from error
    return parse_price_sheet(source)


def parse_price_sheet(source: str) -> PriceSheet:
    """Raises InvalidPriceBook, naming the entry that breaks a rule."""
    if len(source) > MAX_SHEET_CHARACTERS:
        raise InvalidPriceBook(f"a price book has at most {MAX_SHEET_CHARACTERS} characters")
    try:
        document = yaml.load(source, Loader=_StrictLoader)  # noqa: S506 - a SafeLoader with fewer liberties
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise InvalidPriceBook(f"not a price book in YAML: {error}") from error
    book = _mapping(
        "the book",
        document,
        required={"book", "currency", "models"},
        optional={"tenant", "cache_basis_points"},
    )
    if book["currency"] not in CURRENCIES:
        raise InvalidPriceBook(f"currency {book['currency']!r} is none of {', '.join(CURRENCIES)}")
    ratios = _ratios(book.get("cache_basis_points", {}))
    models = _mapping("models", book["models"])
    if not models:
        raise InvalidPriceBook("models: a book prices at least one")
    return PriceSheet(
        name=_name("book", book["book"], MAX_BOOK_NAME_CHARACTERS),
        tenant=_name("tenant", book["tenant"], MAX_TENANT_CHARACTERS) if "tenant" in book else None,
        currency=book["currency"],
        units={
            _name("models", model, MAX_MODEL_CHARACTERS): _units(model, entry, ratios)
            for model, entry in models.items()
        },
    )


def _ratios(given: Any) -> dict[TokenClass, int]:
    names = {token_class.value for token_class in _FROM_INPUT}
    ratios = _mapping("cache_basis_points", given, optional=names)
    return {
        TokenClass(name): _natural(f"cache_basis_points.{name}", ratio, most=100 * _WHOLE_BASIS_POINTS)
        for name, ratio in ratios.items()
    }


def _units(model: str, entry: Any, ratios: Mapping[TokenClass, int]) -> dict[TokenClass, int]:
    own = {token_class.value for token_class in _OWN_PRICE}
    optional = {token_class.value for token_class in (*_FROM_INPUT, *_TIERS, TokenClass.PIN)}
    given = _mapping(f"models.{model}", entry, required=own, optional=optional)
    units = {
        TokenClass(name): _natural(f"models.{model}.{name}", unit, most=MAX_UNIT_PUSD)
        for name, unit in given.items()
    }
    for token_class in _FROM_INPUT:
        if token_class not in units:
            units[token_class] = _share_of_input(model, token_class, units[TokenClass.INPUT], ratios)
    _check_order(model, units)
    return units


def _share_of_input(
    model: str, token_class: TokenClass, input_unit: int, ratios: Mapping[TokenClass, int]
) -> int:
    if token_class not in ratios:
        raise InvalidPriceBook(f"models.{model}.{token_class}: no price, and no ratio to the input price")
    unit, rest = divmod(input_unit * ratios[token_class], _WHOLE_BASIS_POINTS)
    if rest:
        raise InvalidPriceBook(
            f"models.{model}.{token_class}: {ratios[token_class]} basis points of {input_unit} is not whole"
        )
    return unit


def _check_order(model: str, units: Mapping[TokenClass, int]) -> None:
    input_unit = units[TokenClass.INPUT]
    for read in _READS:
        if units.get(read, 0) > input_unit:
            raise InvalidPriceBook(f"models.{model}.{read}: a cached token costs more than a computed one")
    for write in (TokenClass.WRITE_AUTO, TokenClass.WRITE_5M, TokenClass.WRITE_1H):
        if 0 < units[write] < input_unit:
            raise InvalidPriceBook(f"models.{model}.{write}: neither 0 nor at least the input price")
    if units[TokenClass.WRITE_1H] < units[TokenClass.WRITE_5M]:
        raise InvalidPriceBook(f"models.{model}.write_1h: an hour costs less than five minutes")


def _mapping(
    where: str, given: Any, *, required: set[str] | None = None, optional: set[str] | None = None
) -> dict[str, Any]:
    if not isinstance(given, dict) or not all(isinstance(key, str) for key in given):
        raise InvalidPriceBook(f"{where}: a mapping of names is needed")
    if required is None and optional is None:
        return given
    missing = (required or set()) - given.keys()
    if missing:
        raise InvalidPriceBook(f"{where}: {', '.join(sorted(missing))} is missing")
    unknown = given.keys() - (required or set()) - (optional or set())
    if unknown:
        raise InvalidPriceBook(f"{where}: {', '.join(sorted(unknown))} is not known")
    return given


def _natural(where: str, given: Any, *, most: int) -> int:
    # Not isinstance: YAML's true is an int to Python.
    if type(given) is not int or not 0 <= given <= most:
        raise InvalidPriceBook(f"{where}: {given!r} is no whole number from 0 to {most}")
    return given


def _name(where: str, given: Any, max_characters: int) -> str:
    if not isinstance(given, str) or not 0 < len(given) <= max_characters or not given.isprintable():
        raise InvalidPriceBook(f"{where}: {given!r} is no name of 1 to {max_characters} characters")
    return given


class _StrictLoader(yaml.SafeLoader):
    """YAML without two traps: a key given twice, and aliases that multiply."""

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not allowed in a price book")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.YAMLError(f"{key.value!r} is given twice")
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)

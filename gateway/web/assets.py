"""Scripts and styles under `/dashboard/static`: ours, and the script inside Plotly's Python package.

Knows files and HTTP caching. An address carries a digest of the content, so a browser may keep it
for ever and never shows an old one.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import Response

PREFIX: Final = "/dashboard/static"
PLOTLY: Final = "plotly.min.js"
_OWN: Final = ("dashboard.css", "dashboard.js", "icon.svg")
_MEDIA_TYPES: Final = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_STYLE_ID: Final = re.compile(r'document\.getElementById\("([0-9a-f]{64})"\)')
_VERSION_DIGITS: Final = 16
_FOR_EVER: Final = "public, max-age=31536000, immutable"
_ASK_AGAIN: Final = "no-cache"


class PlotlyMissing(Exception):
    """Plotly's Python package, or the script in it, is not installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """One file, whole, and compressed once."""

    name: str
    media_type: str
    content: bytes
    compressed: bytes
    version: str

    @property
    def address(self) -> str:
        return f"{PREFIX}/{self.name}?v={self.version}"


@functools.cache
def load_assets() -> Mapping[str, Asset]:
    """All of them, by name. Reads and compresses some megabytes the first time: not for an event loop.

    Raises `PlotlyMissing`.
    """
    own = resources.files("gateway.web") / "static"
    files: dict[str, Traversable] = {name: own / name for name in _OWN} | {PLOTLY: _plotly_script()}
    return {name: _load(name, file) for name, file in files.items()}


@functools.cache
def styles_to_withhold() -> tuple[str, ...]:
    """Ids of the style elements that Plotly's script would make, unless elements with those ids are there.

    None of them is for what we draw, and no page lets a script add a style.
    """
    found = _STYLE_ID.findall(load_assets()[PLOTLY].content.decode())
    return ("plotly.js-style-global", *dict.fromkeys(found))


def serve(asset: Asset, request: Request) -> Response:
    """The file; or 304 when the browser has it."""
    etag = f'"{asset.version}"'
    is_versioned = request.query_params.get("v") == asset.version
    headers = {
        "cache-control": _FOR_EVER if is_versioned else _ASK_AGAIN,
        "etag": etag,
        "vary": "accept-encoding",
        "x-content-type-options": "nosniff",
        "cross-origin-resource-policy": "same-origin",
    }
    if request.headers.get("if-none-match") == etag:
        return Response(status_code=304, headers=headers)
    if _takes_gzip(request.headers.get("accept-encoding", "")):
        return Response(
            asset.compressed, headers=headers | {"content-encoding": "gzip"}, media_type=asset.media_type
        )
    return Response(asset.content, headers=headers, media_type=asset.media_type)


def _takes_gzip(accept_encoding: str) -> bool:
    codings = (coding.replace(" ", "").lower() for coding in accept_encoding.split(","))
    return any(coding == "gzip" or (coding.startswith("gzip;q=") and coding[7:] != "0") for coding in codings)


def _plotly_script() -> Path:
    # find_spec does not run the package, which would take longer than all else here.
    spec = importlib.util.find_spec("plotly")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        script = Path(location) / "package_data" / PLOTLY
        if script.is_file():
            return script
    raise PlotlyMissing(f"{PLOTLY} was not found: install the Python package `plotly`")


def _load(name: str, file: Traversable) -> Asset:
    content = file.read_bytes()
    return Asset(
        name=name,
        media_type=_MEDIA_TYPES[name[name.rindex(".") :]],
        content=content,
        compressed=gzip.compress(content, mtime=0),
        version=hashlib.sha256(content).hexdigest()[:_VERSION_DIGITS],
    )

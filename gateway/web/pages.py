"""Templates, and the headers that every page carries.

Knows Jinja and browsers' security headers. Does not know sessions or usage.
Everything that a template prints is escaped; no page holds a script of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.responses import HTMLResponse, RedirectResponse, Response

from gateway.web.assets import Asset, styles_to_withhold

_CONTENT_SECURITY_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'{styles}",
        "img-src 'self'{images}",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
# Plotly sets style attributes when a bar is pointed at. No style element is allowed, nor any script.
_CHART_STYLES: Final = "; style-src-attr 'unsafe-inline'"

NAVIGATION: Final = (
    ("today", "Today", "/dashboard", False),
    ("cache", "Cache", "/dashboard/cache", False),
    ("usage", "Usage", "/dashboard/usage", False),
    ("requests", "Requests", "/dashboard/requests", False),
    ("statements", "Statements", "/dashboard/statements", False),
    ("prefixes", "Prefixes", "/dashboard/prefixes", True),
    ("tenants", "Tenants", "/dashboard/tenants", True),
    ("prices", "Prices", "/dashboard/prices", True),
    ("workers", "Workers", "/dashboard/workers", True),
)
"""Name, label, address, and whether it is for admins alone."""

PAGE_HEADERS: Final[Mapping[str, str]] = {
    "content-security-policy": _CONTENT_SECURITY_POLICY.format(styles="", images=""),
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=(), payment=()",
}

_templates: Final = Environment(
    loader=PackageLoader("gateway.web"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def render(
    template: str, assets: Mapping[str, Asset], *, status: int = 200, has_chart: bool = False, **values: Any
) -> HTMLResponse:
    """A page. Raises Jinja's `UndefinedError` when a value that the template needs is missing."""
    addresses = {name: asset.address for name, asset in assets.items()}
    withheld = styles_to_withhold() if has_chart else ()
    text = render_text(
        template, **values, asset=addresses, has_chart=has_chart, withheld=withheld, navigation=NAVIGATION
    )
    headers = page_headers(styles=_CHART_STYLES) if has_chart else PAGE_HEADERS
    return HTMLResponse(text, status_code=status, headers=dict(headers))


def render_text(template: str, **values: Any) -> str:
    """Raises Jinja's `UndefinedError` when a value that the template needs is missing."""
    return _templates.get_template(template).render(**values)


def page_headers(*, styles: str = "", images: str = "") -> Mapping[str, str]:
    """`PAGE_HEADERS`, and leave for more than our own files: sources, each after a space."""
    policy = _CONTENT_SECURITY_POLICY.format(styles=styles, images=images)
    return {**PAGE_HEADERS, "content-security-policy": policy}


def go_to(address: str) -> Response:
    """After a form: the browser asks for the page with GET, so that reloading posts nothing again."""
    return RedirectResponse(address, status_code=303, headers=dict(PAGE_HEADERS))

"""A statement as a page that prints: one file, which asks for nothing else.

Knows the template and its style. Does not know how a statement came to be. The same page is
written to a file by the command and served to a browser.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib import resources

from starlette.responses import HTMLResponse

from billing.statements import Statement
from gateway.statements import view_of
from gateway.web.pages import page_headers, render_text


def as_html(statement: Statement, digest: bytes | None) -> str:
    """`digest` is None for a preview, which has none."""
    return render_text("statement.html", view=view_of(statement, digest), style=_style())


def statement_page(statement: Statement, digest: bytes | None) -> HTMLResponse:
    # An empty image stands for an icon, which a browser would otherwise ask for.
    headers = page_headers(styles=_style_source(), images=" data:")
    return HTMLResponse(as_html(statement, digest), headers=dict(headers))


@functools.cache
def _style() -> str:
    return (resources.files("gateway.web") / "static" / "statement.css").read_text("utf-8")


@functools.cache
def _style_source() -> str:
    """The style itself, by its digest, and no other."""
    digest = hashlib.sha256(_style().encode()).digest()
    return f" 'sha256-{base64.b64encode(digest).decode()}'"

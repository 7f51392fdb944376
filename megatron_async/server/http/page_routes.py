"""The page for people at "/": files of the package, served as they are.

They load nothing from elsewhere, and the policy that is sent with them lets a browser run no other
code and ask no other host: what a model writes is a stranger's text.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from megatron_async.server.fields.refusal import Refusal
from megatron_async.server.http.app import Route
from megatron_async.server.http.exchange import Exchange
from megatron_async.server.http.replies import Headers, reply

FOLDER = Path(__file__).parents[1] / "page"
INDEX = "index.html"
TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
POLICY = b"; ".join(
    (
        b"default-src 'none'", b"script-src 'self'", b"style-src 'self'", b"connect-src 'self'",
        b"img-src 'self'", b"base-uri 'none'", b"form-action 'none'", b"frame-ancestors 'none'",
        b"require-trusted-types-for 'script'", b"trusted-types 'none'",
    )
)  # fmt: skip
"""Content-Security-Policy. Trusted types make every sink of HTML (innerHTML) an error."""
HEADERS: Headers = (
    (b"content-security-policy", POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
)


def page_routes() -> list[Route]:
    """The routes of the page; its files are read once, and need no key."""
    files = {
        path.name: (path.read_bytes(), TYPES[path.suffix])
        for path in FOLDER.iterdir()
        if path.suffix in TYPES
    }

    async def show(file: str | None, exchange: Exchange, rest: str) -> None:
        found = files.get(file or rest)
        if found is None:
            raise Refusal(f"the page has no file {rest[:100]!r}.", 404, code="unknown_url")
        await reply(exchange.send, found[0], content_type=found[1], headers=HEADERS)

    return [
        Route("GET", "/", partial(show, INDEX), is_open=True),
        Route("GET", "/page/*", partial(show, None), is_open=True),
    ]

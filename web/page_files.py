"""The run page's files, as they stand in the package: none is built or fetched from elsewhere."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fastapi.responses import Response

FOLDER = Path(__file__).resolve().parent / "page"

KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""What a browser lets the page do: run our own files and ask our own routes."""


def read_file(name: str) -> Response | None:
    """A file of the page; None where there is none of that name."""
    body = _files().get(name)
    if body is None:
        return None
    headers = {
        "Content-Security-Policy": POLICY,
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(body, headers=headers, media_type=KINDS[Path(name).suffix])


@cache
def _files() -> dict[str, bytes]:
    # Looked up among the names that there are, so that no name leads out of the folder.
    return {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in KINDS}

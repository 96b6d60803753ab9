"""The app of `celeriac web`: the router alone, and errors of one shape also where no route is."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from runner.errors import SettingsError
from tasks import Client
from web.errors import answer_http_error
from web.guard import is_loopback
from web.routes import create_router


def create_app(client: Client, **options: Any) -> FastAPI:
    """An app with the routes of `create_router` at its root, described at `/openapi.json`.

    `options` are those of `create_router`; without a `principal`, loopback alone is served.
    """
    # A page of documents would run a script from elsewhere, with all that a user may do here.
    app = FastAPI(title="Celeriac", docs_url=None, redoc_url=None)
    app.include_router(create_router(client, **options))

    @app.exception_handler(HTTPException)
    async def _(_: Request, error: HTTPException) -> Response:
        return answer_http_error(error)

    return app


def serve(client: Client, *, host: str, port: int, ready: Callable[[str], object]) -> None:
    """Serve the app until told to stop; `ready` is called with its address once it is bound.

    Nobody says who is asking, so a host that others can reach is refused (`SettingsError`).
    """
    if not is_loopback(host):
        raise SettingsError(
            f"celeriac web knows no users, so it serves this machine alone and not {host}; mount "
            "create_router in an application that knows who is asking, or use an SSH tunnel"
        )
    client.store.check()
    config = uvicorn.Config(
        create_app(client),
        log_level="warning",
        # A proxy in front would make strangers look like this machine.
        proxy_headers=False,
        # A browser that follows a run would hold its connection for as long as the run takes.
        timeout_graceful_shutdown=1,
    )
    try:
        bound = socket.create_server((host, port), family=_family(host))
    except OSError as error:
        raise SettingsError(
            f"can't serve at {host}:{port} ({error.strerror}); give another with --port, 0 is any "
            "that is free"
        ) from error
    with bound:
        address = f"[{host}]" if ":" in host else host
        ready(f"http://{address}:{bound.getsockname()[1]}/")
        uvicorn.Server(config).run(sockets=[bound])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET

"""What is refused before a route looks at it: strangers to this machine, and forms of other sites.

A page of another site can have a browser send a form here, with the cookies of the application that
this is mounted in, but not JSON. And it can have a name of its own lead to this machine, but the
browser then sends that name as the host.
"""

from __future__ import annotations

import ipaddress

from fastapi import Request

from web.errors import ErrorType, Refused

CHANGES = {"POST", "PUT", "PATCH", "DELETE"}


PASSED_ON = ("forwarded", "x-forwarded-for", "x-real-ip")
"""By which a proxy says that it asks for somebody else."""


def check_json(request: Request) -> None:
    """Refuse what would change something and isn't JSON, also where the body may be empty."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.method in CHANGES and kind != "application/json":
        raise Refused(
            415, ErrorType.NOT_JSON, "send Content-Type: application/json; the body may be {}"
        )


def check_local(request: Request) -> None:
    """Refuse whoever isn't on this machine, or reaches it by a foreign name."""
    peer = request.client.host if request.client else ""
    host = request.headers.get("host", "")
    passed_on = any(name in request.headers for name in PASSED_ON)
    if passed_on or not is_loopback(peer) or not is_loopback(_without_port(host)):
        raise Refused(
            403,
            ErrorType.NOT_LOCAL,
            "without a principal only this machine is served, as 127.0.0.1 or localhost; give "
            "create_router a principal",
        )


def is_loopback(host: str) -> bool:
    """Whether this is an address of this machine alone, or the name that always is one."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]

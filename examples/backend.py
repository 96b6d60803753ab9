"""A shop's web backend: its users ask about their orders, read along, and may change their minds.

CELERIAC_REDIS_URL=... SHOP_SESSIONS='{"a-long-secret": "u42"}' \\
    uvicorn --factory examples.backend:make_app

with workers of `examples.orders` beside it. A browser that has the cookie `session` may use it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

from fastapi import Cookie, Depends, FastAPI, HTTPException
from fastapi.responses import FileResponse
from pydantic import BaseModel

from tasks import AsyncClient, Client, Principal
from web import create_router

PAGE = Path(__file__).with_name("backend.html")


class Question(BaseModel):
    """A body of JSON: no page of another site can send one with the cookies of ours."""

    question: str


def sign_in(session: Annotated[str | None, Cookie()] = None) -> Principal:
    """Who is asking, by the cookie of the shop's own login."""
    users: dict[str, str] = json.loads(os.environ.get("SHOP_SESSIONS", "{}"))
    if session not in users:
        raise HTTPException(401, "sign in first")
    # A tenant of their own: nobody sees the runs of somebody else.
    return Principal(id=users[session], tenant=users[session])


def make_app(client: Client | None = None) -> FastAPI:
    """The backend; the runs are where `CELERIAC_REDIS_URL` says, unless a client is given."""
    client = client or Client()
    shop = AsyncClient.of(client)
    app = FastAPI()

    @app.get("/")
    async def show_page() -> FileResponse:
        return FileResponse(PAGE)

    @app.post("/orders/{order_id}/question", status_code=202)
    async def ask(
        order_id: str, asked: Question, user: Annotated[Principal, Depends(sign_in)]
    ) -> dict[str, str]:
        run = await shop.for_principal(user).submit(
            f"The customer asks about order {order_id}: {asked.question}",
            agent="support",
            metadata={"order": order_id},
        )
        return {"run": run.id}

    # The page follows and cancels a run by these routes; they act for whoever has signed in.
    app.include_router(create_router(client, principal=sign_in), prefix="/agents")
    return app

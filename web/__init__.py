"""Runs over HTTP: a router to mount in an application of one's own, and an app to run alone."""

from web.app import create_app
from web.routes import create_router

__all__ = ["create_app", "create_router"]

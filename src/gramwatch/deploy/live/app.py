"""The routes of the page: the page itself, the facts about its guard, and an image to judge."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse

from gramwatch.deploy.live.examiner import Examiner
from gramwatch.deploy.live.shown import Shown
from gramwatch.deploy.serve.server import OwnSite, server_of
from gramwatch.deploy.serve.service import busy, received
from gramwatch.errors import GramwatchError, InputError

HOST = "127.0.0.1"
"""The page can be opened from this machine only."""
PAGE = Path(__file__).parent / "page"
MOST_BYTES = 64 * 2**20
"""Bytes of an image file."""
MOST_WAITING = 8
"""Images that are read or judged at once. Windows of one person rarely make more."""
READ_SECONDS = 60.0
"""How long the browser may take to send an image."""
FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    "/page.js": ("page.js", "text/javascript"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""The browser keeps nothing and asks no other machine for anything."""


def create_page(examiner: Examiner, shown: Shown) -> FastAPI:
    """The page as an ASGI application.

    Args:
        examiner: judges and explains images.
        shown: what the page says about its guard.

    """
    desk = Desk(examiner)

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        desk.thread.shutdown()

    app = FastAPI(lifespan=life, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(OwnSite)
    about = {**shown.to_json(), "most_bytes": MOST_BYTES}
    for route, (name, kind) in FILES.items():
        app.get(route)(_file(PAGE / name, kind))

    @app.get("/about")
    async def told() -> JSONResponse:
        return JSONResponse(about, headers=HEADERS)

    @app.get("/examples/{number}")
    async def example(number: int) -> Response:
        if not 0 <= number < len(shown.examples):
            raise HTTPException(404, "there is no such example")
        shown_one = shown.examples[number]
        return Response(shown_one.data, media_type=shown_one.kind, headers=HEADERS)

    @app.post("/judge")
    async def judge(request: Request) -> JSONResponse:
        return JSONResponse(await desk.judged(request), headers=HEADERS)

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": error.detail}, error.status_code, {**HEADERS, **(error.headers or {})})

    @app.exception_handler(Exception)
    async def failed(_: Request, __: Exception) -> JSONResponse:
        reason = "the guard failed on this image: the terminal says why"
        return JSONResponse({"error": reason}, 500, HEADERS)

    return app


def _file(path: Path, kind: str) -> Callable[[], Response]:
    text = path.read_text(encoding="utf-8")

    def answer() -> Response:
        return Response(text, media_type=kind, headers=HEADERS)

    return answer


class Desk:
    """Takes images in and has them judged one after the other. None is kept."""

    def __init__(self, examiner: Examiner) -> None:
        self.examiner = examiner
        self.thread = ThreadPoolExecutor(1, "judge")
        self.waiting = 0

    async def judged(self, request: Request) -> dict[str, Any]:
        """The verdict on the image of a request, for the page. Raises an `HTTPException`."""
        if self.waiting >= MOST_WAITING:
            raise busy()
        self.waiting += 1
        try:
            too_large = f"the file is too large: it may have {MOST_BYTES // 2**20} MiB"
            too_slow = f"the image did not come within {READ_SECONDS:g} seconds"
            data = await received(request, MOST_BYTES, READ_SECONDS, too_large, too_slow)
            return await asyncio.get_running_loop().run_in_executor(self.thread, self.examiner, data)
        except GramwatchError as error:
            raise HTTPException(400, str(error)) from None
        finally:
            self.waiting -= 1


def opened_port(port: int) -> socket.socket:
    """A port of this machine, taken before a guard is loaded or trained. 0: any that is free."""
    opened = socket.socket()
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        opened.bind((HOST, port))
    except OSError as error:
        opened.close()
        reason = error.strerror or error
        raise InputError(f"port {port} cannot be used ({reason}): name another, or 0 for any") from None
    return opened


def run_page(app: FastAPI, opened: socket.socket, started: Callable[[str], None] | None = None) -> None:
    """Serve the page on this machine until Ctrl-C or SIGTERM.

    Args:
        app: the application of `create_page`.
        opened: what `opened_port` returned.
        started: called with the address when the page can be opened.

    """
    server_of(app, HOST, started=started).run(sockets=[opened])

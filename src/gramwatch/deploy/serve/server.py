"""Running the service, and who may ask it.

Uvicorn serves, with a limit on how long a client may take to send its headers.
"""

import asyncio
import ipaddress
import signal
from collections.abc import Callable, Sequence
from typing import Any, cast
from urllib.parse import urlsplit

import h11
import uvicorn
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from gramwatch.errors import InputError

SHORTEST_TOKEN = 16
"""The fewest letters of a token."""
READS = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing. A page elsewhere cannot read their answers."""


def is_loopback(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_reach(host: str, token: str | None, anyone: bool = False) -> None:
    """Raise an error if others could ask without a token, unless `anyone` is to be able to."""
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise InputError(f"the token has {len(token)} letters: it needs at least {SHORTEST_TOKEN}")
    if token is None and not anyone and not is_loopback(host):
        raise InputError(
            f"{host} can be reached from other machines, and there is no token: set GRAMWATCH_TOKEN, give "
            "--token-file, or --allow-anyone if something else keeps others away"
        )


class OwnSite:
    """Middleware that refuses requests that another website makes a browser send to this machine.

    A page of any site may post to `http://127.0.0.1:8000`, and the browser sends it. A site may also give its
    own name the address of this machine (DNS rebinding), and then read the answers. Programs and pages of
    this site may ask.

    Args:
        app: the application.
        hosts: names of this machine besides `localhost` and its addresses. `"*"`: any name.

    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str] = ()) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] == "http" and (reason := self._refusal(scope["method"], Headers(scope=scope))):
            await JSONResponse({"error": reason}, 403)(scope, receive, send)
            return
        await self.app(scope, receive, send)

    def _refusal(self, method: str, headers: Headers) -> str:
        host = headers.get("host", "")
        name = _name_in(host)
        if "*" not in self.hosts and name not in self.hosts and not is_loopback(name):
            return f"this machine is not known as '{name:.80}': ask localhost, or use a token"
        if method in READS:
            return ""
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if site is not None:
            own = site in ("same-origin", "none")
        else:
            own = origin is None or origin.partition("://")[2] == host
        return "" if own else "a page of another site may not ask"


def _name_in(host: str) -> str:
    """The name or address in the header Host, without the port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def server_of(
    app: FastAPI,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    read_seconds: float = 10.0,
    stop_seconds: int = 60,
    started: Callable[[str], None] | None = None,
) -> "Server":
    """The server of an application.

    Args:
        app: the application of `create_app`.
        host: the address to listen at.
        port: the port. 0: any that is free.
        read_seconds: how long a client may take to send its headers.
        stop_seconds: how long the end may take.
        started: called with the address when the service listens.

    """
    config = uvicorn.Config(
        app,
        host,
        port,
        http=_prompt(read_seconds),
        ws="none",
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=stop_seconds,
    )
    return Server(config, started)


class Server(uvicorn.Server):
    """Serves until SIGTERM or Ctrl-C, then finishes what was accepted: `run()`.

    It says where it listens. A second Ctrl-C ends it at once.
    """

    def __init__(self, config: uvicorn.Config, started: Callable[[str], None] | None) -> None:
        super().__init__(config)
        self._announce = started

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Begin to end. Uvicorn itself would raise the signal again after that."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def startup(self, *arguments: Any, **options: Any) -> None:
        """Open the port."""
        await super().startup(*arguments, **options)
        if self._announce is not None and self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._announce(f"http://{f'[{host}]' if ':' in host else host}:{port}")


def _prompt(seconds: float) -> type[H11Protocol]:
    """HTTP with a limit on the time for headers. Uvicorn itself waits for ever."""

    class Prompt(H11Protocol):
        _due: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(cast(asyncio.Transport, _Joined(transport, self.loop)))
            self._wait_or_not()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._wait_or_not()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            if self._due is not None:
                self._due.cancel()

        def _wait_or_not(self) -> None:
            """Keep a timer as long as the headers are not complete."""
            if self.conn.their_state is not h11.IDLE:
                if self._due is not None:
                    self._due.cancel()
                self._due = None
            elif self._due is None:
                self._due = self.loop.call_later(seconds, self.transport.close)

    return Prompt


class _Joined:
    """A transport that joins what is written in one turn of the event loop.

    Uvicorn writes the headers and the body of an answer one after the other. To send them at once takes half
    the time, and the client wakes once.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._pieces: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._pieces:
            self._loop.call_soon(self._send)
        self._pieces.append(data)

    def _send(self) -> None:
        if self._pieces:
            self._transport.write(b"".join(self._pieces))
            self._pieces.clear()

    def close(self) -> None:
        """Send what was written, then close."""
        self._send()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

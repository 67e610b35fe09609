"""Middleware that refuses requests that another website makes a browser send to this machine.

A page of any site may post to `http://127.0.0.1:8000`, and the browser sends it. A site may also give its own
name the address of this machine (DNS rebinding), and then read the answers.
"""

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gramwatch.deploy.serve.server import is_loopback

READS = ("GET", "HEAD", "OPTIONS")
"""Methods that change nothing. A page elsewhere cannot read their answers."""


class OwnSite:
    """Accepts requests of programs and of pages of this site. Refuses those of other pages.

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

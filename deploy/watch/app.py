"""The live page's server: one page, its events, and two things to do. On loopback, or with a token and TLS."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from fedstill.common.config import ConfigError
from fedstill.deploy.coordinator.certificates import Certificates, check_server, hosts_of
from fedstill.deploy.watch.follow import Folder, stream
from fedstill.server.page import asset
from fedstill.server.record import STOP

PORT = 8700  # the usual one
COOKIE = "fedstill-token"
KEY = "x-fedstill-key"
SAFE = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
KINDS = {"css": "text/css", "js": "text/javascript"}


@dataclass(frozen=True)
class Door:
    """Who may come in: anybody on this machine, or by TLS and with the token from elsewhere."""

    socket: socket.socket
    names: tuple[str, ...]  # under which browsers may call; any other is a trick with the name service
    certificates: Certificates | None = None
    token: str | None = None
    key: str = field(default_factory=lambda: secrets.token_urlsafe(24))  # of this page; another site cannot read it

    @property
    def url(self) -> str:
        """The page's address, for a person to open."""
        scheme, port = "http" if self.certificates is None else "https", self.socket.getsockname()[1]
        name = f"[{self.names[0]}]" if ":" in self.names[0] else self.names[0]
        return f"{scheme}://{name}:{port}/" + (f"?token={self.token}" if self.token else "")


def open_door(
    host: str = "127.0.0.1", port: int | None = None, folder: Path | None = None, token: str | None = None
) -> Door:
    """Listen; on any address but loopback only with certificates (in `folder`), and then always with a token."""
    host = host.strip("[]")
    if not is_loopback(host) and folder is None:
        raise ConfigError(
            f"--host {host}: the page stops and resumes runs, so away from this machine it needs TLS: give "
            "--certificates FOLDER (see fedstill certs new), or watch through ssh -L 8700:127.0.0.1:8700"
        )
    if token is not None and len(token) < 16:
        raise ConfigError("a token of fewer than 16 characters can be guessed; leave it out and get a new one")
    certificates = None if folder is None else Certificates.of(folder)
    names = [] if certificates is None else hosts_of(check_server(certificates))
    if not is_loopback(host):
        token = token or secrets.token_urlsafe(24)
    return Door(_listen(host, port), (*names, host, "127.0.0.1", "localhost", "::1"), certificates, token)


def _listen(host: str, port: int | None) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, PORT if port is None else port), family=family)
    except OSError as error:
        if port is None:  # nobody insisted on the usual one
            return socket.create_server((host, 0), family=family)
        raise ConfigError(f"--port {port}: {error.strerror}; take another, or 0 for any free one") from None


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def make_app(folder: Folder, door: Door) -> Starlette:
    """Build the page's server."""

    async def page(request: Request) -> Response:
        if "token" in request.query_params:  # put it away: it must not stay in the address bar
            answer: Response = RedirectResponse("/", 303)
            answer.set_cookie(
                COOKIE, request.query_params["token"], httponly=True, samesite="strict", secure=bool(door.certificates)
            )
            return answer
        return Response(asset("live.html").replace("{key}", door.key), media_type="text/html")

    async def file(request: Request) -> Response:
        name = request.url.path.lstrip("/")
        return Response(asset(name), media_type=KINDS[name.rpartition(".")[2]])

    async def events(request: Request) -> Response:
        last = request.headers.get("last-event-id", "0")
        start = int(last) if last.isdecimal() else 0
        return StreamingResponse(stream(folder, start), media_type="text/event-stream")

    async def stop(request: Request) -> Response:
        (folder.path / STOP).touch()
        return PlainTextResponse("It stops when this round is saved.")

    async def go_on(request: Request) -> Response:
        (folder.path / STOP).unlink(missing_ok=True)
        return PlainTextResponse("It goes on.")

    async def resume(request: Request) -> Response:
        if not folder.facts()["resumable"]:
            return PlainTextResponse("the run is running, or it was not started from here", 409)
        folder.started = time.time()
        log = folder.path / "logs" / "resume.log"
        log.parent.mkdir(exist_ok=True)
        with log.open("ab") as file:
            command = [sys.executable, "-m", "fedstill.cli", "resume", str(folder.path)]
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)
        return PlainTextResponse(f"Resuming; see {log}.")

    routes = [Route("/", page), Route("/events", events)]
    routes += [Route(f"/{name}", file) for name in ("style.css", "charts.js", "story.js", "live.js")]
    routes += [Route(f"/{name}", act, methods=["POST"]) for name, act in (("stop", stop), ("go-on", go_on))]
    routes.append(Route("/resume", resume, methods=["POST"]))
    app = Starlette(routes=routes)

    async def guard(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        refused = refusal(request, door, folder)
        response = await answer(request) if refused is None else PlainTextResponse(*refused)
        for name, value in SAFE.items():
            response.headers[name] = value
        return response

    app.add_middleware(BaseHTTPMiddleware, dispatch=guard)
    return app


def refusal(request: Request, door: Door, folder: Folder) -> tuple[str, int] | None:
    """Return why a request is not answered, with its status; None if it is."""
    if urlsplit(f"//{request.headers.get('host', '')}").hostname not in door.names:
        return "this name is not this page's", 421
    given = request.query_params.get("token") or request.cookies.get(COOKIE, "")
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
    if door.token is not None and not (_same(given, door.token) or _same(bearer, door.token)):
        return "the token is missing or wrong; open the address that `fedstill watch` printed", 401
    if request.method == "POST":
        if not folder.steer:
            return "this page only looks", 403
        if not _same(request.headers.get(KEY, ""), door.key):
            return "the page is from an earlier start of fedstill watch: reload it", 403
    return None


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())


class Serving:
    """The page's server; `run` serves in this thread until it is interrupted, `start` in another one."""

    def __init__(self, folder: Folder, door: Door) -> None:
        files = door.certificates
        self.door = door
        settings = uvicorn.Config(
            make_app(folder, door),
            log_level="warning",
            timeout_graceful_shutdown=1,
            ssl_certfile=None if files is None else files.certificate,
            ssl_keyfile=None if files is None else files.key,
        )
        self.server = uvicorn.Server(settings)

    def run(self) -> None:
        """Serve until Ctrl-C."""
        self.server.run(sockets=[self.door.socket])

    def start(self) -> Serving:
        """Serve beside what this thread does."""
        threading.Thread(target=self.run, daemon=True).start()
        return self

    def stop(self) -> None:
        """Close the page."""
        self.server.should_exit = True

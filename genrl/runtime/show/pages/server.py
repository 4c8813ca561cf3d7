"""The local server of `genrl watch`: on loopback only, it reads and never writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from genrl.runtime.show.pages.live import Live

LOOPBACK = "127.0.0.1"
_HOSTS = ("127.0.0.1", "localhost")
_TYPES = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8", "json": "application/json",
          "png": "image/png", "gif": "image/gif", "wav": "audio/wav"}  # fmt: skip
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src 'self' data:; media-src 'self'; "
    "connect-src 'self'"
)


class Server(ThreadingHTTPServer):
    """Serves a page of these runs at `url` once `serve_forever` is called; `server_close` ends it."""

    daemon_threads = True
    block_on_close = False  # a browser keeps connections that it does not use

    def __init__(self, live: Live, port: int = 0) -> None:
        """port: 0 for a free one. Raises ValueError where it is taken."""
        self.live = live
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ValueError(f"port {port} cannot be used: {error}. Give another one, or 0 for a free one.") from None

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in _HOSTS:  # another site's name that leads here would let its scripts read the answer
            return self._answer("html", b"This page is for this machine only.", HTTPStatus.FORBIDDEN)
        url = urlsplit(self.path)
        response = self._find(url.path, parse_qs(url.query))
        if response is None:
            return self._answer("html", b"There is nothing here.", HTTPStatus.NOT_FOUND)
        self._answer(*response)

    def _find(self, path: str, query: dict[str, list[str]]) -> tuple[str, bytes] | None:
        """(kind, content) of what is asked for."""
        live = self.server.live
        routes: dict[str, Callable[[], Any]] = {
            "/state.json": live.state,
            "/figures.json": lambda: live.figures(query.get("key", []), set(map(_number, query.get("hide", [])))),
            "/prompts.json": lambda: live.prompts(_number(query.get("page", ["0"])[0]), query.get("find", [""])[0]),
        }
        if path == "/":
            return "html", live.page().encode()
        if path == "/watch.js":
            return "js", files("genrl.runtime.show.pages").joinpath("watch.js").read_bytes()
        if path in routes:
            return "json", json.dumps(routes[path]()).encode()
        kind, _, rest = path.removeprefix("/").partition("/")
        number, _, name = rest.partition("/")
        if kind != "file" or not number.isdecimal():
            return None
        return live.file(_number(number), unquote(name))

    def _answer(self, kind: str, content: bytes, status: HTTPStatus = HTTPStatus.OK) -> None:
        cache = "private, max-age=86400" if kind in ("png", "gif", "wav") else "no-store"
        headers = {
            "Content-Type": _TYPES[kind],
            "Content-Length": str(len(content)),
            "Content-Security-Policy": _POLICY,
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": cache,
        }
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)
        except ConnectionError:
            self.close_connection = True  # the page was left

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are not worth a line each; what goes wrong is printed with its traceback."""


def _number(text: str) -> int:
    """0 for what is no number."""
    return int(text) if text.isdecimal() and len(text) < 10 else 0

"""Connections of a reward's server: those that have not shown that they may use it hold no place of those that have."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

ADMISSION_S = 10.0
STRANGERS = 64


class Connection(H11Protocol):
    """One connection, for one request.

    It is a stranger until the application has seen its header and set `request.state.admitted`. A stranger is dropped
    after `ADMISSION_S` seconds, however busily its header drips in, or if `STRANGERS` newer ones have come.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.since = self.loop.time()
        self.timer = self.loop.call_later(ADMISSION_S, self.drop_stranger)
        strangers = [c for c in self.connections if isinstance(c, Connection) and c.is_stranger()]
        if len(strangers) > STRANGERS:
            min(strangers, key=lambda connection: connection.since).drop_stranger()

    def connection_lost(self, exc: Exception | None) -> None:
        self.timer.cancel()
        super().connection_lost(exc)

    def is_stranger(self) -> bool:
        """Whether the application has not admitted it yet."""
        return self.scope is None or not self.scope["state"].get("admitted")

    def drop_stranger(self) -> None:
        """Close it without a word, unless it has been admitted."""
        if self.is_stranger():
            self.connections.discard(self)
            self.transport.abort()


def server(application: Any) -> uvicorn.Server:
    """The server of an application; `run(sockets=[...])` runs it until the process is asked to end."""
    settings = uvicorn.Config(
        application,
        http=Connection,
        log_level="warning",
        lifespan="off",
        ws="none",
        proxy_headers=False,
        server_header=False,
        headers=[("Connection", "close")],
        timeout_graceful_shutdown=5,
    )
    return uvicorn.Server(settings)

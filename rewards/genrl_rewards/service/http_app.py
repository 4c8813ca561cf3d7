"""The HTTP application of one served reward. `genrl_rewards.service.serve` runs it, `genrl_rewards.service.wire` has
the format.

    GET  /health  {"status": "ok"}
    GET  /info    name, what it takes and may take, protocol, limits
    POST /score   a request of `genrl_rewards.service.wire` -> scores, or {"error": text} and a status that is not 200;
                  with "final": true where asking again would not help

The token is checked before a body is read, bodies are bounded before they are parsed, pictures before they are decoded.
Of the bodies of requests that wait, all but a start is on disk. A reply never holds a traceback: those go to this
process's log.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from tempfile import SpooledTemporaryFile
from typing import IO, Any, TypeAlias

import uvicorn
from fastapi import Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from uvicorn.protocols.http.h11_impl import H11Protocol

from genrl_rewards.contract import Reward, check_columns, needs, options_of, score
from genrl_rewards.service import wire
from genrl_rewards.service.wire import BadRequest, Limits

logger = logging.getLogger(__name__)

BODY_SECONDS = 120.0  # for a body to arrive
LINGER_S = 1.0  # for a client that is refused to send what it has begun to: otherwise it may not see the reply
PLACES = 64  # requests that send their bodies, or wait to be scored
IN_MEMORY = 2**20  # bytes of each of their bodies; more than that lies in a temporary file
ADMISSION_S = 10.0  # for a connection to show that it may use the server
STRANGERS = 64  # that have not shown it yet
REMEMBERED = 64  # replies kept for clients that ask again because the first reply was late

Answer: TypeAlias = tuple[int, dict[str, Any]]
"""Status and content."""


class Refused(Exception):
    """A request that is answered by a status and an error before anything is scored."""

    def __init__(self, status: int, error: str, *, final: bool = False):
        super().__init__(error)
        self.status = status
        self.content = {"error": error} | ({"final": True} if final else {})


class Scorer:
    """Scores requests one at a time, in the order in which they arrive.

    One thread does it: rewards need not be safe for several, and torch's number of threads is kept per thread.
    """

    def __init__(self, reward: Reward, name: str, limits: Limits, threads: int | None):
        self.reward, self.name, self.limits = reward, name, limits
        self._thread = ThreadPoolExecutor(1, initializer=_set_threads, initargs=(threads,))
        self._remembered: OrderedDict[tuple[str, ...], Answer] = OrderedDict()

    async def score(self, body: IO[bytes], content_type: str, key: tuple[str, ...]) -> Answer:
        """The answer to a request. A request with the `key` of an earlier one gets the earlier answer."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._once, body, content_type, key)

    def _once(self, body: IO[bytes], content_type: str, key: tuple[str, ...]) -> Answer:
        # In this thread, after whatever was scoring: a client that asks again while its first request runs finds the
        # answer here instead of having it scored twice.
        if key in self._remembered:
            return self._remembered[key]
        body.seek(0)
        answer = self._answer(body.read(), content_type)
        if key:
            self._remembered[key] = answer
            while len(self._remembered) > REMEMBERED:
                self._remembered.popitem(last=False)
        return answer

    def _answer(self, body: bytes, content_type: str) -> Answer:
        import torch

        reward, name = self.reward, self.name
        try:
            request_batch = wire.decode(body, content_type, self.limits)
            check_columns(reward, request_batch.columns, name=name)
            if needs(reward).kind != "pointwise" and request_batch.group is None:
                raise BadRequest(f"reward {name!r} compares the samples of a group: send `group`")
        except ValueError as error:  # a BadRequest, or a missing column
            return 422, {"error": str(error), "final": True}
        try:
            scores = score(
                reward,
                images=request_batch.images,
                prompts=request_batch.prompts,
                columns=request_batch.columns,
                group=request_batch.group,
                name=name,
            )
        except ValueError as error:  # the reward returned something that is not scores
            return 500, {"error": str(error), "final": True}
        except torch.OutOfMemoryError:
            logger.exception("reward %s", name)
            return 500, _raised(name, "OutOfMemoryError")
        # A server's traceback may hold paths and prompts of others; clients are told the kind alone.
        if scores.failures:
            logger.error("reward %s raised:\n%s", name, scores.failures[0].traceback)
            kind = scores.failures[0].error.partition(":")[0]
            return 500, _raised(name, kind)
        return 200, wire.encode_reply(scores)


def app(
    reward: Reward, name: str, *, token: str = "", limits: Limits | None = None, threads: int | None = None
) -> FastAPI:
    """The ASGI application that serves `reward`.

    token: every request but /health must send it as `Authorization: Bearer TOKEN`; empty: none is needed.
    threads: torch's number of threads on the CPU; None: torch's default.
    """
    limits = limits or Limits()
    scorer, places = Scorer(reward, name, limits, threads), asyncio.Semaphore(PLACES)
    server = FastAPI(title="genrl reward", docs_url=None, redoc_url=None, openapi_url=None)

    async def check_token(request: Request) -> None:
        authorization = request.headers.get("authorization", "").encode("utf-8", "surrogateescape")
        # In constant time, so that how long a refusal takes says nothing of how many letters were right.
        if token and not hmac.compare_digest(authorization, f"Bearer {token}".encode()):
            raise Refused(401, "the token is missing or wrong")
        request.state.admitted = True  # see `Connection`

    @server.get("/health")
    def health() -> Any:
        return {"status": "ok"}

    @server.get("/info", dependencies=[Depends(check_token)])
    def info() -> Any:
        served = {"name": name, "takes": needs(reward).names, "options": options_of(reward)}
        return {"protocol": wire.PROTOCOL, **served, "limits": vars(limits)}

    @server.post("/score", dependencies=[Depends(check_token)])
    async def post(request: Request) -> Any:
        if places.locked():
            raise Refused(503, f"{PLACES} requests are waiting")
        content_type, key = request.headers.get("content-type", ""), request.headers.get("x-request-id", "")[:64]
        limit = limits.bytes if wire.kind_of(content_type) == wire.SAFETENSORS else min(limits.bytes, wire.MAX_JSON)
        async with places:
            with SpooledTemporaryFile(IN_MEMORY) as body:
                digest = await _receive(request, body, limit)
                # With the digest: a client that reuses an id for another body must not be given the first one's scores.
                return _reply(*await scorer.score(body, content_type, (key, content_type, digest) if key else ()))

    @server.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> Any:
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (await request.receive()).get("more_body"):
                    pass
        return _reply(error.status, error.content)

    @server.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Any:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return _reply(500, {"error": "internal error; see the log of the server"})

    return server


def _reply(status: int, content: dict[str, Any]) -> JSONResponse:
    if "error" in content:  # it may quote the request: no lone surrogates, no megabytes
        content = content | {"error": content["error"].encode("utf-8", "replace").decode()[:1000]}
    return JSONResponse(content, status)


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


def _raised(name: str, kind: str) -> dict[str, Any]:
    return {"error": f"reward {name!r} raised {kind}; its traceback is in the log of the server", "final": True}


async def _receive(request: Request, body: IO[bytes], limit: int) -> str:
    """Write the body into a file, no more than the limit, and return its digest. Raises Refused if there is more, or if
    it takes too long."""
    length = request.headers.get("content-length", "")
    # Refused before the first byte where the header says so; it may also lie, or be absent, so bytes are counted below.
    if length.isdecimal() and len(length) < 20 and int(length) > limit:
        raise Refused(413, f"a body of {int(length)} bytes; at most {limit} are accepted", final=True)
    digest, size = hashlib.blake2b(), 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                size += len(piece)
                if size > limit:
                    error = f"a body of more than {limit} bytes, which is the most that is accepted"
                    raise Refused(413, error, final=True)
                digest.update(piece)
                body.write(piece)
    except TimeoutError as error:
        raise Refused(408, f"the body did not arrive within {BODY_SECONDS:g} s") from error
    except ClientDisconnect as error:
        raise Refused(400, "the body was cut off") from error
    return digest.hexdigest()


class Connection(H11Protocol):
    """One connection, for one request: those that have not shown that they may use the server hold no place of those
    that have.

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

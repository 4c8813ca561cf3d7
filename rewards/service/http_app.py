"""The HTTP application of one served reward. `rewards.service.serve` runs it, `rewards.service.wire` says what travels.

    GET  /health  {"status": "ok"}
    GET  /info    name, what it takes, protocol, limits
    POST /score   a request of `rewards.service.wire` -> scores, or {"error": text} and a status that is not 200

Bodies are bounded before they are read, pictures before they are decoded. A reply never holds a traceback: those go to
this process's log.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from rewards.contract import Reward, check_columns, needs, score
from rewards.service import wire
from rewards.service.wire import BadRequest, Limits

logger = logging.getLogger(__name__)

BODY_SECONDS = 120.0  # for a body to arrive
AT_ONCE = 4  # bodies in memory; further ones wait in their sockets
REMEMBERED = 64  # replies kept for those who ask again because the first reply was late


def app(
    reward: Reward, name: str, *, token: str = "", limits: Limits | None = None, threads: int | None = None
) -> FastAPI:
    """The ASGI application that serves `reward`. One request is scored at a time, in the order of arrival.

    token: every request but /health must carry it as `Authorization: Bearer TOKEN`; empty: none is asked for.
    threads: of torch on the CPU; None: its own default.
    """
    limits = limits or Limits()
    takes = needs(reward)
    places = asyncio.Semaphore(AT_ONCE)
    # One thread scores: rewards need not be safe for several, and torch's number of threads is kept per thread.
    scorer = ThreadPoolExecutor(1, initializer=_set_threads, initargs=(threads,))
    remembered: OrderedDict[str, tuple[int, dict[str, Any]]] = OrderedDict()
    server = FastAPI(title="genrl reward", docs_url=None, redoc_url=None, openapi_url=None)

    def answer(status: int, content: dict[str, Any]) -> JSONResponse:
        if "error" in content:  # may quote the request: no lone surrogates, no megabytes
            content = {"error": content["error"].encode("utf-8", "replace").decode()[:1000]}
        return JSONResponse(content, status)

    def refused(request: Request) -> bool:
        given = request.headers.get("authorization", "").encode("utf-8", "surrogateescape")
        return bool(token) and not hmac.compare_digest(given, f"Bearer {token}".encode())

    def scored(body: bytes, content_type: str, key: str) -> tuple[int, dict[str, Any]]:
        if key in remembered:
            return remembered[key]
        found = _score(reward, name, body, content_type, limits)
        if key:
            remembered[key] = found
            while len(remembered) > REMEMBERED:
                remembered.popitem(last=False)
        return found

    @server.get("/health")
    def health() -> Any:
        return answer(200, {"status": "ok"})

    @server.get("/info")
    def info(request: Request) -> Any:
        if refused(request):
            return answer(401, {"error": "the token is missing or wrong"})
        return answer(200, {"protocol": wire.PROTOCOL, "name": name, "takes": takes.names, "limits": vars(limits)})

    @server.post("/score")
    async def post(request: Request) -> Any:
        if refused(request):
            return answer(401, {"error": "the token is missing or wrong"})
        async with places:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    body = await _body(request, limits.bytes)
            except TimeoutError:
                return answer(408, {"error": f"the body did not arrive within {BODY_SECONDS:g} s"})
            except BadRequest as error:
                return answer(413, {"error": str(error)})
            content_type, key = request.headers.get("content-type", ""), request.headers.get("x-request-id", "")[:64]
            return answer(*await asyncio.get_running_loop().run_in_executor(scorer, scored, body, content_type, key))

    @server.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> Any:
        logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return answer(500, {"error": "internal error; see the log of the server"})

    return server


def _set_threads(threads: int | None) -> None:
    if threads is not None:
        import torch

        torch.set_num_threads(threads)


async def _body(request: Any, limit: int) -> bytes:
    """The body, read no further than the limit. Raises BadRequest where there is more."""
    told = request.headers.get("content-length", "")
    if told.isdecimal() and len(told) < 20 and int(told) > limit:
        raise BadRequest(f"a body of {int(told)} bytes; at most {limit} are taken")
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise BadRequest(f"a body of more than {limit} bytes, which is the most that is taken")
    return bytes(body)


def _score(reward: Reward, name: str, body: bytes, content_type: str, limits: Limits) -> tuple[int, dict[str, Any]]:
    import torch

    try:
        asked = wire.decode(body, content_type, limits)
        check_columns(reward, asked.columns, name=name)
        if needs(reward).kind != "pointwise" and asked.group is None:
            raise BadRequest(f"reward {name!r} compares the samples of a group: send `group`")
    except BadRequest as error:
        return 422, {"error": str(error)}
    except ValueError as error:  # a column is missing
        return 422, {"error": str(error)}
    try:
        found = score(
            reward, images=asked.images, prompts=asked.prompts, columns=asked.columns, group=asked.group, name=name
        )
    except ValueError as error:  # the reward returned something that is not scores
        return 500, {"error": str(error)}
    except torch.OutOfMemoryError:
        logger.exception("reward %s", name)
        return 500, {"error": f"reward {name!r} raised OutOfMemoryError; its traceback is in the log of the server"}
    if found.failures:
        logger.error("reward %s raised:\n%s", name, found.failures[0].traceback)
        kind = found.failures[0].error.partition(":")[0]
        return 500, {"error": f"reward {name!r} raised {kind}; its traceback is in the log of the server"}
    return 200, wire.encode_reply(found)

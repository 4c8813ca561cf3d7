"""Serve one reward over HTTP, as a service (`genrl serve`) or for one parent process
(`genrl_rewards.service.isolation`).

The default address is 127.0.0.1; any address that other machines can reach needs a token.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import socket
import sys
import threading
import traceback
from typing import IO, TYPE_CHECKING

from genrl_rewards.extras import install
from genrl_rewards.loading import load, missing_packages

if TYPE_CHECKING:
    from fastapi import FastAPI

TOKEN_VARIABLE = "GENRL_REWARD_TOKEN"
PACKAGES = ("fastapi", "uvicorn", "safetensors")
"""What serving needs, by import name."""


def is_loopback(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_address(host: str, token: str) -> None:
    """Raise ValueError for an address that other machines can reach without a token, and if a token is not ASCII."""
    if not is_loopback(host) and not token:
        raise ValueError(
            f"{host} can be reached from other machines: set a token in the environment variable {TOKEN_VARIABLE} "
            "here and where the reward is used, or serve on 127.0.0.1"
        )
    if token and not token.isascii():
        raise ValueError(f"the token in {TOKEN_VARIABLE} must be ASCII text")


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; port 0 means any free one. Raises ValueError if the address cannot be used."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, socket.SOCK_STREAM)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        raise ValueError(f"cannot serve at {host} port {port}: {error.strerror or error}") from error
    return bound


def run(application: FastAPI, bound: socket.socket) -> None:
    """Serve until the process is asked to end."""
    from genrl_rewards.service.http_app import server

    server(application).run(sockets=[bound])


def require_extra() -> None:
    """Raise ValueError, with the pip command, if packages of the extra `serve` are missing."""
    missing = missing_packages(PACKAGES)
    if missing:
        raise ValueError(f"serving needs {missing}, which is not installed here: {install('serve')}")


def child(settings: IO[str], report: IO[str]) -> None:
    """Serve one isolated reward: read what to serve from `settings` (a line of JSON), write the port to `report`.

    The process ends when `settings` is closed, which the system does when the parent ends, whatever the reason.
    """
    settings_read = json.loads(settings.readline())
    try:
        require_extra()
        from genrl_rewards.service.http_app import app
        from genrl_rewards.service.wire import Limits

        reward = load(
            settings_read["name"], settings_read["args"], device=settings_read["device"], dtype=settings_read["dtype"]
        )
        bound = listen("127.0.0.1", 0)
    except Exception as error:  # noqa: BLE001  reported to the parent, which raises it
        message = str(error) if isinstance(error, ValueError) else traceback.format_exc()
        print(json.dumps({"error": message}), file=report, flush=True)
        return

    def end_with_parent() -> None:
        settings.read()
        # Without the interpreter's own end, which would wait for a reward that computes for nobody.
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()
    bound.listen()
    print(json.dumps({"port": bound.getsockname()[1]}), file=report, flush=True)
    limits = Limits(2**32, 2**16, 2**28)  # the parent could use as much memory itself
    application = app(
        reward, settings_read["name"], token=os.environ[TOKEN_VARIABLE], limits=limits, threads=settings_read["threads"]
    )
    run(application, bound)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    with os.fdopen(os.dup(1), "w") as report_to:
        os.dup2(2, 1)  # what the reward prints must not end up in the report
        child(sys.stdin, report_to)

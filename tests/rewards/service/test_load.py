"""Whoever may not use the server, or is slow, takes nothing from those who may; and no request takes all the memory."""

import io
import json
import re
import socket
import subprocess
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import torch
from PIL import Image

import genrl_rewards
from genrl_rewards.service import http_app, wire
from genrl_rewards.service.remote import Outage, Remote
from tests import servers
from tests.ports import free_port
from tests.rewards import plain_rewards

IMAGES = torch.rand(2, 3, 9, 7, generator=torch.Generator().manual_seed(0))
PATIENT = Outage(timeout_s=60, deadline_s=60)  # of a busy machine
POST = b"POST /score HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 1000000\r\n"
TOKEN = b"Authorization: Bearer right\r\n"


def opened(stack: ExitStack, url: str, text: bytes, count: int = 1) -> list[socket.socket]:
    """Connections that have sent no more than this."""
    address = httpx.URL(url).netloc.decode().split(":")
    made = [stack.enter_context(socket.create_connection(address)) for _ in range(count)]
    for connection in made:
        connection.settimeout(60)
        connection.sendall(text)
    return made


def assert_served(url: str) -> None:
    reward = Remote(url, "mine", token="right", outage=PATIENT)
    scores = genrl_rewards.score(reward, images=IMAGES, prompts=["a", "b"])
    assert scores == genrl_rewards.score(plain_rewards.mean, images=IMAGES, prompts=["a", "b"])


@pytest.mark.parametrize(("text", "count"), [(b"POST /sco", 70), (b"", 200), (POST + TOKEN + b"\r\n" + b"{", 4)])
def test_an_authorised_client_is_served_beside(text: bytes, count: int) -> None:
    with servers.live(plain_rewards.mean, token="right") as url, ExitStack() as stack:
        opened(stack, url, text, count)
        time.sleep(0.2)
        started = time.monotonic()
        assert_served(url)
        assert time.monotonic() - started < http_app.ADMISSION_S  # after which the others are cut off


def test_a_header_that_drips_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = http_app.ADMISSION_S
    monkeypatch.setattr(http_app, "ADMISSION_S", 0.5)
    with servers.live(plain_rewards.Moody(), token="right") as url, ExitStack() as stack:
        (connection,) = opened(stack, url, POST)
        started = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - started < usual:
                connection.sendall(b"X-More: 1\r\n")
                time.sleep(0.05)
        reward = Remote(url, token="right", outage=PATIENT)
        assert genrl_rewards.score(reward, images=IMAGES, prompts=["sleep", ""]).unscored == 0


def test_a_body_that_drips_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_app, "BODY_SECONDS", 0.3)
    monkeypatch.setattr(http_app, "LINGER_S", 0.1)
    with servers.live(plain_rewards.mean, token="right") as url, ExitStack() as stack:
        (connection,) = opened(stack, url, POST + TOKEN + b"\r\n")
        connection.sendall(b"{")
        assert connection.recv(100).startswith(b"HTTP/1.1 408")  # within its 60 s, half of what is usual


def test_without_the_token_no_body_is_read_before_the_answer() -> None:
    with servers.live(plain_rewards.mean, token="right") as url, ExitStack() as stack:
        (connection,) = opened(stack, url, POST + b"\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 401")
        reply = httpx.post(url + "/score", content=b"x" * 2**24, trust_env=False)  # the answer reaches whoever sends on
        assert reply.status_code == 401


def test_a_server_with_no_place_left_says_so_and_the_client_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_app, "PLACES", 2)
    monkeypatch.setattr(http_app, "LINGER_S", 0.1)
    with servers.live(plain_rewards.mean, token="right") as url, ExitStack() as stack:
        slow = opened(stack, url, POST + TOKEN + b"\r\n", 2)
        headers = {"Authorization": "Bearer right"}
        for _ in range(300):  # until both are there
            time.sleep(0.1)
            if (status := httpx.post(url + "/score", headers=headers, trust_env=False).status_code) == 503:
                break
        assert status == 503
        for connection in slow:
            connection.close()
        assert_served(url)


@pytest.fixture(scope="module")
def process() -> Iterator[tuple[str, Path]]:
    """A server in a process of its own: its URL, and where its memory is written down."""
    port = free_port()
    server: subprocess.Popen[bytes] = servers.spawn("tests/rewards/plain_rewards.py:Moody", port)
    yield f"http://127.0.0.1:{port}", Path(f"/proc/{server.pid}")
    server.kill()
    server.wait(10)


def picture(side: int) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (side, side)).save(stream, "PNG")
    return json.dumps({"images": [b64encode(stream.getvalue()).decode()], "prompts": [""]}).encode()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize(
    ("body", "status", "most_mb"),
    [
        (lambda: b'{"a":[' + b"[]," * (250_000_000 // 3) + b"[]]}", 413, 100),
        (lambda: b'{"a":[' + b"[]," * (wire.MAX_JSON // 3 - 5) + b"[]]}", 422, 300),
        (lambda: picture(8000), 422, 100),
        (lambda: picture(5792), 200, 1000),
    ],
    ids=["250 MB JSON", "64 MiB JSON", "64-megapixel PNG", "largest PNG"],
)
def test_memory_is_bounded(process: tuple[str, Path], body: object, status: int, most_mb: int) -> None:
    url, proc = process

    def memory(key: str) -> float:
        return int(re.findall(rf"{key}:\s+(\d+) kB", (proc / "status").read_text())[0]) / 1000

    (proc / "clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    reply = httpx.post(f"{url}/score", content=body(), headers={"Content-Type": wire.JSON}, timeout=60, trust_env=False)
    grown = memory("VmHWM") - before
    assert reply.status_code == status and grown < most_mb, (reply.text[:300], grown)

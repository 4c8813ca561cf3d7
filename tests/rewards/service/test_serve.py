"""A served reward gives the scores of a local one, bit for bit, and nothing that is sent to it brings it down."""

import io
import itertools
import json
import math
import random
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image
from safetensors.torch import save

import genrl_rewards
from genrl_rewards.service import http_app, serve, wire
from genrl_rewards.service.wire import Limits
from tests.rewards import plain_rewards
from tests.rewards.faults import PNG_BOMB

IMAGES = torch.rand(4, 3, 9, 7, generator=torch.Generator().manual_seed(0))
PROMPTS = ["a", "bb", "ccc", "a"]
BLACK = Image.new("RGB", (7, 9))
SMALL = Limits(bytes=200_000, images=8, pixels=20_000)


@contextmanager
def served(reward: genrl_rewards.Reward, *, token: str = "", limits: Limits | None = None) -> Iterator[TestClient]:
    with TestClient(http_app.app(reward, "mine", token=token, limits=limits), raise_server_exceptions=False) as client:
        yield client


def post(client: TestClient, body: bytes, kind: str = wire.SAFETENSORS, **headers: str) -> Any:
    return client.post("/score", content=body, headers={"Content-Type": kind} | headers)


def tensors(**changes: Any) -> bytes:
    fields = {"prompts": PROMPTS, "columns": {}, "group": [0, 0, 1, 1]} | changes.pop("fields", {})
    return save({"images": IMAGES} | changes, {"request": json.dumps(fields)})


def png(picture: Image.Image) -> str:
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return b64encode(stream.getvalue()).decode()


def test_requests_score_as_the_reward_itself_in_json_too() -> None:
    local = genrl_rewards.score(plain_rewards.mean, images=IMAGES, prompts=PROMPTS)
    with served(plain_rewards.mean) as client:
        reply = post(client, tensors())
    assert reply.status_code == 200 and reply.json() == {"scores": local.values, "parts": local.parts}
    files = [png(picture) for picture in genrl_rewards.to_pil(IMAGES)]
    eight_bit = torch.from_numpy(genrl_rewards.to_uint8(IMAGES)).movedim(-1, -3) / 255
    local = genrl_rewards.score(plain_rewards.mean, images=eight_bit, prompts=PROMPTS)
    with served(plain_rewards.mean) as client:
        reply = post(client, json.dumps({"images": files, "prompts": PROMPTS}).encode(), wire.JSON)
    assert reply.json()["scores"] == local.values


def test_references_columns_and_groups_arrive() -> None:
    reference = torch.full((2, 3, 3), 30, dtype=torch.uint8)
    references = {f"reference_images.{k}": reference.clone() for k in range(4)}
    columns = {"reference_image": [Image.new("RGB", (3, 2), (30, 30, 30))] * 4, "style": PROMPTS}
    local = genrl_rewards.score(plain_rewards.like, images=IMAGES, prompts=PROMPTS, columns=columns)
    with served(plain_rewards.like) as client:
        assert client.get("/info").json()["takes"] == ["images", "reference_images", "style"]
        fields = {"columns": {"style": PROMPTS}}
        assert post(client, tensors(**references, fields=fields)).json()["scores"] == local.values
        missing = post(client, tensors(fields=fields))
        assert missing.status_code == 422 and "asks for the column 'reference_image'" in missing.json()["error"]
        named = post(client, tensors(fields={"columns": {"style": PROMPTS, "reference_image": ["/etc/passwd"] * 4}}))
        assert named.status_code == 422 and "must not name files" in named.json()["error"]
    pairs = genrl_rewards.score(plain_rewards.wins, images=IMAGES, prompts=PROMPTS, group=[0, 0, 1, 1])
    with served(plain_rewards.wins) as client:
        assert post(client, tensors()).json()["scores"] == pairs.values
        alone = post(client, tensors(fields={"group": None}))
        assert alone.status_code == 422 and "send `group`" in alone.json()["error"]


@pytest.mark.parametrize("mood", ["raise", "exit", "short", "text"])
def test_a_reward_that_fails_is_reported_without_traceback_or_text(mood: str, caplog: Any) -> None:
    with served(plain_rewards.Moody()) as client:
        reply = post(client, tensors(fields={"prompts": [mood, "", "", ""]}))
        assert reply.status_code == 500 and list(reply.json()) == ["error", "final"]
        assert "Traceback" not in reply.text and "secret" not in reply.text and 'File "' not in reply.text
        assert mood not in ("raise", "exit") or "Traceback" in caplog.text
        assert post(client, tensors()).status_code == 200


def test_the_same_request_is_scored_once(tmp_path: Any) -> None:
    log = tmp_path / "calls"
    half = {key: row[:2] for key, row in {"prompts": PROMPTS, "group": [0, 0, 1, 1]}.items()}
    with served(plain_rewards.Moody(log=str(log))) as client:
        replies = [post(client, tensors(), **{"X-Request-Id": "one"}).json() for _ in range(3)]
        post(client, tensors(), **{"X-Request-Id": "two"})
        post(client, tensors())
        assert replies[0] == replies[1] == replies[2] and len(log.read_text().splitlines()) == 3
        other = post(client, tensors(images=IMAGES[:2], fields=half), **{"X-Request-Id": "one"}).json()["scores"]
        assert len(replies[0]["scores"]) == 4 and other == replies[0]["scores"][:2]


def test_no_score_travels_as_null() -> None:
    images = IMAGES.clone()
    images[1, 0, 0, 0], images[3, 2, 1, 1] = math.nan, math.inf
    with served(lambda images: ([0.5] * 4, {"part": [1.0] * 4})) as client:
        reply = post(client, tensors(images=images)).json()
    assert reply == {"scores": [0.5, None, 0.5, None], "parts": {"part": [1.0, None, 1.0, None]}}


def test_a_token_is_asked_for_everywhere_but_at_health() -> None:
    with served(plain_rewards.mean, token="right") as client:
        for wrong in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "right"}, {"Authorization": "Bearer "}):
            assert post(client, tensors(), **wrong).status_code == 401
            assert client.get("/info", headers=wrong).status_code == 401
        assert client.get("/health").json() == {"status": "ok"}
        assert post(client, tensors(), Authorization="Bearer right").status_code == 200


def test_another_address_needs_a_token_and_one_in_use_is_named() -> None:
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        serve.check_address(host, "")
    for host in ("0.0.0.0", "10.0.0.5", "::", "example.org"):
        serve.check_address(host, "secret")
        with pytest.raises(ValueError, match="set a token in the environment variable GENRL_REWARD_TOKEN"):
            serve.check_address(host, "")
    with pytest.raises(ValueError, match="ASCII"):
        serve.check_address("127.0.0.1", "schlüssel")
    with serve.listen("127.0.0.1", 0) as bound:
        bound.listen()
        with pytest.raises(ValueError, match=f"cannot serve at 127.0.0.1 port {bound.getsockname()[1]}"):
            serve.listen("127.0.0.1", bound.getsockname()[1])


def sent(pictures: list[Image.Image]) -> bytes:
    return json.dumps({"images": list(map(png, pictures)), "prompts": [""] * len(pictures)}).encode()


def test_requests_are_bounded() -> None:
    for body, kind, status, words in (
        (b"x" * 200_001, wire.SAFETENSORS, 413, "200000 are accepted"),
        (tensors(images=torch.zeros(9, 3, 4, 4)), wire.SAFETENSORS, 422, "9 pictures; at most 8"),
        (tensors(images=torch.zeros(3, 3, 3, 4, 4)), wire.SAFETENSORS, 422, "9 pictures; at most 8"),
        (tensors(pixels=torch.zeros(1, 151, 150, 3, dtype=torch.uint8)), wire.SAFETENSORS, 422, "at most 20000"),
        (PNG_BOMB, wire.JSON, 422, "not a picture|pixels; at most"),
        (sent([BLACK.resize((150, 150))]), wire.JSON, 422, "22500 pixels"),
        (sent([BLACK] * 9), wire.JSON, 422, "9 pictures"),
    ):
        if body == PNG_BOMB:
            body = json.dumps({"images": [b64encode(PNG_BOMB).decode()], "prompts": [""]}).encode()
        with served(plain_rewards.mean, limits=SMALL) as client:
            reply = post(client, body, kind)
            assert reply.status_code == status and re.search(words, reply.json()["error"]), reply.text
            pieces = (body[k : k + 1000] for k in range(0, len(body), 1000))  # no length is told
            assert client.post("/score", content=pieces, headers={"Content-Type": kind}).status_code == status


def test_a_malformed_request_is_told_what_is_wrong() -> None:
    for body, kind, words in (
        (b"", wire.SAFETENSORS, "cut off"),
        (tensors()[:-5], wire.SAFETENSORS, "not safetensors"),
        (tensors(images=IMAGES.half()), wire.SAFETENSORS, "type F32"),
        (tensors(images=IMAGES.movedim(1, -1).contiguous()), wire.SAFETENSORS, "none of images"),
        (tensors(pixels=torch.zeros(4, 2, 2, 3, dtype=torch.uint8)), wire.SAFETENSORS, "one tensor"),
        (save({"images": IMAGES}), wire.SAFETENSORS, "not JSON"),
        (tensors(fields={"prompts": PROMPTS[:2]}), wire.SAFETENSORS, "4 images, but 2 values of 'prompts'"),
        (tensors(fields={"prompts": [1, 2, 3, 4]}), wire.SAFETENSORS, "list of texts"),
        (tensors(fields={"group": [0, 0, 0, "1"]}), wire.SAFETENSORS, "whole numbers"),
        (tensors(fields={"columns": {"style": "oil"}}), wire.SAFETENSORS, "object of lists"),
        (b"[" * 100_000, wire.JSON, "not JSON"),
        (b"[]", wire.JSON, "must be an object"),
        (b'{"prompts": []}', wire.JSON, "list of files"),
        (b'{"images": ["!"], "prompts": [""]}', wire.JSON, "images 0 is not a picture"),
        (sent([BLACK, BLACK.resize((3, 3))]), wire.JSON, "one size"),
        (tensors(), "application/python-pickle", "content type must be"),
    ):
        with served(plain_rewards.mean) as client:
            reply = post(client, body, kind)
            assert reply.status_code == 422 and words in reply.json()["error"]


def mutations(seed: int) -> Iterator[tuple[str, bytes]]:
    """Endless malformed requests: bytes flipped, cut, swapped and repeated in good ones; wrong types."""
    random_ = random.Random(seed)
    good = [(wire.SAFETENSORS, tensors()), (wire.JSON, sent([BLACK] * 4))]
    values = [None, True, -1, 1e308, 10**400, "", "\ud800", [], {}, [[]], [{}] * 3, "../../etc/passwd", [float("nan")]]

    def flip(body: bytes) -> bytes:
        changed = bytearray(body)
        for _ in range(random_.randint(1, 8)):
            changed[random_.randrange(len(changed))] = random_.randrange(256)
        return bytes(changed)

    def header(body: bytes) -> bytes:
        size = int.from_bytes(body[:8], "little")
        text = flip(body[8 : 8 + size])
        return len(text).to_bytes(8, "little") + text + body[8 + size :]

    changes: list[Callable[[bytes], bytes]] = [flip, header]
    changes += [
        lambda body: body[: random_.randrange(len(body))],
        lambda body: body + body[: random_.randrange(len(body))],
        lambda body: random_.randbytes(random_.randrange(200)),
        lambda body: random_.randrange(2**64).to_bytes(8, "little") + body[8:],
    ]
    while True:
        kind, body = random_.choice(good)
        yield kind, random_.choice(changes)(body)
        fields = {"images": [png(BLACK)], "prompts": ["a"], "columns": {"c": [1]}, "group": [0]}
        key = random_.choice([*fields, "reference_images", "source_images"])
        yield wire.JSON, json.dumps(fields | {key: random_.choice(values)}).encode()


@pytest.mark.slow
def test_a_thousand_malformed_requests() -> None:
    statuses: Counter[int] = Counter()
    with served(plain_rewards.mean, limits=SMALL) as client:
        for kind, body in itertools.islice(mutations(0), 1_000):
            reply = post(client, body, kind)
            statuses[reply.status_code] += 1
            assert "Traceback" not in reply.text and 'File "' not in reply.text and ".py" not in reply.text
            assert reply.status_code != 500 or "raised" in reply.text, (reply.text, kind, body[:300])
        own = genrl_rewards.score(plain_rewards.mean, images=IMAGES, prompts=PROMPTS).values
        assert post(client, tensors()).json()["scores"] == own
    assert statuses[422] > 500, statuses

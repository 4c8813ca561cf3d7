"""What travels between a reward's server and its users: bodies in safetensors or JSON, never pickle.

A request is `{"prompts": [N texts], "columns": {name: N values}, "group": [N ints] or null}` and pictures:

    safetensors  that object is the header's metadata `request`; a tensor `images` float32 [N, 3, H, W] or
                 [N, F, 3, H, W] in [0, 1], or `pixels` uint8 [N, H, W, 3] or [N, F, H, W, 3]; if the reward takes
                 them, `reference_images.0`, `source_images.0`, ... uint8 [H, W, 3]
    JSON         the object also has `images`: N files (PNG, JPEG, WebP) in base64, all of one size; if the reward takes
                 them, also `reference_images` and `source_images`, in the same way

A reply is `{"scores": [N numbers or null], "parts": {name: [N numbers or null]}}`; null = no score. An error is
`{"error": text}` with a status that is not 200, and `"final": true` where asking again would not help. Numbers arrive
bit for bit in both directions.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from genrl_rewards.contract import IMAGE_COLUMNS, Scored, Scores
from genrl_rewards.pictures import open_picture, picture_size, to_uint8

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

PROTOCOL = 1
SAFETENSORS, JSON = "application/x-safetensors", "application/json"
FORMATS = ("PNG", "JPEG", "WEBP")
MAX_JSON = 2**26  # bytes of JSON, alone or in the header of safetensors
MAX_VALUES = 2**21  # in it; each may take a hundred bytes of memory


@dataclass(frozen=True)
class Limits:
    """The largest request that is accepted."""

    bytes: int = 2**28
    """Of the body."""
    images: int = 1024
    """Pictures, including the frames of videos and references."""
    pixels: int = 2**25
    """Of all pictures together: 32 of 1024 x 1024. As float32 each takes 12 bytes."""


class BadRequest(ValueError):
    """A request that cannot be read; the message may be sent back."""


@dataclass(frozen=True)
class Request:
    """N samples to score."""

    images: torch.Tensor
    """float32 [N, 3, H, W], video [N, F, 3, H, W], in [0, 1]."""
    prompts: list[str]
    columns: dict[str, list[Any]] = field(default_factory=dict)
    """Pictures that belong to samples are in the columns `reference_image` and `source_image`, as Pillow RGB."""
    group: list[int] | None = None


def encode(
    images: torch.Tensor,
    prompts: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
    group: Sequence[int] | None,
    pictures: Mapping[str, Sequence[Image]],
    *,
    eight_bit: bool,
) -> bytes:
    """A request in safetensors. `eight_bit` sends the images rounded to 8 bits, a quarter of the bytes: enough for
    rewards that take Pillow pictures, which see the same pixels. Raises TypeError for column values that are not JSON.
    """
    import numpy as np
    from safetensors.numpy import save

    tensors = {"pixels": to_uint8(images)} if eight_bit else {"images": images.detach().float().cpu().numpy()}
    for name, row in pictures.items():
        tensors |= {f"{name}.{k}": np.asarray(picture) for k, picture in enumerate(row)}
    request = {"prompts": list(prompts), "columns": {c: list(values) for c, values in columns.items()}, "group": group}
    return save({k: np.ascontiguousarray(v) for k, v in tensors.items()}, {"request": json.dumps(request)})


def decode(body: bytes, content_type: str, limits: Limits) -> Request:
    """Read a request of either kind. Raises BadRequest, with a message that may be sent back, for anything else."""
    kind = kind_of(content_type)
    if kind == SAFETENSORS:
        return _from_safetensors(body, limits)
    if kind == JSON:
        return _from_json(body, limits)
    raise BadRequest(f"the content type must be {SAFETENSORS} or {JSON}")


def kind_of(content_type: str) -> str:
    """A content type without its parameters."""
    return content_type.partition(";")[0].strip().lower()


def encode_reply(scores: Scores) -> dict[str, Any]:
    """The reply to a scored request."""
    parts = {name: _nullable(row) for name, row in scores.parts.items()}
    return {"scores": _nullable(scores.values), "parts": parts}


def decode_reply(body: bytes, count: int) -> Scored:
    """Scores and parts of a reply about `count` samples, NaN for no score. Raises ValueError if it is not one."""
    reply = json.loads(body)
    parts = (reply.get("parts") or {}) if isinstance(reply, dict) else None
    if not isinstance(parts, dict):
        raise ValueError("it is not an object with `scores` and `parts`")
    return _numbers("scores", reply.get("scores"), count), {name: _numbers(name, parts[name], count) for name in parts}


def _numbers(what: str, row: Any, count: int) -> list[float]:
    if not isinstance(row, list) or len(row) != count:
        raise ValueError(f"it has {len(row) if isinstance(row, list) else 'no'} {what} for {count} samples")
    if not all(value is None or type(value) in (int, float) for value in row):
        raise ValueError(f"its {what} are not all numbers")
    try:
        return [math.nan if value is None else float(value) for value in row]
    except OverflowError as error:
        raise ValueError(f"its {what} are too large") from error


def _nullable(values: Sequence[float]) -> list[float | None]:
    # JSON has no NaN; Python would write one that other readers refuse.
    return [None if math.isnan(value) else value for value in values]


def _from_safetensors(body: bytes, limits: Limits) -> Request:
    from PIL import Image
    from safetensors import SafetensorError
    from safetensors.torch import load

    size = int.from_bytes(body[:8], "little")
    if len(body) < 8 or size > len(body) - 8:
        raise BadRequest("the body is not safetensors: its header is cut off")
    header = _json(body[8 : 8 + size])
    # The header alone says how much memory the tensors take: it is judged before any of it is given.
    _check_header(header, limits)
    try:
        tensors = load(body)
    except (SafetensorError, KeyError, ValueError, RuntimeError, TypeError) as error:
        raise BadRequest("the body is not safetensors") from error
    fields = _json(header.get("__metadata__", {}).get("request", "").encode())
    if len({"images", "pixels"} & set(tensors)) != 1:
        raise BadRequest("the body must hold one tensor `images` or one tensor `pixels`")
    images = tensors["images"] if "images" in tensors else _floats(tensors["pixels"])
    pictures: dict[str, list[Any]] = {}
    for kind in IMAGE_COLUMNS:
        count = sum(key.startswith(f"{kind}.") for key in tensors)
        keys = [f"{kind}.{k}" for k in range(count)]
        if not set(keys) <= set(tensors):
            raise BadRequest(f"the tensors of {kind} must be numbered 0 to {count - 1}")
        if keys:
            pictures[kind] = [Image.fromarray(tensors[key].numpy()) for key in keys]
    return _request(images, fields, pictures)


def _check_header(header: Any, limits: Limits) -> None:
    """Check names, types, shapes and the numbers of pictures and pixels in the header, before anything is copied."""
    if not isinstance(header, dict) or not isinstance(header.get("__metadata__", {}), dict):
        raise BadRequest("the header of the body is not an object")
    pictures = pixels = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape = entry.get("shape") if isinstance(entry, dict) else None
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise BadRequest("a tensor of the body has no shape")
        kind = name.partition(".")[0]
        dtype, channels = ("F32", -3) if kind == "images" else ("U8", -1)
        ranks = (3,) if kind in IMAGE_COLUMNS else (4, 5)
        is_known = kind in ("images", "pixels", *IMAGE_COLUMNS)
        if not is_known or len(shape) not in ranks or shape[channels] != 3 or 0 in shape:
            raise BadRequest("a tensor of the body is none of images, pixels, reference_images.K, source_images.K")
        if entry.get("dtype") != dtype:
            raise BadRequest(f"the tensor {kind} must be of type {dtype}")
        pixels += math.prod(shape) // 3
        pictures += math.prod(shape[:-3])
    _check_sizes(pictures, pixels, limits)


def _check_sizes(pictures: int, pixels: int, limits: Limits) -> None:
    if pictures > limits.images:
        raise BadRequest(f"{pictures} pictures; at most {limits.images} are accepted at once")
    if pixels > limits.pixels:
        raise BadRequest(f"{pixels} pixels; at most {limits.pixels} are accepted at once")


def _from_json(body: bytes, limits: Limits) -> Request:
    import numpy as np
    import torch

    fields = _json(body)
    if not isinstance(fields, dict):
        raise BadRequest("the body must be an object")
    pictures: dict[str, list[Image]] = {}
    opened: list[Image] = []
    for kind in ("images", *IMAGE_COLUMNS):
        if kind not in fields:
            continue
        files = fields[kind]
        if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
            raise BadRequest(f"{kind} must be a list of files in base64")
        _check_sizes(len(opened) + len(files), 0, limits)
        for k, file in enumerate(files):
            opened.append(_open(file, f"{kind} {k}"))
            # After each: a small PNG may unpack to gigabytes, and its header says so before it is decoded.
            _check_sizes(0, sum(picture.width * picture.height for picture in opened), limits)
        pictures[kind] = opened[len(opened) - len(files) :]
    if not pictures.get("images"):
        raise BadRequest("images must be a list of files in base64")
    sizes = {picture_size(picture) for picture in pictures["images"]}
    if len(sizes) > 1:
        raise BadRequest("the images must be of one size")
    ((width, height),) = sizes
    pixels = np.empty((len(pictures["images"]), height, width, 3), np.uint8)
    for k, picture in enumerate(pictures.pop("images")):
        pixels[k] = np.asarray(_decoded(picture, k))
        picture.close()
    images = _floats(torch.from_numpy(pixels))
    pictures = {kind: [_decoded(picture, k) for k, picture in enumerate(row)] for kind, row in pictures.items()}
    return _request(images, fields, pictures)


def _floats(pixels: torch.Tensor) -> torch.Tensor:
    """uint8 [..., H, W, 3] as float32 [..., 3, H, W] in [0, 1], with no second copy."""
    import torch

    images = pixels.movedim(-1, -3)
    return torch.empty(images.shape).copy_(images).div_(255)


def _open(file: str, where: str) -> Image:
    """A picture whose size is known but which is not decoded yet."""
    from PIL import Image

    try:
        picture = Image.open(io.BytesIO(base64.b64decode(file, validate=True)), formats=FORMATS)
    except (binascii.Error, OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadRequest(f"{where} is not a picture ({', '.join(FORMATS)}) in base64") from error
    return picture


def _decoded(picture: Image, k: int) -> Image:
    try:
        return open_picture(picture, str(k))
    except ValueError as error:
        raise BadRequest(str(error)) from error


def _request(images: torch.Tensor, fields: Any, pictures: Mapping[str, list[Any]]) -> Request:
    """Check the fields that both kinds of body share, and that all have one value per image."""
    if not isinstance(fields, dict):
        raise BadRequest("the request must be an object")
    prompts, columns, group = fields.get("prompts"), fields.get("columns") or {}, fields.get("group")
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise BadRequest("prompts must be a list of texts")
    if not isinstance(columns, dict) or not all(isinstance(values, list) for values in columns.values()):
        raise BadRequest("columns must be an object of lists")
    if group is not None and (not isinstance(group, list) or not all(type(g) is int for g in group)):
        raise BadRequest("group must be a list of whole numbers, or null")
    named = sorted(set(columns) & set(IMAGE_COLUMNS.values()))
    # A file's name would be opened here, on the server, with the server's rights.
    if named:
        raise BadRequest(f"columns must not name files ({', '.join(named)}): send the pictures themselves")
    everything = dict(columns) | {IMAGE_COLUMNS[kind]: row for kind, row in pictures.items()}
    rows = [("prompts", prompts), *everything.items(), *([("group", group)] if group is not None else [])]
    for name, values in rows:
        if len(values) != len(images):
            raise BadRequest(f"{len(images)} images, but {len(values)} values of {name[:60]!r}")
    return Request(images, prompts, everything, group)


def _json(text: bytes) -> Any:
    values = sum(map(text.count, (b",", b"[", b"{")))  # those in texts, too, which a parser alone could tell
    if len(text) > MAX_JSON or values > MAX_VALUES:
        raise BadRequest(f"JSON of {len(text)} bytes, {values} values; at most {MAX_JSON} and {MAX_VALUES}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # not UTF-8 is a ValueError, too
        raise BadRequest("the request is not JSON") from error

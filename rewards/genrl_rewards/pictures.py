"""Pictures on their way to a reward: their layout, rounding to 8 bits, and reading them from files."""

from __future__ import annotations

import functools
import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL.Image import Image
    from PIL.ImageCms import ImageCmsTransform

MAX_PIXELS = 2**26
"""The most pixels that a picture file may have: 8192 x 8192."""
MAX_RATIO = 200
"""How many times one side may be the other: what Qwen's processors take."""
SAME_COLOUR = 3
"""Levels that a profile may change and still be sRGB: forms of that differ by so much in rounding."""
SAME_GAMMA = 0.03
"""How far a PNG's gamma may be from that of screens and still be it."""
PROGRAMS = ("EPS", "WMF", "EMF")
ORIENTATION, SIDEWAYS = 0x0112, (5, 6, 7, 8)
"""The EXIF tag, and its values by which height and width change places."""

Source = Any
"""A path, bytes, `{bytes, path}`, an array, or a picture that Pillow has opened."""

logger = logging.getLogger(__name__)
_remarked: dict[str, set[int]] = {}


def check_images(images: torch.Tensor) -> None:
    """Raise ValueError unless `images` is float [N, 3, H, W] or [N, F, 3, H, W]. Range and layout are never guessed."""
    if not images.is_floating_point() or images.ndim not in (4, 5) or images.shape[-3] != 3:
        raise ValueError(
            f"images must be float [N, 3, H, W] or [N, F, 3, H, W] in [0, 1], not {images.dtype} {list(images.shape)}"
        )


def to_uint8(images: torch.Tensor) -> np.ndarray:
    """float [..., 3, H, W] in [0, 1] as uint8 [..., H, W, 3]: 255 x, rounded half to even, then clamped."""
    import torch

    # Rounded, as diffusers does, not cut off, which would darken every picture by half a level.
    levels = (images.detach().to(torch.float32) * 255).round_().clamp_(0, 255)
    return levels.to(torch.uint8).movedim(-3, -1).cpu().numpy()


def pil_list(images: torch.Tensor) -> list[Image]:
    """float [N, 3, H, W] in [0, 1] as N Pillow pictures, rounded to 8 bits."""
    from PIL import Image

    return [Image.fromarray(image) for image in to_uint8(images)]


def to_pil(images: torch.Tensor) -> list[Image] | list[list[Image]]:
    """float [N, 3, H, W] in [0, 1] as N Pillow pictures, a video [N, F, 3, H, W] as N lists of F; 8 bits."""
    return [pil_list(video) for video in images] if images.ndim == 5 else pil_list(images)


def open_picture(source: Source, name: str | None = None) -> Image:
    """A picture as Pillow RGB with 8 bits, upright by its EXIF tag, in sRGB by its colour profile, transparent parts on
    white, the first of several.

    source: a path, the bytes of a file, `{bytes, path}` as data sets have it, an array (`from_array`), or what Pillow
    has opened. name: what errors and remarks call it, its path by default. What was changed is logged, each kind once;
    pictures of one single colour are counted. Raises ValueError, naming it, where `check_header` refuses it or it
    cannot be read.
    """
    name = name or name_of(source)
    with _named(name):
        picture = _opened(source)
        check_header(picture)
        from_file = picture.format is not None or not hasattr(source, "convert")
        if getattr(picture, "is_animated", False) and picture.format != "MPO":  # a photograph with its preview
            _remark("animated", name, "has several frames; the first is taken")
        upright = _in_srgb(_upright(picture), name)
        upright = _on_white(upright, name) if upright.has_transparency_data else _as_rgb(upright, name)
    extrema: Any = upright.getextrema()
    if from_file and all(low == high for low, high in extrema):
        _remark("plain", name, f"is of one single colour, {upright.getpixel((0, 0))}")
    return upright


def check_picture(source: Source, name: str | None = None) -> tuple[int, int]:
    """Width and height of a picture when upright, without decoding it; of a PNG all checksums are looked at.

    Raises ValueError, naming it, as `open_picture` does, as far as that is known from there.
    """
    return picture_size(source, name, sound=True)


def picture_size(source: Source, name: str | None = None, *, sound: bool = False) -> tuple[int, int]:
    """Size of a picture by its header alone, unless it is to be `sound`."""
    from PIL import Image

    with _named(name or name_of(source)):
        picture = _opened(source)
        check_header(picture)
        width, height = picture.size
        # the class's own would decode a PNG; a TIFF Pillow turns by itself
        turned = picture.format != "TIFF" and Image.Image.getexif(picture).get(ORIENTATION) in SIDEWAYS
        if picture is not source:
            if sound:
                picture.verify()
            picture.close()
        return (height, width) if turned else (width, height)


def check_header(picture: Image) -> None:
    """Raise ValueError if a picture has more than `MAX_PIXELS` pixels or `MAX_RATIO` between its sides, one channel of
    more than 8 bits, which Pillow would clip to white, or is a program that draws (EPS)."""
    width, height = picture.size
    if width * height > MAX_PIXELS:
        raise ValueError(f"it has {width} x {height} pixels; the limit is {MAX_PIXELS:,}")
    if max(width, height) > MAX_RATIO * min(width, height):
        raise ValueError(f"it has {width} x {height} pixels; one side may be {MAX_RATIO} times the other")
    if picture.format in PROGRAMS:
        raise ValueError(f"{picture.format} is a program that draws a picture; save it as PNG")
    if picture.mode[0] in "IF":
        text = f"its pixels have more than 8 bits (mode {picture.mode}), of a range that is not known"
        raise ValueError(f"{text}; scale it to 0 to 255 and save it with 8")


def check_pixels(pixels: Any, who: str) -> np.ndarray:
    """The pixels that a program shows, uint8 [H, W, 3]. Raises ValueError, saying what they are, for all else: a range
    or a layout is never guessed."""
    import numpy as np

    array = np.asarray(pixels)
    if array.dtype == np.uint8 and array.ndim == 3 and array.shape[-1] == 3 and array.size:
        return array
    spread = f" from {array.min():g} to {array.max():g}" if array.size and array.dtype.kind in "fiub" else ""
    hint = ""
    if array.dtype.kind == "f" and array.size and 0 <= array.min() and array.max() <= 1:
        hint = ": (255 * pixels).round().astype(numpy.uint8)"
    elif array.ndim == 3 and array.shape[0] == 3:
        hint = ": pixels.transpose(1, 2, 0)"
    raise ValueError(
        f"{who}: pixels are {array.dtype} {list(array.shape)}{spread}; wanted is uint8 [H, W, 3] from 0 to 255{hint}"
    )


def from_array(array: np.ndarray) -> Image:
    """uint8 [H, W], [H, W, 1], [H, W, 3] or [H, W, 4], or bool [H, W], as a picture. Raises ValueError for others."""
    import numpy as np
    from PIL import Image

    if array.dtype == np.bool_ and array.ndim == 2 and array.size:
        return Image.fromarray(array)
    if array.dtype == np.uint8 and array.ndim == 2 and array.size:
        return Image.fromarray(array)
    if array.dtype == np.uint8 and array.ndim == 3 and array.shape[-1] in (1, 4) and array.size:
        return Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)
    return Image.fromarray(np.ascontiguousarray(check_pixels(array, "an array")))


def name_of(source: Source) -> str:
    """What to call a picture: its path where it has one."""
    if isinstance(source, Mapping):
        return repr(source["path"]) if source.get("path") else "(bytes)"
    if isinstance(source, bytes | bytearray | memoryview):
        return "(bytes)"
    if hasattr(source, "dtype"):
        return "(array)"
    return repr(str(getattr(source, "filename", None) or "(opened)") if hasattr(source, "convert") else str(source))


def remarks() -> dict[str, int]:
    """How many pictures of this process were `transparent`, `animated`, `cmyk`, `profile`, `no profile` (a broken one)
    or `plain` (of one colour)."""
    return {kind: len(names) for kind, names in _remarked.items()}


def _remark(kind: str, name: str, text: str) -> None:
    """Count a picture, and log the first of a kind; of one colour also the 10th, the 100th and so on."""
    names = _remarked.setdefault(kind, set())
    before = len(names)
    names.add(before if name.startswith("(") else hash(name))  # those without a name are not told apart
    count = len(names)
    if count > before and (count == 1 or (kind == "plain" and set(str(count)[1:]) == {"0"} and str(count)[0] == "1")):
        logger.warning("picture %s %s (%s)", name, text, "the first so far" if count == 1 else f"{count} so far")


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Whatever Pillow and its decoders raise says which picture it was."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own limit is lower
            yield
    except Exception as error:  # noqa: BLE001 decoders of files from outside raise anything, struct.error and KeyError too
        what = f"there is no such file (looked from {Path.cwd()})" if isinstance(error, FileNotFoundError) else error
        raise ValueError(f"picture {name} cannot be read: {what}") from error


def _opened(source: Source) -> Image:
    """What Pillow opens, not decoded yet."""
    from PIL import Image

    if isinstance(source, Image.Image):
        return source
    if isinstance(source, Mapping):
        held, path = source.get("bytes"), source.get("path")
        if held is None and path is None:
            raise ValueError(f"there is none; wanted is {{bytes, path}}, found {', '.join(source) or 'nothing'}")
        return _opened(path if held is None else held)
    if isinstance(source, bytes | bytearray | memoryview):
        return Image.open(io.BytesIO(source))
    if hasattr(source, "dtype"):
        if not hasattr(source, "__array_interface__"):  # a tensor
            raise ValueError(f"a {type(source).__name__} is none; give uint8 [H, W, 3] of numpy, or `to_pil(images)`")
        return from_array(source)
    if not isinstance(source, str | Path):
        raise ValueError(f"a {type(source).__name__} is none; wanted is a path, bytes, {{bytes, path}} or an array")
    # Data sets come from strangers: their rows must not make this machine ask for an address.
    if re.match(r"(https?|s3|gs|hf|data|file):", str(source)):
        raise ValueError("it is an address, which is not fetched; save the picture in a file")
    return Image.open(source)


def _upright(picture: Image) -> Image:
    from PIL import ImageOps

    picture.load()
    return ImageOps.exif_transpose(picture)


def _in_srgb(picture: Image, name: str) -> Image:
    """A picture by its colour profile, which all that follows ignores: as RGB or RGBA where there is one."""
    from PIL import ImageCms

    profile, gamma = picture.info.get("icc_profile"), picture.info.get("gamma")
    if not profile and ("srgb" in picture.info or not gamma or abs(gamma - 1 / 2.2) < SAME_GAMMA):
        return picture
    clear, grey = picture.has_transparency_data, picture.mode in ("1", "L", "LA", "La")
    alpha = picture.convert("LA" if grey else "RGBA").getchannel("A") if clear else None
    colours = picture if picture.mode in ("CMYK", "LAB") else picture.convert("L" if grey else "RGB")
    try:
        transform: Any = _to_srgb(profile, colours.mode) if profile else _of_gamma(float(gamma or 0))
    except (ImageCms.PyCMSError, OSError, ImportError) as error:  # broken, of other colours, or no library here
        _remark("no profile", name, f"has a colour profile that is left out ({error}); its colours are read as sRGB")
        return picture
    if transform is None:
        return picture
    _remark("profile", name, "has colours of another profile, which are converted to sRGB")
    converted: Image = transform.apply(colours) if profile else colours.convert("RGB").point(transform)
    converted.info.pop("icc_profile", None)
    if alpha is not None:
        converted.info.pop("transparency", None)
        converted.putalpha(alpha)
    return converted


def _of_gamma(gamma: float) -> list[int]:
    """The levels of sRGB (IEC 61966-2-1) that a PNG's are by its chunk gAMA: levels^(1 / gamma) is light."""
    light = [(level / 255) ** (1 / gamma) for level in range(256)]
    return 3 * [round(255 * (12.92 * x if x <= 0.0031308 else 1.055 * x ** (1 / 2.4) - 0.055)) for x in light]


@functools.lru_cache(maxsize=32)  # most files of a set have the same
def _to_srgb(profile: bytes, mode: str) -> ImageCmsTransform | None:
    """How colours of a profile become sRGB; None where they are that already, to what rounding does."""
    import numpy as np
    from PIL import Image, ImageCms

    source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    transform = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")
    if mode not in ("L", "RGB"):
        return transform
    # By what it does, not by its name: sRGB is written in dozens of ways.
    levels = np.arange(0, 256, 15, dtype=np.uint8)
    grid = np.stack(np.meshgrid(levels, levels, levels), -1).reshape(18, -1, 3) if mode == "RGB" else levels[None]
    probe = Image.fromarray(np.ascontiguousarray(grid))
    difference = np.asarray(transform.apply(probe), np.int16) - np.asarray(probe.convert("RGB"), np.int16)
    return None if np.abs(difference).max() <= SAME_COLOUR else transform


def _on_white(picture: Image, name: str) -> Image:
    """Alpha says how much of a picture covers white."""
    from PIL import Image

    if picture.mode in ("La", "PA"):
        picture = picture.convert("LA" if picture.mode == "La" else "RGBA")
    covered = picture.convert("RGBA")
    if covered.getchannel("A").getextrema() == (255, 255):
        return covered.convert("RGB")
    _remark("transparent", name, "is transparent; such pictures are put on white")
    return Image.alpha_composite(Image.new("RGBA", covered.size, "white"), covered).convert("RGB")


def _as_rgb(picture: Image, name: str) -> Image:
    if picture.mode == "CMYK":
        _remark("cmyk", name, "has colours for print (CMYK), which are converted without a profile")
    return picture.convert("RGB")

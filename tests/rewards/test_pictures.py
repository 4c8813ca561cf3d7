"""One function opens pictures at every border: each is shown as it looks, or refused by name. No cast goes unsaid."""

import io
import logging
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, features

from genrl_rewards import pictures
from genrl_rewards.pictures import check_picture, check_pixels, open_picture, picture_size
from tests.rewards.faults import PNG_BOMB

COLOURS = np.array(
    [[[250, 10, 10], [10, 250, 10], [10, 10, 250]], [[250, 250, 10], [0, 0, 0], [128, 128, 128]]], np.uint8
)
SEEN = COLOURS.repeat(16, 0).repeat(16, 1)
"""A picture that is unlike itself by every turn and mirror, [32, 48, 3]."""
STORED: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    1: lambda x: x,
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: x.swapaxes(0, 1)[::-1],
    7: lambda x: x.swapaxes(0, 1)[::-1, ::-1],
    8: lambda x: x.swapaxes(0, 1)[:, ::-1],
}
"""How a camera stores what is seen, by EXIF orientation (CIPA DC-008, 4.6.4)."""


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "_remarked", {})


def png(rows: np.ndarray, kind: int, bits: int, *chunks: tuple[bytes, bytes]) -> bytes:
    """A PNG written by hand. rows [H, bytes]; kind: its colour type."""

    def chunk(name: bytes, held: bytes) -> bytes:
        return struct.pack(">I", len(held)) + name + held + struct.pack(">I", zlib.crc32(name + held))

    width = rows.shape[1] * 8 // (bits * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[kind])
    header = struct.pack(">IIBBBBB", width, len(rows), bits, kind, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        chunk(*one) for one in ((b"IHDR", header), *chunks, (b"IDAT", body), (b"IEND", b""))
    )


def saved(picture: Image.Image, container: str, **more: Any) -> bytes:
    held = io.BytesIO()
    picture.save(held, container, **more)
    return held.getvalue()


CONTAINERS = {
    "PNG": ("RGB", "RGBA", "P", "L", "LA", "1"),
    "JPEG": ("RGB", "L", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "TIFF": ("RGB", "RGBA", "L", "LA", "CMYK", "P", "1"),
    "GIF": ("P", "L"),
    "BMP": ("RGB", "L", "P"),
    "PPM": ("RGB", "L"),
    "AVIF": ("RGB", "RGBA"),
    "JPEG2000": ("RGB", "L"),
}
TURNED = ("PNG", "JPEG", "WEBP", "TIFF")
"""Containers with EXIF."""


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_picture_looks_as_it_was_drawn_whatever_holds_it(data: st.DataObject) -> None:
    """Mode x orientation x container x the form in which it is handed over."""
    container = data.draw(st.sampled_from([c for c in CONTAINERS if c != "AVIF" or features.check("avif")]))
    mode = data.draw(st.sampled_from(CONTAINERS[container]))
    turn = data.draw(st.sampled_from([*STORED])) if container in TURNED else 1
    clear = data.draw(st.booleans()) and mode in ("RGBA", "LA")
    wanted = SEEN.copy()
    stored = Image.fromarray(np.ascontiguousarray(STORED[turn](SEEN)))
    if mode in ("L", "LA"):
        wanted = np.array(Image.fromarray(SEEN).convert("L").convert("RGB"))
    elif mode == "1":
        wanted = np.where(np.array(Image.fromarray(SEEN).convert("L"))[..., None] > 127, 255, 0).repeat(3, -1)
    picture = stored.convert("L").point(lambda x: 255 * (x > 127)).convert("1") if mode == "1" else stored.convert(mode)
    if clear:  # the black patch shows the ground
        alpha = np.full(SEEN.shape[:2], 255, np.uint8)
        alpha[16:, 16:32] = 0
        picture.putalpha(Image.fromarray(np.ascontiguousarray(STORED[turn](alpha))))
        wanted[16:, 16:32] = 255
    exif = Image.Exif()
    exif[0x0112] = turn
    more = {"exif": exif.tobytes()} if turn > 1 else {}
    raw = saved(picture, container, **more, **({"lossless": True} if container == "WEBP" else {}))
    form = data.draw(st.sampled_from(["bytes", "dict", "pillow"]))
    handed = {"bytes": raw, "dict": {"bytes": raw, "path": "a.png"}, "pillow": Image.open(io.BytesIO(raw))}[form]
    shown = np.array(open_picture(handed))
    assert shown.shape == wanted.shape, (container, mode, turn)
    assert check_picture(raw) == picture_size(raw) == shown.shape[1::-1]
    middle = np.s_[8::16, 8::16]
    near = 60 if container in ("JPEG", "AVIF", "JPEG2000", "GIF", "BMP") or mode in ("P", "CMYK") else 0
    far = np.abs(shown.astype(int) - wanted)[middle].max()
    assert far <= near, (container, mode, turn, clear, far)
    assert ("transparent" in pictures.remarks()) >= clear


PALETTE = np.array([[1] * 4 + [0] * 4] * 2, np.uint8)
ALPHA = np.where(np.arange(8) < 4, 0, 255).astype(np.uint8)


@pytest.mark.parametrize(
    "raw, left, right",
    [  # a black drawing of which one half is clear
        (saved(Image.fromarray(np.dstack([*[np.zeros((2, 8), np.uint8)] * 3, [ALPHA] * 2])), "PNG"), 255, 0),
        (saved(Image.fromarray(np.dstack([np.zeros((2, 8), np.uint8), [ALPHA] * 2]), "LA"), "PNG"), 255, 0),
        (png(PALETTE, 3, 8, (b"PLTE", b"\0\0\0\1\1\1"), (b"tRNS", b"\xff\0")), 255, 0),
        (png(np.array([[0] * 4 + [9] * 4] * 2, np.uint8), 0, 8, (b"tRNS", b"\0\0")), 255, 9),
        (png(np.array([[0] * 12 + [9] * 12] * 2, np.uint8), 2, 8, (b"tRNS", b"\0\0\0\0\0\0")), 255, 9),
        (png(np.array([[0x0F]] * 2, np.uint8), 0, 1, (b"tRNS", b"\0\0")), 255, 255),
        (png(np.array([[0, 0] * 3 * 4 + [0x80, 0] * 3 * 4] * 2, np.uint8), 2, 16), 0, 128),
        (png(np.array([[0, 0, 0xFF, 0xFF] * 4 + [0x80, 0, 0xFF, 0xFF] * 4] * 2, np.uint8), 4, 16), 0, 128),
    ],
    ids=["RGBA", "LA", "palette", "grey key", "RGB key", "1-bit key", "16-bit RGB", "16-bit LA"],
)
def test_transparency_is_on_white_and_depth_is_scaled(raw: bytes, left: int, right: int) -> None:
    shown = np.array(open_picture(raw))
    assert shown[0, 0].tolist() == [left] * 3 and shown[0, 7].tolist() == [right] * 3


def profile(primaries: list[tuple[float, ...]], curve: bytes, space: bytes = b"RGB ") -> bytes:
    """An ICC profile (ISO 15076-1) of a display, written by hand. primaries: XYZ under D50 of red, green, blue."""

    def numbers(*values: float) -> bytes:
        return b"".join(struct.pack(">i", round(value * 65536)) for value in values)

    tags = {b"wtpt": b"XYZ \0\0\0\0" + numbers(0.9642, 1, 0.8249)}
    tags |= {n: b"XYZ \0\0\0\0" + numbers(*v) for n, v in zip((b"rXYZ", b"gXYZ", b"bXYZ"), primaries, strict=False)}
    tags |= dict.fromkeys((b"rTRC", b"gTRC", b"bTRC") if primaries else (b"kTRC",), curve)
    text = "test".encode("utf-16-be")
    tags[b"desc"] = b"mluc\0\0\0\0" + struct.pack(">II", 1, 12) + b"enUS" + struct.pack(">II", len(text), 28) + text
    table, body = b"", b""
    for name, tag in tags.items():
        table += name + struct.pack(">II", 132 + 12 * len(tags) + len(body), len(tag))
        body += tag + b"\0" * (-len(tag) % 4)
    body = struct.pack(">I", len(tags)) + table + body
    header = struct.pack(">I", 128 + len(body)) + b"\0\0\0\0\4\x20\0\0mntr" + space + b"XYZ " + b"\0" * 12 + b"acsp"
    return header + b"\0" * 28 + numbers(0.9642, 1, 0.8249) + b"\0" * 48 + body


def gamma(power: float) -> bytes:
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(power * 256)) + b"\0\0"


SRGB_CURVE = b"para\0\0\0\0\0\3\0\0" + b"".join(
    struct.pack(">i", round(65536 * value)) for value in (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)
)
P3 = profile([(0.51512, 0.2412, -0.00105), (0.29198, 0.69225, 0.04189), (0.1571, 0.06657, 0.78407)], SRGB_CURVE)
ADOBE = profile(
    [(0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457)], gamma(563 / 256)
)
SRGB = profile([(0.43607, 0.22249, 0.01392), (0.38515, 0.71687, 0.09708), (0.14307, 0.06061, 0.7141)], SRGB_CURVE)
GREY = profile([], gamma(1.8), b"GRAY")
HALF = Image.new("LA", (4, 4), (0, 0))
HALF.paste((128, 255), (2, 0, 4, 4))
"""Clear on the left, grey on the right."""


@pytest.mark.parametrize("container", ["PNG", "JPEG", "TIFF"])
@pytest.mark.parametrize(
    ("held", "stored", "seen", "kind"),
    [  # by the primaries of SMPTE EG 432-1 and Adobe RGB (1998) and the curve of IEC 61966-2-1, in float64
        (P3, (200, 100, 50), (214.9, 92.6, 31.0), "profile"),
        (ADOBE, (200, 100, 50), (227.1, 100.1, 42.4), "profile"),
        (SRGB, (200, 100, 50), (200, 100, 50), None),
        (GREY, 128, (145.6, 145.6, 145.6), "profile"),
        (P3, 128, (128, 128, 128), "no profile"),  # of a grey picture
        (P3[:200], (200, 100, 50), (200, 100, 50), "no profile"),
        (b"no profile at all", (200, 100, 50), (200, 100, 50), "no profile"),
    ],
)
def test_colours_of_another_profile_become_srgb(
    container: str, held: bytes, stored: Any, seen: tuple[float, ...], kind: str | None
) -> None:
    picture = Image.new("L" if isinstance(stored, int) else "RGB", (4, 4), stored)
    more = {"quality": 100, "subsampling": 0} if container == "JPEG" else {}
    shown = open_picture(saved(picture, container, icc_profile=held, **more))
    assert np.array(shown)[0, 0] == pytest.approx(seen, abs=2)
    assert {*pictures.remarks()} == {"plain", *([kind] if kind else [])}
    assert "icc_profile" not in shown.info or kind != "profile"  # else it would be converted twice


def test_a_png_is_seen_by_its_gamma() -> None:
    for chunks, seen in (
        # 0.502 as light is level 188 of sRGB; at gamma .5 it is its square
        ([(b"gAMA", struct.pack(">I", 100000))], 188),
        ([(b"gAMA", struct.pack(">I", 50000))], 137),
        ([(b"gAMA", struct.pack(">I", 45455))], 128),
        ([(b"sRGB", b"\0"), (b"gAMA", struct.pack(">I", 100000))], 128),
        ([(b"gAMA", struct.pack(">I", 0))], 128),
    ):
        for kind, width in ((0, 4), (2, 12)):
            shown = open_picture(png(np.full((4, width), 128, np.uint8), kind, 8, *chunks))
            assert np.array(shown)[0, 0].tolist() == [seen] * 3


def test_what_is_clear_stays_so_under_a_profile() -> None:
    """The right half is seen as without alpha, the left one is white."""
    for held, half in ((P3, HALF.convert("RGBA")), (P3, HALF.convert("RGBA").quantize()), (GREY, HALF)):
        left, right = (np.array(open_picture(saved(half, "PNG", icc_profile=held)))[0, x, 0] for x in (0, 3))
        assert left == 255 and abs(int(right) - (146 if held is GREY else 128)) <= 1, half.mode


@settings(max_examples=40, deadline=None)
@given(st.binary(min_size=1, max_size=60), st.integers(0, len(P3)))
def test_no_damage_of_a_profile_hides_a_picture(junk: bytes, place: int) -> None:
    shown = open_picture(saved(Image.fromarray(SEEN), "PNG", icc_profile=P3[:place] + junk + P3[place + len(junk) :]))
    assert shown.size == (48, 32)


def tiff(mode: str) -> bytes:
    values = np.linspace(0, 1000, 64).reshape(8, 8)
    dtype = {"F": np.float32, "I": np.int32, "I;16": np.uint16}[mode]
    return saved(Image.fromarray(values.astype(dtype)), "TIFF")


REFUSED = [
    (png(np.array([[1, 0] * 4] * 4, np.uint8), 0, 16), "more than 8 bits"),
    (tiff("I;16"), r"more than 8 bits \(mode I;16\)"),
    (tiff("F"), r"more than 8 bits \(mode F\)"),
    (PNG_BOMB, "pixels"),
    (saved(Image.new("L", (1, 201)), "PNG"), "one side may be 200 times the other"),
    (saved(Image.fromarray(SEEN), "PNG")[:90], "truncated|cannot|broken"),
    (saved(Image.fromarray(SEEN), "EPS"), "EPS is a program"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "cannot identify"),
    ({"bytes": None, "path": None}, "there is none"),
    ({"image": "a.png"}, "wanted is {bytes, path}, found image"),
    ({"bytes": None, "path": "absent.png"}, "there is no such file"),
    ("https://example.org/a.png", "an address, which is not fetched"),
    (None, "a NoneType is none"),
    (np.zeros((4, 4, 3)), r"float64 \[4, 4, 3\] from 0 to 0; wanted is uint8"),
    (np.ones((4, 4, 3), np.float32), r"255 \* pixels"),
    (np.zeros((3, 4, 5), np.uint8), "transpose"),
    (np.zeros((0, 4, 3), np.uint8), "uint8"),
    (torch.zeros(3, 4, 4), "a Tensor is none.*to_pil"),
]


@pytest.mark.parametrize("source, says", REFUSED, ids=[str(k) for k in range(len(REFUSED))])
def test_what_cannot_be_shown_is_refused_by_name(source: Any, says: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)row 3, image cannot be read: .*({says})"):
        open_picture(source, "row 3, image")


@settings(max_examples=40, deadline=None)
@given(st.binary(max_size=60), st.sampled_from(["PNG", "JPEG", "GIF", "TIFF", "WEBP"]), st.integers(0, 200))
def test_no_bytes_raise_anything_else(junk: bytes, container: str, place: int) -> None:
    whole = saved(Image.fromarray(SEEN), container)
    for call in (open_picture, check_picture, picture_size):
        try:
            call(whole[:place] + junk + whole[place + len(junk) :])
        except ValueError as error:
            assert "cannot be read" in str(error)


def test_arrays_of_pictures() -> None:
    grey = (np.zeros((4, 6), np.uint8), np.zeros((4, 6, 1), np.uint8), np.zeros((4, 6), bool))
    assert {np.array(open_picture(array)).shape for array in grey} == {(4, 6, 3)}
    assert np.array_equal(np.array(open_picture(np.asfortranarray(SEEN))), SEEN)
    assert (np.array(open_picture(np.zeros((2, 2, 4), np.uint8))) == 255).all()


def test_only_pixels_of_eight_bits_are_observations() -> None:
    assert check_pixels(SEEN, "env") is SEEN
    for wrong, says in (
        (SEEN / 255, r"env: pixels are float64 \[32, 48, 3\] from 0 to 0.98.*wanted is uint8 \[H, W, 3\].*255 \* pi"),
        (SEEN.astype(np.int64), "int64"),
        (SEEN.transpose(2, 0, 1), "transpose"),
        (SEEN[..., :1], r"\[32, 48, 1\]"),
        (np.dstack([SEEN, SEEN[..., :1]]), r"\[32, 48, 4\]"),
        (SEEN[None], r"\[1, 32, 48, 3\]"),
        (np.full((2, 2, 3), np.nan), "nan"),
        ("a picture", "<U9"),
    ):
        with pytest.raises(ValueError, match=says):
            check_pixels(wrong, "env")


def test_what_was_changed_is_said_once_and_one_colour_is_counted(tmp_path: Path, caplog: Any) -> None:
    frames = [Image.new("L", (4, 4), k) for k in (0, 100, 200)]
    for k in range(12):
        Image.new("RGB", (4, 4), (0, k, 0)).save(tmp_path / f"plain-{k}.png")
        frames[0].save(tmp_path / f"{k}.gif", save_all=True, append_images=frames[1:])
        Image.fromarray(np.dstack([SEEN, SEEN[..., 0]])).save(tmp_path / f"clear-{k}.png")
        Image.fromarray(SEEN).convert("CMYK").save(tmp_path / f"{k}.jpg")
    with caplog.at_level(logging.WARNING):
        for file in sorted(tmp_path.iterdir()) * 2:  # twice, as two epochs would
            open_picture(file)
    assert pictures.remarks() == {"animated": 12, "transparent": 12, "cmyk": 12, "plain": 24}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 5  # each kind once, and the 10th of one colour
    words = (
        "several frames; the first is taken",
        "transparent; such",
        "print (CMYK)",
        "one single colour",
        "10 so far",
    )
    assert [word for word in words if not any(word in one for one in said)] == []

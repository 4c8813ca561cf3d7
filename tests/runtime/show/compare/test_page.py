"""The page is blind, and can be judged by mouse and keyboard in a browser."""

from __future__ import annotations

import io
import json
import math
import wave
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image

from genrl.runtime.show.compare.page import (
    LARGEST_PAGE,
    MOST_PAIRS,
    Page,
    Pair,
    check_pairs,
    check_size,
    encode,
    key_path,
)
from genrl.runtime.show.compare.votes import read
from tests.browser import chromium
from tests.runtime.show.compare import pages

if TYPE_CHECKING:
    from playwright.sync_api import Page as Tab


def key_of(out: Path) -> dict[str, Any]:
    return json.loads(key_path(out).read_text())


class TestBlind:
    def test_neither_the_page_nor_the_samples_beside_it_name_a_model_or_a_score(self, tmp_path: Path) -> None:
        pages.write(tmp_path / "compare.html", 4)
        text, key = (tmp_path / "compare.html").read_text(), key_path(tmp_path / "compare.html").read_text()
        for word in ("model-before", "model-after", "good", "rewards", "category", "some.txt"):
            assert word in key and word not in text
        shown = pages.data(tmp_path / "compare.html")
        assert shown.keys() == {"page", "format", "pairs"}
        assert all(pair.keys() == {"token", "prompt", "left", "right"} for pair in shown["pairs"])
        pages.write(tmp_path / "more.html", 3, beside=True)
        pair = pages.data(tmp_path / "more.html")["pairs"][0]
        assert pages.picture(pair["left"]["url"], tmp_path).shape == (8, 8, 3)
        names = [path.stem for path in (tmp_path / "more_media").iterdir()]
        assert len(names) == 6 and all(len(name) == 16 and int(name, 16) >= 0 for name in names)

    def test_sides_and_order_are_random_and_the_key_resolves_them(self, tmp_path: Path) -> None:
        """Each of these fails by chance in one of 2^63 runs."""
        sides, orders = [], []
        for name in ("one", "two"):
            out = tmp_path / f"{name}.html"
            pages.write(out, 64)
            key, shown = key_of(out), pages.data(out)["pairs"]
            for pair in shown:
                red, _, blue = pages.picture(pair["left"]["url"], tmp_path)[0, 0]
                assert key["pairs"][pair["token"]]["left"] == ("a" if red > blue else "b")
            lefts = {pair["prompt"]: key["pairs"][pair["token"]]["left"] for pair in shown}
            sides.append([lefts[f"prompt {k}"] for k in range(64)])
            orders.append([pair["prompt"] for pair in shown])
        assert set(sides[0]) == {"a", "b"} and sides[0] != sides[1]
        assert orders[0] != orders[1] and orders[0] != [f"prompt {k}" for k in range(64)]


class TestRefused:
    def test_models_that_give_themselves_away_and_a_page_whose_votes_would_lose_their_key(self, tmp_path: Path) -> None:
        page = Page(tmp_path / "compare.html", question="")
        small, large = encode(torch.zeros(3, 8, 8)), encode(torch.zeros(3, 16, 8))
        with pytest.raises(ValueError, match="A makes images of 8 x 8 pixels, B images of 8 x 16 pixels: everybody"):
            page.add(Pair("a", small, large))
        pages.write(tmp_path / "compare.html", 1)
        with pytest.raises(ValueError, match=r"compare\.html exists; votes on that page need its key"):
            Page(tmp_path / "compare.html", question="")

    def test_the_same_samples_are_not_shown(self, tmp_path: Path) -> None:
        page = Page(tmp_path / "compare.html", question="")
        assert page.add(Pair("a", pages.tile("red", 0), pages.tile("red", 0))) is None
        with pytest.raises(ValueError, match="made the same samples, to the byte, for all 1 prompts"):
            page.write(pages.MODELS)
        page.add(Pair("b", pages.tile("red", 0), pages.tile("red", 1)))
        page.write(pages.MODELS)
        assert key_of(tmp_path / "compare.html")["identical"] == 1
        assert [pair["prompt"] for pair in pages.data(tmp_path / "compare.html")["pairs"]] == ["b"]

    def test_more_than_people_judge_or_a_browser_shows(self, tmp_path: Path) -> None:
        check_pairs(MOST_PAIRS)
        with pytest.raises(ValueError, match="10,000 pairs are about 17 hours of judging .* Give --num-prompts 200"):
            check_pairs(10_000)
        first = pages.tile("red", 0)
        fitting = math.floor(LARGEST_PAGE / (2 * len(first.data) * 4 / 3))
        check_size(first, fitting, beside=False)
        with pytest.raises(ValueError, match=f"at most 200 MB. Give .* for at most {fitting:,} pairs, or --beside"):
            check_size(first, 2 * fitting, beside=False)
        check_size(first, 2 * fitting, beside=True)


def judged(tab: Tab) -> str:
    return tab.locator("#progress").inner_text()


def downloaded(tab: Tab, file: Path) -> Path:
    with tab.expect_download() as waiting:
        tab.click("#download")
    waiting.value.save_as(file)
    assert waiting.value.suggested_filename == "votes.json"
    return file


def test_a_page_is_judged_by_keyboard_and_by_mouse(tmp_path: Path) -> None:
    out = tmp_path / "compare.html"
    pages.write(out, 6)
    key, tokens = key_of(out), [pair["token"] for pair in pages.data(out)["pairs"]]
    arrows = {"left": "ArrowLeft", "right": "ArrowRight"}
    with chromium() as browser:
        tab = browser.new_context().new_page()
        errors: list[str] = []
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("request", lambda request: errors.append(request.url) if request.url.startswith("http") else None)
        tab.goto(out.as_uri())
        assert judged(tab) == "0 of 6 judged, 6 remaining" and tab.locator("#download").is_disabled()
        for token in tokens[:3]:
            tab.keyboard.press(arrows[pages.for_model(key, token, "b")])
        tab.keyboard.press("Space")
        tab.keyboard.press("Backspace")
        assert judged(tab) == "3 of 6 judged, 3 remaining"
        tab.reload()
        assert judged(tab) == "3 of 6 judged, 3 remaining"
        shown = pages.data(out)["pairs"][3]
        assert tab.locator("#prompt").inner_text() == shown["prompt"]
        assert tab.locator("#left img").get_attribute("src") == shown["left"]["url"]
        tab.keyboard.press("ArrowDown")
        tab.keyboard.press("Space")
        tab.keyboard.press("z")
        assert tab.locator("#level").inner_text() == "2×"
        widths = [tab.evaluate(f"document.querySelector('{one}').clientWidth") for one in ("#left img", "#left")]
        assert widths[0] / widths[1] == pytest.approx(2, abs=0.05)
        tab.keyboard.press(arrows[pages.for_model(key, tokens[5], "b")])
        assert tab.locator("#done").is_visible() and judged(tab) == "6 of 6 judged, 0 remaining"
        tab.keyboard.press("ArrowLeft")  # there is nothing left to judge
        first = downloaded(tab, tmp_path / "first.json")
        other = browser.new_context().new_page()
        other.goto(out.as_uri())
        for k, token in enumerate(tokens):
            side = pages.for_model(key, token, "a")
            other.click(f"#{side} img" if k % 2 else f"[data-answer={side}]")
        other.click("#undo")
        other.click("[data-answer=tie]")
        second = downloaded(other, tmp_path / "second.json")
        assert errors == []
    reading = read([first])
    assert (reading.total.b, reading.total.ties, reading.total.a) == (4, 2, 0)
    reading = read([second])
    assert (reading.total.b, reading.total.ties, reading.total.a) == (0, 1, 5)
    both = read([first, second])
    assert both.judges == 2 and both.agreement is not None and both.agreement.pairs == 6


def test_videos_play(tmp_path: Path) -> None:
    pytest.importorskip("av", reason="videos need PyAV: pip install 'genrl-diffusion[av]'")
    page = Page(tmp_path / "compare.html", question="")
    films = [encode(torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(k)), fps=8) for k in range(2)]
    page.add(Pair("a film", *films))
    page.write(pages.MODELS)
    with chromium() as browser:
        tab = browser.new_context().new_page()
        tab.goto((tmp_path / "compare.html").as_uri())
        tab.wait_for_function("[...document.querySelectorAll('video')].every((one) => one.readyState >= 2)")
        assert tab.evaluate("[...document.querySelectorAll('video')].map((one) => one.duration)") == [1, 1]
        tab.keyboard.press("p")
        assert tab.evaluate("[...document.querySelectorAll('video')].map((one) => !one.paused)") == [True, True]
        tab.keyboard.press("ArrowRight")
        assert tab.locator("#done").is_visible()


# -- Samples as files: pictures and sounds exactly, videos with their frames and rate
def test_pictures_are_exact() -> None:
    sample = torch.randint(0, 256, (3, 6, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    result = encode(sample.float() / 255)
    assert (result.kind, result.width, result.height) == ("image", 4, 6)
    pixels = np.asarray(Image.open(io.BytesIO(result.data)))
    assert np.array_equal(pixels, sample.permute(1, 2, 0).numpy())
    assert encode(Image.fromarray(pixels)) == result


def test_sounds_are_exact_in_16_bits() -> None:
    sound = torch.stack([torch.linspace(-1, 1, 80), torch.linspace(2, -2, 80)])
    result = encode(sound, rate=8000)
    with wave.open(io.BytesIO(result.data)) as file:
        assert file.getparams()[:4] == (2, 2, 8000, 80)
        values = np.frombuffer(file.readframes(80), np.int16).reshape(80, 2) / 32767
    assert result.kind == "audio" and np.abs(values.T - sound.clamp(-1, 1).numpy()).max() < 1 / 32767
    assert encode(sound[0], rate=8000).data == encode(sound[:1], rate=8000).data


def test_videos_keep_frames_and_rate(tmp_path: Path) -> None:
    av = pytest.importorskip("av", reason="videos need PyAV: pip install 'genrl-diffusion[av]'")
    frames = torch.linspace(0, 1, 5)[:, None, None, None].expand(5, 3, 16, 32)
    result = encode(frames, fps=8)
    assert (result.kind, result.width, result.height) == ("video", 32, 16)
    with av.open(io.BytesIO(result.data)) as container:
        assert container.streams.video[0].average_rate == 8
        grey = [frame.to_ndarray(format="rgb24").mean() / 255 for frame in container.decode(video=0)]
    assert grey == pytest.approx([0, 0.25, 0.5, 0.75, 1], abs=0.02)


def test_what_cannot_be_shown() -> None:
    said = {(2, 80): "needs its rate", (4, 6, 4): "is no picture, video or sound", (2, 3, 5, 4): "got 5 x 4"}
    for shape, says in said.items():
        with pytest.raises(ValueError, match=says):
            encode(torch.zeros(shape))

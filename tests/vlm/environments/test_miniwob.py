"""MiniWoB's pages in a real Chromium; skipped where there is none, or no driver or package."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from genrl.vlm.config.sections import Environment
from genrl.vlm.environments.discrete import Misuse
from genrl.vlm.environments.hosts import Begin, Processes, Say
from genrl.vlm.environments.miniwob import MiniWoB, read
from genrl.vlm.environments.opening import open_environment

ROOT = Path(__file__).resolve().parents[3]
LACKING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
LACKING += [] if importlib.util.find_spec("miniwob") else ["the package miniwob"]
real = pytest.mark.skipif(bool(LACKING), reason=f"needs {', '.join(LACKING)}: see docs/vlm_agents.md")


@pytest.fixture(scope="module")
def pages() -> Iterator[MiniWoB]:
    one = MiniWoB(tasks=["click-test-2"])
    yield one
    one.close()


def button(one: MiniWoB, text: str) -> dict[str, Any]:
    (found,) = [element for element in one.elements() if element["text"] == text]
    return found


@real
@pytest.mark.slow
class TestPages:
    def test_a_page_is_a_function_of_its_seed_and_split(self, pages: MiniWoB) -> None:
        shown = [pages.reset(seed, split) for seed, split in ((3, "train"), (4, "train"), (3, "eval"), (3, "train"))]
        first, other, held_out, again = [(np.array(picture).tobytes(), text) for picture, text in shown]
        assert first == again and first != other and first != held_out
        picture, text = shown[0]
        assert isinstance(picture, Image.Image) and picture.size == (160, 210)
        assert text.splitlines()[0] == "Click button ONE." and any(
            line.endswith("button ONE") for line in text.split("\n")
        )

    def test_the_right_button_pays_and_the_wrong_one_costs(self, pages: MiniWoB) -> None:
        for text, reward in (("ONE", 1.0), ("TWO", -1.0)):
            pages.reset(1, "train")
            _, paid, terminated, _, info = pages.step(f"click {button(pages, text)['ref']}")
            assert (paid, terminated, info["success"], info["valid"]) == (reward, True, reward > 0, True)

    def test_a_click_beside_does_nothing_and_the_limit_cuts(self, pages: MiniWoB) -> None:
        pages.reset(1, "train")
        for step in range(5):
            _, paid, terminated, truncated, info = pages.step("click 3" if step else "nonsense")
            assert (paid, terminated, truncated) == (0.0 if step else -0.05, False, step == 4)
            assert info["valid"] == bool(step)

    def test_a_browser_that_dies_is_replaced_and_the_episode_goes_on(self, pages: MiniWoB) -> None:
        pages.reset(7, "train")
        pages.step("click 3")
        before = button(pages, "ONE")
        driver = psutil.Process(pages.open.driver.service.process.pid)
        for one in [*driver.children(recursive=True), driver]:
            one.kill()
        _, paid, terminated, *_ = pages.step(f"click {before['ref']}")
        assert paid == 1.0 and terminated

    def test_places_are_clicked_and_texts_typed(self) -> None:
        one = MiniWoB(tasks=["enter-text", "focus-text"], by="place", picture=[80, 105])
        try:
            picture, text = one.reset(2, "train")
            assert isinstance(picture, Image.Image) and picture.size == (80, 105) and "\n" not in text
            field = next(element for element in one.elements() if element["tag"] == "input_text")
            x, y = (int(field[a][0] + field[b][0] / 2) for a, b in (("left", "width"), ("top", "height")))
            one.step(f"click {x} {y}")
            one.step(f"type {text.split(chr(34))[1]}")
            submit = button(one, "Submit")
            x, y = (int(submit[a][0] + submit[b][0] / 2) for a, b in (("left", "width"), ("top", "height")))
            assert one.step(f"click {x} {y}")[1] == 1.0
            assert one.reset(3, "train")[1].startswith("Focus")
        finally:
            one.close()

    def test_its_browser_ends_with_its_process(self) -> None:
        settings = Environment(name="miniwob", processes=True, parallel=1, options={"tasks": ["click-test"]})
        host = Processes(settings)
        host.do({0: Begin(0, "train")})
        children = psutil.Process(host.running[0][0].pid).children(recursive=True)
        assert any("chrom" in one.name() for one in children)
        assert host.do({0: Say("nonsense")})[0].reward == -0.05
        host.close()
        assert not [one for one in psutil.wait_procs(children, timeout=20)[1] if one.status() != psutil.STATUS_ZOMBIE]


def test_what_texts_say() -> None:
    assert read("i see it . click 12", "reference") == ("click", 12)
    assert read("click 80 120", "place") == read("click 80, 120", "place") == ("click", 80, 120)
    assert read("click 160 20", "place") is None and read("click here", "reference") is None
    assert read("type  hello you ", "place") == ("type", "hello you")


def test_what_cannot_be_opened_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Misuse, match="processes: true"):
        open_environment(Environment(name="miniwob"))
    with pytest.raises(Misuse, match="by is one of reference, place, not 'name'"):
        MiniWoB(by="name")  # type: ignore[arg-type]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(Misuse, match=r"apt-get install chromium chromium-driver.*options\.browser.*'/no/browser'"):
        MiniWoB(browser="/no/browser")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Misuse, match="pip install 'miniwob"):
        MiniWoB()

"""Environments in processes of their own: the same as in this one; what hangs, dies or raises."""

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from genrl.vlm.config.sections import Environment
from genrl.vlm.environments.discrete import Misuse
from genrl.vlm.environments.hosts import Begin, Local, Processes, Say, open_environment
from genrl.vlm.environments.miniwob import MiniWoB, read
from genrl.vlm.episodes.episodes import Table

FRAIL = """
import os, time
class Frail:
    layout, help, begun = 'steps', 'say what to do', ''
    def reset(self, seed, split):
        return (f'seed {seed}',)
    def step(self, text):
        if text == 'hang': time.sleep(60)
        if text == 'die': os._exit(7)
        if text == 'raise': raise KeyError('inside')
        if text == 'nan': return (text,), float('nan'), False, False, {}
        if text == 'half': return (text,), 1.0, 0.5, False, {}
        if text == 'unsure': return (text,), 1.0, True, False, {'success': 0.3}
        return (text,), 1.0, text == 'end', False, {'success': text == 'end'}
    def render(self): ...
    def close(self): ...
"""


def frail(place: Path, timeout_s: float = 5.0) -> Environment:
    (place / "frail.py").write_text(FRAIL)
    return Environment(name=f"{place / 'frail.py'}:Frail", timeout_s=timeout_s)


def test_what_hangs_or_dies_is_cut_and_begun_anew(tmp_path: Path) -> None:
    settings = frail(tmp_path, timeout_s=0.5)
    with closing(Processes(settings)) as host:
        table = Table(settings, host)
        table.begin({0: 1, 1: 2, 2: 3}, "train")
        replies = table.say({0: "hang", 1: "go", 2: "die"})
        assert "0.5 s (environment.timeout_s)" in replies[0].lost and "exit code 7" in replies[2].lost
        assert [table.episodes[slot].lost for slot in (0, 1, 2)] == [True, False, True]
        assert table.episodes[0].truncated and table.episodes[0].seen == [("seed 1",), ("seed 1",)]
        assert table.episodes[1].total == 1.0 and not table.episodes[1].ended
        table.begin({0: 9, 2: 10}, "train")
        assert table.say({0: "end", 1: "end", 2: "go"})[0].terminated
        assert table.episodes[0].success and table.episodes[1].total == 2.0


def test_ends_rewards_and_success_are_not_cast(tmp_path: Path) -> None:
    settings = frail(tmp_path)
    table = Table(settings, Local(settings))
    table.begin({0: 1}, "train")
    refused = {"nan": "reward is nan", "half": "terminated is 0.5", "unsure": r"info\['success'\] is 0.3"}
    for text, says in refused.items():
        with pytest.raises(ValueError, match=says):
            table.say({0: text})


def test_what_raises_or_is_lost_three_times_running_is_an_error(tmp_path: Path) -> None:
    settings = frail(tmp_path)
    with closing(Processes(settings)) as host:
        table = Table(settings, host)
        table.begin({1: 1}, "train")
        with pytest.raises(RuntimeError, match="Frail raised KeyError: 'inside'"):
            table.say({1: "raise"})
        for _ in range(2):
            table.begin({0: 1}, "train")
            table.say({0: "die"})
        table.begin({0: 1}, "train")
        with pytest.raises(RuntimeError, match=r"slot 0 died with exit code 7; the last of 3 times.*Say\(text='die'\)"):
            table.say({0: "die"})


def test_an_episode_is_played_again_from_its_seed_and_answers() -> None:
    settings = Environment(name="grid")
    one, other = Table(settings, Local(settings)), Table(settings, Local(settings))
    one.begin({0: 3, 1: 4}, "train")
    for text in ('{"action": "up"}', "nonsense", '{"action": "left"}'):
        one.say({slot: text for slot in (0, 1) if not one.episodes[slot].ended})
    other.restore(one.state())
    for a, b in ((one.episodes[slot], other.episodes[slot]) for slot in (0, 1)):
        assert a.said == b.said and a.total == b.total and a.ended == b.ended
        assert a.seen[-1][0].tobytes() == b.seen[-1][0].tobytes()


def test_an_episode_that_goes_otherwise_when_it_is_played_again_is_an_error(tmp_path: Path) -> None:
    settings = frail(tmp_path)
    table = Table(settings, Local(settings))
    with pytest.raises(RuntimeError, match="seed 5 ended earlier"):
        table.restore([[0, 5, "train", ["go", "end"]]])
    says = "seed 5 died with exit code 7, when"
    with closing(Processes(settings)) as host, pytest.raises(RuntimeError, match=says):
        Table(settings, host).restore([[0, 5, "train", ["go", "die"]]])


# -- MiniWoB's pages in a real Chromium; skipped where there is none, or no driver or package
LACKING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
LACKING += [] if importlib.util.find_spec("miniwob") else ["the package miniwob"]
real = pytest.mark.skipif(bool(LACKING), reason=f"needs {', '.join(LACKING)}: see docs/vlm_agents.md")


@pytest.fixture(scope="module")
def pages() -> Iterator[MiniWoB]:
    one = MiniWoB(tasks=["click-test-2"])
    yield one
    one.close()


def button(one: MiniWoB, text: str) -> dict[str, Any]:
    (result,) = [element for element in one.elements() if element["text"] == text]
    return result


@real
@pytest.mark.slow
class TestPages:
    def test_a_page_is_a_function_of_its_seed_and_split(self, pages: MiniWoB) -> None:
        shown = [pages.reset(seed, split) for seed, split in ((3, "train"), (4, "train"), (3, "eval"), (3, "train"))]
        first, other, held_out, again = [(np.array(picture).tobytes(), text) for picture, text in shown]
        assert first == again and first != other and first != held_out
        picture, text = shown[0]
        assert isinstance(picture, Image.Image) and picture.size == (160, 210)
        lines = text.splitlines()
        assert lines[0] == "Click button ONE." and any(line.endswith("button ONE") for line in lines)

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
        with closing(MiniWoB(tasks=["enter-text", "focus-text"], by="place", picture=[80, 105])) as one:
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

    def test_its_browser_ends_with_its_process(self) -> None:
        settings = Environment(name="miniwob", timeout_s=60, parallel=1, options={"tasks": ["click-test"]})
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
    with pytest.raises(Misuse, match="timeout_s: 60"):
        open_environment(Environment(name="miniwob"))
    with pytest.raises(Misuse, match="by is one of reference, place, not 'name'"):
        MiniWoB(by="name")  # type: ignore[arg-type]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(Misuse, match=r"apt-get install chromium chromium-driver.*options\.browser.*'/no/browser'"):
        MiniWoB(browser="/no/browser")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Misuse, match="pip install 'miniwob"):
        MiniWoB()

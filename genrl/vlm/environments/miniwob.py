"""MiniWoB++ by text: real web pages in Chromium, clicked by reference or by place, and typed into.

The pages are those of the package `miniwob` (Shi et al. 2017, Liu et al. 2018; Farama). A picture has 160 x 210 pixels,
the instruction in its upper 50. Three things are changed so that an episode is a function of its seed and what is said:
the page's clock of 10 seconds is stopped, rewards do not shrink with time, and a browser that dies is started again and
told the same. The two splits have pages of different seeds.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
from difflib import get_close_matches
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from genrl.vlm.environments.contract import Layout, Observation, Split
from genrl.vlm.environments.discrete import Misuse
from genrl_rewards.extras import install
from genrl_rewards.pictures import check_pixels

SIZE = (160, 210)  # pixels of a page, width and height
LONGEST = 80  # characters of an element's text in the list
STOP_CLOCK = "core.EPISODE_MAX_TIME = 1e9;"
By = Literal["reference", "place"]
HELP = {
    "reference": "answer click REFERENCE of an element, or type TEXT",
    "place": "answer click X Y in pixels, or type TEXT",
}


class MiniWoB:
    """One episode of one of the tasks, which takes turns by seed. A step is one click or one text.

    tasks: names such as click-test-2. by: "reference" shows a list of the page's elements and clicks on one of them,
    "place" shows the picture alone. limit: steps after which an episode is cut; a text that says nothing to do is paid
    `invalid_reward`. picture: (width, height) to which pages are reduced; places stay those of the page. wait_ms: how
    long a page may move after a step. browser, driver: programs; null = as they are called on this machine. Raises
    Misuse for what is not installed, and for unknown tasks.
    """

    layout: Layout = "steps"
    begun = ""

    def __init__(
        self,
        tasks: list[str] | None = None,
        by: By = "reference",
        limit: int = 5,
        picture: list[int] | None = None,
        invalid_reward: float = -0.05,
        wait_ms: float = 0.0,
        browser: str | None = None,
        driver: str | None = None,
    ) -> None:
        if by not in HELP:
            raise Misuse(f"miniwob: environment.options.by is one of {', '.join(HELP)}, not {by!r}")
        self.tasks, self.by, self.limit = list(tasks or ["click-test"]), by, limit
        width, height = picture or SIZE
        self.picture, self.invalid_reward, self.wait_ms = (width, height), invalid_reward, wait_ms
        if importlib.util.find_spec("miniwob") is None:
            raise Misuse(f"miniwob is in the package miniwob, which is not installed: {install('miniwob')}")
        self.paths = (_program("browser", browser, "chromium"), _program("driver", driver, "chromedriver"))
        pages = importlib.import_module("miniwob.selenium_instance").HTML_DIR / "miniwob"
        known = [page.stem for page in pages.glob("*.html")]
        for unknown in set(self.tasks) - set(known):
            near = ", ".join(get_close_matches(unknown, known, cutoff=0.3)) or f"one of {pages}"
            raise Misuse(f"miniwob: there is no task {unknown!r}; did you mean {near}?")
        self.help = HELP[by]
        self.open: Any = None  # the browser

    def reset(self, seed: int, split: Split) -> Observation:
        """See `contract.Environment`."""
        self.seed, self.split, self.said = seed, split, list[str]()
        self.task = self.tasks[seed % len(self.tasks)]
        observation: Observation = self._alive(self._begin)
        return observation

    def step(self, text: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """See `contract.Environment`. success: a reward above 0 at the end of the page's task."""
        self.said.append(text)
        late = len(self.said) >= self.limit
        action = read(text, self.by)
        if action is None:
            return self.seen, self.invalid_reward, False, late, {"valid": False, "success": False}
        result = self._alive(lambda: self._act(action), again=self.said[:-1])
        if result["done"]:
            return (
                self.seen,
                float(result["raw_reward"]),
                True,
                False,
                {"valid": True, "success": result["raw_reward"] > 0},
            )
        return self._look(), 0.0, False, late, {"valid": True, "success": False}

    def render(self) -> NDArray[np.uint8]:
        """See `contract.Environment`: the page as it was seen last, since a finished page is covered."""
        return self.shown

    def close(self) -> None:
        """End the browser."""
        if self.open is not None:
            self.open.close()
        self.open = None

    def elements(self) -> list[dict[str, Any]]:
        """Leaves and buttons of the page: ref, tag, text, value, id, classes, left, top, width, height (pixels)."""
        every = [element for element in self.raw["dom_elements"] if element["ref"] > 0]
        return [element for element in every if element["flags"][3] or element["tag"] == "button"]

    def _begin(self) -> Observation:
        instance = self._browser()
        # Pages end a task after ten seconds of their own clock, and a model may think longer.
        instance.driver.execute_script(STOP_CLOCK)
        observations: list[Any] = [{}]
        instance.mode = "train" if self.split == "train" else "test"
        instance.reset(observations, [{}], f"{self.split} {self.seed}")
        return self._read(observations[0])

    def _act(self, action: tuple[Any, ...]) -> dict[str, Any]:
        actions: Any = importlib.import_module("miniwob.selenium_actions")
        instance = self._browser()
        if action[0] == "type":
            actions.execute_type_text(action[1], instance.driver)
        elif self.by == "reference":
            actions.execute_click_element(action[1], instance.driver)
        else:
            actions.execute_click_coords(action[1], action[2], instance.driver)
        metadata: dict[str, Any] = instance.get_metadata()
        return metadata

    def _look(self) -> Observation:
        observation: Observation = self._alive(
            lambda: self._read(self._browser().get_observation()[0]), again=self.said
        )
        return observation

    def _read(self, raw: dict[str, Any]) -> Observation:
        self.raw, self.shown = raw, check_pixels(raw["screenshot"], "MiniWoB, its screenshot")
        page = Image.fromarray(self.shown)
        page = page if page.size == self.picture else page.resize(self.picture, Image.Resampling.BOX)
        listed = "\n".join(map(_line, self.elements())) if self.by == "reference" else ""
        texts = [text for text in (str(raw["utterance"]), listed) if text]
        self.seen: Observation = (page, "\n".join(texts))
        return self.seen

    def _browser(self) -> Any:
        """The browser, started where there is none, at the page of the task."""
        module: Any = importlib.import_module("miniwob.selenium_instance")
        page = f"{module.DEFAULT_BASE_URL}{self.task}.html"
        if self.open is None:
            os.environ["MINIWOB_CHROME_BINARY"], os.environ["MINIWOB_CHROMEDRIVER"] = self.paths
            self.open = module.SeleniumInstance(
                0, self.task, headless=True, wait_ms=self.wait_ms, field_extractor=lambda utterance: []
            )
            self.open.start()
        elif self.open.url != page:
            self.open.url = page
            self.open.driver.get(page)
        return self.open

    def _alive(self, work: Any, again: list[str] | None = None) -> Any:
        """Do it; where the browser dies over it, once more in a new one that was told the same. Raises what the second
        browser raises. again: what was said before, None for a beginning."""
        errors: Any = importlib.import_module("selenium.common.exceptions")
        network: Any = importlib.import_module("urllib3.exceptions")
        try:
            return work()
        except (errors.WebDriverException, network.HTTPError, ConnectionError):
            self.close()
            # Pages are functions of seed and actions, so the same words lead to the same page.
            if again is not None:
                self._begin()
                for action in filter(None, (read(text, self.by) for text in again)):
                    self._act(action)
            return work()


def read(text: str, by: By) -> tuple[Any, ...] | None:
    """("click", reference), ("click", x, y) or ("type", text), the first that a text says; None where it says none."""
    number = r"(\d+)" if by == "reference" else r"(\d+)[ ,]+(\d+)"
    match = re.search(rf"\bclick\s+{number}|\btype\s+(\S.*)", text)
    if match is None:
        return None
    *places, typed = match.groups()
    if typed is not None:
        return ("type", typed.strip())
    # Outside of the page is no place: the browser would raise, and the answer is merely invalid.
    if by == "place" and not (int(places[0]) < SIZE[0] and int(places[1]) < SIZE[1]):
        return None
    return ("click", *map(int, places))


def _line(element: dict[str, Any]) -> str:
    """An element of the list: its reference, tag, text, and what is in it."""
    words = [str(element["ref"]), str(element["tag"]), str(element["text"])[:LONGEST], str(element["value"])[:LONGEST]]
    return " ".join(word for word in words if word)


def _program(option: str, named: str | None, usual: str) -> str:
    program = shutil.which(named or usual)
    if program is None:
        raise Misuse(
            f"miniwob needs {usual}: apt-get install chromium chromium-driver, or write its path as "
            f"environment.options.{option}; there is no program {named or usual!r}"
        )
    return program

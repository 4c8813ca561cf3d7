"""Sub-agents: what they are asked, what comes back, and that it is one run; and episodes of older weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from genrl.mdp.noise import derive_seed
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.engines.generation import Sampling, generate
from genrl.vlm.environments.discrete import Misuse
from genrl.vlm.episodes import episodes
from genrl.vlm.episodes.evaluate import SEEDS, Judged, figures_of, judge
from genrl.vlm.policies.processor import Prompt
from genrl.vlm.train import train
from tests.run_folders import assert_one_run, rows
from tests.vlm.methods.episodes import agent_runs

ASKS = '''
"""Asks two sub-agents after each answer, and pays for its length; cut after four."""
import numpy as np
from PIL import Image
from genrl.vlm.environments.contract import Question
class Asks:
    layout, help, begun = "steps", "answer with one of them", ""
    def __init__(self, early=False):
        self.early = early
    def reset(self, seed, split):
        self.rng, self.left = np.random.default_rng(seed), 4
        return (self.look(), Question(("go",))) if self.early else (self.look(), "get to the goal")
    def look(self):
        return Image.fromarray(self.rng.integers(256, size=(56, 56, 3), dtype=np.uint8))
    def step(self, text):
        self.left -= 1
        parts = (self.look(), "left : ", Question((self.look(), "action")), " right : ", Question(("the goal",)))
        return parts, len(text) % 7 / 10, False, self.left == 0, {"valid": True, "success": False}
    def render(self):
        return np.zeros((56, 56, 3), np.uint8)
    def close(self): ...
'''
LOOK = "i look closer </think> <bbox> [ 0 , 0 , 16 , 16 ] </bbox> <bbox> [ 16 , 16 , 32 , 32 ] </bbox>"


def crops(place: Path, **changes: Any) -> VLMConfig:
    environment = {"name": "crop", "options": {"agents": True}}
    return agent_runs.config(place, "para_grpo", environment=environment, **changes)


def looking(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[Any], list[Any], list[str]]]:
    """Every first answer asks for two parts; what sub-agents are then asked, their keys and their answers."""
    asked: list[tuple[list[Any], list[Any], list[str]]] = []

    def spy(policy: Any, prompts: Any, n: int, sampling: Any, keys: Any) -> Any:
        made = generate(policy, prompts, n, sampling, keys)
        if "sub-agent" in keys[0]:
            asked.append((list(prompts), list(keys), made.texts))
        elif keys[0][-1] == 0:
            made.texts[:] = [LOOK] * len(made.texts)
        return made

    monkeypatch.setattr(episodes, "generate", spy)
    return asked


def test_all_parts_of_all_episodes_are_looked_at_in_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if one by one; the answers come back in their places, and no turn of a sub-agent is a row of the loss."""
    asked = looking(monkeypatch)
    with agent_runs.opened(crops(tmp_path)) as run:
        acted, _ = run.act()
        prompts, keys, texts = asked[0]
        assert len(prompts) == len(set(keys)) == 8  # four episodes, two parts each
        sampling = Sampling(run.config.generation.max_new_tokens, run.config.generation.temperature)
        pairs = zip(prompts, keys, strict=True)
        alone = [generate(run.policy, [one], 1, sampling, [key]).texts[0] for one, key in pairs]
        assert alone == texts
        for slot in range(4):
            episode = run.table.episodes[slot]
            first, second = texts[2 * slot : 2 * slot + 2]
            assert episode.heard[0] == [first, second]
            assert episode.seen[1] == ("larger : ", first, " . ", "larger : ", second, " . ")
        shown = run.policy.tokenizer.decode(prompts[0].tokens.ids)
        assert "what is this ?" in shown and "inside" not in shown and "look closer" not in shown
        assert len(acted.rows.prompts) == sum(len(run.table.episodes[slot].said) for slot in range(4))
        assert acted.rows.prompts[1].tokens.pixels["pixel_values"].shape[0] == 1  # the picture of the start alone


def test_a_sub_agent_of_a_blind_evaluation_sees_black(tmp_path: Path) -> None:
    with agent_runs.opened(crops(tmp_path)) as run:
        run.table.begin({0: 0}, "eval")
        run.table.say({0: "<bbox>[0,0,16,16]</bbox>"})
        greedy = Sampling(12, temperature=0.0)
        episodes._ask(run.policy, run.table, {0: ("k", 0)}, greedy, blind=True)
        ((picture, text),) = (question.parts for question in run.table.episodes[0].questions)
        assert isinstance(picture, Image.Image)
        dark = run.policy.encode(Prompt((Image.new("RGB", picture.size), text)))
        assert run.table.episodes[0].heard[0] == generate(run.policy, [dark], 1, greedy, [("k",)]).texts


def test_a_question_before_any_answer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(ASKS)
    environment = {"name": f"{tmp_path / 'asks.py'}:Asks", "options": {"early": True}}
    with pytest.raises(Misuse, match="question for a sub-agent in a first observation"):
        train(agent_runs.config(tmp_path, "vl_dac", environment=environment))


@pytest.mark.slow
def test_episodes_of_older_weights_are_one_run_wherever_it_stops(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"generation": {"staleness": 2}, "iterations": 4, "checkpoint": {"keep": 4}}
    run = train(crops(tmp_path, **changes))
    result = rows(run)
    assert [row["staleness"] for row in result] == [0.0, 1.0, 2.0, 2.0]
    assert_one_run(train, run, tmp_path)


# -- Episodes of an evaluation whose environments die
DIES = """
import os
import numpy as np
from PIL import Image
class Dies:
    layout, help, begun = 'steps', 'answer with one of them', ''
    def reset(self, seed, split):
        self.fate, self.steps = seed % 3, 0
        return self.seen()
    def seen(self):
        return (Image.new('RGB', (56, 56)), 'get to the goal')
    def step(self, text):
        self.steps += 1
        if self.fate == 0 and self.steps == 2: os._exit(7)
        return self.seen(), 1.0, self.steps == 3, False, {'success': True}
    def render(self):
        if self.fate == 1 and self.steps == 1: os._exit(8)
        return np.full((56, 56, 3), 60 * self.steps, np.uint8)
    def close(self): ...
"""


@pytest.mark.slow
def test_what_dies_in_a_step_or_over_its_picture_is_lost_and_the_others_are_filmed_to_the_end(tmp_path: Path) -> None:
    (tmp_path / "dies.py").write_text(DIES)
    place = {"name": f"{tmp_path / 'dies.py'}:Dies", "parallel": 3, "steps": 3, "timeout_s": 60.0}
    fates = [derive_seed("held out", number) % SEEDS % 3 for number in range(20)]
    numbers = [fates.index(fate) for fate in (0, 1, 2)]
    with agent_runs.opened(agent_runs.config(tmp_path, "vl_dac", environment=place)) as run:
        result = judge(run.policy, run.config, run.table, numbers)
        assert [one.lost for one in run.table.episodes.values()] == [True, True, False]
    row = figures_of(result)
    names = ("dropped", "too_long", "success_mean", "length_mean")
    assert [row[f"eval/{name}"] for name in names] == [2, 0, 1, 3]
    with pytest.raises(RuntimeError, match="all 2 episodes of the evaluation hung or died"):
        figures_of(Judged(result.episodes[:2], []))
    assert [one["steps"] for one in result.episodes] == [2, 1, 3]
    film = np.asarray(result.films[2][0])
    assert [film[0, left, 0] for left in range(0, film.shape[1], 98)] == [0, 60, 120, 180]
    assert [film.size[0] for film, _ in result.films] == [2 * 98 - 2, 96, 4 * 98 - 2]

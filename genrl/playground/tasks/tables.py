"""Pairs of pictures of MiniTable, for a judge of RL-VLM-F: in which of the two is the instruction nearer to being done?

The questions are those of `preference_judge` in two stages (arXiv 2402.03681): where gripper and block are in either
picture and what remains, as numbers, and, told these, which picture is nearer. The pictures are moments of tables whose
players are after the instruction, or after something else, as in the data that will be judged. Held out: other tables.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from genrl.mdp.noise import derive_seed
from genrl.playground.minitable import INSTRUCTIONS, render
from genrl.playground.minitable.task import PUT, ZONES, State, expert_chunk, initial_state, step
from genrl.vlm.tasks import Question, Split
from genrl_rewards.scorers.objects.tabletop import progress

COMPARE = "{prompt} list first , second"
ANSWER = "{prompt} {analysis} which is better ?"
"""`compare` and `answer` of the judge that is taught this; words that the embedded model knows."""
PICTURE, PAIRS = 48, 50_000
UNIT = 0.2
"""Half table widths that one step of the numbers in an analysis is, which go from 0 to `MOST`."""
MOST = 18
NOISE = 0.3
"""Standard deviation of what is added to the moves of a player."""
TABLES, MOMENTS = 4000, 20


class Nearer:
    """The questions of a split: [number]. Even ones ask what remains, odd ones which picture is nearer, 0 or 1."""

    def __init__(self, split: Split) -> None:
        self.split = split
        rng = np.random.default_rng(derive_seed("tables", split))
        self.aims = rng.choice(PUT, TABLES)
        self.moments = played(rng, self.aims)

    def __len__(self) -> int:
        return PAIRS

    def __getitem__(self, number: int) -> Question:
        rng = np.random.default_rng(derive_seed("tables", self.split, number // 2))
        task = int(rng.choice(PUT))
        first, second = (self.moment(rng, task) for _ in range(2))
        shown = [render(state, PICTURE)[0] for state in (first, second)]
        left = [-progress(picture, INSTRUCTIONS[task]) for picture in shown]
        analysis = f"first {analysed(first, left[0])} second {analysed(second, left[1])}"
        pictures = [Image.fromarray(picture) for picture in shown]
        if number % 2 == 0:
            return Question((*pictures, COMPARE.format(prompt=INSTRUCTIONS[task])), analysis, 1)
        asked = ANSWER.format(prompt=INSTRUCTIONS[task], analysis=analysis)
        return Question((*pictures, asked), str(int(left[1] < left[0])), 1)

    def moment(self, rng: np.random.Generator, task: int) -> State:
        """One table with that task; half of them are of a player who is after it."""
        tables = np.flatnonzero(self.aims == task) if rng.random() < 0.5 else np.arange(TABLES)
        state = self.moments[int(rng.integers(MOMENTS))].rows(rng.choice(tables, 1))
        return state._replace(task=np.array([task]))


def analysed(state: State, left: float) -> str:
    """x and y of the gripper, x and y of the block, and what remains, in steps of `UNIT`."""
    block = state.discs[0, int(state.task[0]) // len(ZONES)]
    places = np.concatenate([state.gripper[0], block]) + 1.0
    return " ".join(str(min(MOST, max(0, round(float(one) / UNIT)))) for one in (*places, left))


def played(rng: np.random.Generator, aims: np.ndarray) -> list[State]:
    """Tables at each of `MOMENTS` moments, whose players are after these tasks."""
    states = [initial_state(rng.integers(2**63, size=len(aims), dtype=np.uint64), PUT)._replace(task=aims)]
    while len(states) < MOMENTS:
        action = expert_chunk(states[-1], 1)[:, 0]
        action[:, :2] += rng.normal(0.0, NOISE, (len(aims), 2)).astype(np.float32)
        states.append(step(states[-1], action))
    return states

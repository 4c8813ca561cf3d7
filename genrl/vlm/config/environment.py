"""Where a vision-language model acts, in runs that learn from episodes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from genrl.config.section import Count, Flag, Number, Positive, Section, Text


class Environment(Section):
    """Where the model acts, instead of a task: episodes of several turns."""

    name: Text = "grid"
    """grid, trajectories, crop, search, watch, cards-numberline, cards-ezpoints, cards-points24 and cards-blackjack
    need no download; miniwob has web pages in Chromium; else the id of a gymnasium environment with discrete actions
    and a picture (MiniGrid-FourRooms-v0, FrozenLake-v1), or path/file.py:function that returns one or a
    `contract.Environment`."""
    options: dict[str, Any] = {}
    """Keyword arguments of the environment."""
    actions: Annotated[tuple[Text, ...], Field(min_length=2)] | None = None
    """Words for the actions 0, 1 ... of a gymnasium environment; null = its own where it says them."""
    instruction: str = ""
    """What is to be done, for environments that do not say so themselves."""
    answer: Literal["json", "plain"] = "json"
    """How an action is written: {"thoughts": "...", "action": "left"}, or the word alone. Tools have their own tags."""
    invalid: Literal["noop", "random"] = "noop"
    """What an answer that names no action does: nothing, in a step that counts; or a random action (VL-DAC)."""
    invalid_reward: Number = -0.05
    """Added to the reward of such a step."""
    images: Annotated[int, Field(strict=True, ge=1, le=4)] = 1
    """Pictures in a prompt: the last so many (VL-DAC: 1 to 4). Tools show them all."""
    picture: Count | None = None
    """Side to which pictures are reduced, in pixels; null = as they are rendered."""
    max_steps: Count | None = None
    """Steps after which an episode is cut; null = the environment's own limit."""
    parallel: Count = 16
    """With a critic: episodes side by side, over all processes."""
    steps: Count = 16
    """With a critic: steps in each of them in an iteration (VL-DAC: 128 to 256 steps together). Unfinished episodes
    continue in the next iteration."""
    processes: Flag = False
    """Run each environment in its own process, which is killed and restarted if it hangs."""
    timeout_s: Positive = 60.0
    """With `processes`: longest that a step may take."""

"""The sections of a vision-language model's run that learns from episodes: where it acts, and its critic."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from genrl.config.section import Count, Flag, Number, Positive, Section, Text, Whole


class Environment(Section):
    """Where the model acts, instead of a task: episodes of several turns."""

    name: Text = "grid"
    """grid, crop, search, watch, cards-numberline, cards-ezpoints, cards-points24 and cards-blackjack need no download;
    else the id of a gymnasium environment with discrete actions and a picture (MiniGrid-FourRooms-v0, FrozenLake-v1),
    or path/file.py:function that returns one or a `contract.Environment`."""
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
    """Pictures in a prompt: that many last ones (VL-DAC: 1 to 4). Tools show them all."""
    picture: Count | None = None
    """Side to which pictures are reduced, in pixels; null = as they are drawn."""
    max_steps: Count | None = None
    """Steps after which an episode is cut; null = the environment's own limit."""
    parallel: Count = 16
    """With a critic: episodes side by side, over all processes."""
    steps: Count = 16
    """With a critic: steps in each of them in an iteration (VL-DAC: 128 to 256 steps together). Episodes go on in the
    next iteration."""
    processes: Flag = False
    """Each environment in a process of its own, which is killed and begun anew where it hangs."""
    timeout_s: Positive = 60.0
    """With `processes`: longest that a step may take."""


class Critic(Section):
    """The value function of vl_dac and poad: a small network on the language model's last state, which it does not
    train."""

    hidden: Annotated[tuple[Count, ...], Field(min_length=1)] = (3072, 2048)
    """Widths of its hidden layers (VL-DAC: 3072 and 2048)."""
    lr: Positive = 1e-4
    """Its learning rate; the schedule is the optimiser's."""
    warmup: Whole | None = None
    """Iterations at the start that train nothing but the critic; null = the method's (vl_dac: 2, poad: 0)."""
    kl_stop: Positive | None = None
    """Leave an iteration's updates once the mean of l_old - l exceeds this; null = the method's (poad: .02, vl_dac:
    never)."""

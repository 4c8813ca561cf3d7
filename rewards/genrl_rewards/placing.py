"""Where a reward runs: in this process, in a process of its own, or on a server. One call opens any of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from genrl_rewards.calls import Calls
from genrl_rewards.contract import Reward
from genrl_rewards.loading import EMPTY, load
from genrl_rewards.service.isolation import Isolated
from genrl_rewards.service.remote import Outage, Remote
from genrl_rewards.service.serve import TOKEN_VARIABLE


def open_reward(
    name: str,
    args: Mapping[str, object] = EMPTY,
    *,
    device: str = "cpu",
    dtype: str | None = None,
    batch_size: int | None = None,
    cache: int = 0,
    remote: str | Sequence[str] | None = None,
    isolate: bool | str = False,
    outage: Outage | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Reward:
    """Open a reward for scoring; `genrl_rewards.close` closes it.

    remote: URL of a server started by `genrl serve NAME`, or of several; the token is read from the environment
    variable GENRL_REWARD_TOKEN, which may be unset. isolate: true for a process of its own, or the folder of a virtual
    environment to run it in. With neither, the reward is loaded here.
    batch_size: most samples per call. cache: how many samples' scores are remembered; 0 = none.
    outage and stopped: see `genrl_rewards.service.remote`.
    Raises ValueError as `rewards.load`, `Remote` and `Isolated` do, and for settings that contradict each other.
    """
    if remote is not None and (isolate or args or dtype is not None):
        raise ValueError(f"reward {name!r} is remote: set args, dtype and isolate on its server")
    reward: Reward
    if remote is not None:
        reward = Remote(remote, name, token=os.environ.get(TOKEN_VARIABLE, ""), outage=outage, stopped=stopped)
    elif isolate:
        venv = isolate if isinstance(isolate, str) else None
        reward = Isolated(name, args, device=device, dtype=dtype, venv=venv, outage=outage, stopped=stopped)
    else:
        reward = load(name, args, device=device, dtype=dtype)
    return Calls(reward, batch_size=batch_size, cache=cache) if batch_size is not None or cache else reward

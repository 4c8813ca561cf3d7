"""Pictures of MuJoCo's scenes on a CPU, without what costs ten to twenty times the picture itself."""

from __future__ import annotations

import os
from typing import Any

from genrl.vla.simulators.contract import Misuse
from genrl.vla.simulators.simulator import headless
from genrl_rewards.extras import install


def import_mujoco(who: str, extra: str) -> Any:
    """MuJoCo, set to render without a display where there is none. Raises Misuse where it is not installed."""
    headless()
    try:
        import mujoco
    except ModuleNotFoundError as error:
        raise Misuse(f"{who} needs mujoco: {install(extra)}") from error
    return mujoco


def renderer(mujoco: Any, model: Any, size: int) -> Any:
    """A `mujoco.Renderer` of square pictures of a model, without shadows, reflections and multisampling.

    Raises Misuse where it would need a display that is not there.
    """
    backend = mujoco.GLContext.__module__
    if backend.endswith("glfw") and not os.environ.get("DISPLAY"):  # it would abort the process
        raise Misuse("mujoco was imported without MUJOCO_GL and needs a display for pictures: set MUJOCO_GL=egl")
    model.vis.quality.offsamples = 0
    model.vis.global_.offwidth = model.vis.global_.offheight = size
    made = mujoco.Renderer(model, size, size)
    for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
        made.scene.flags[flag] = 0
    return made

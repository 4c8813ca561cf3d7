"""MuJoCo's scenes on a CPU: as pictures, without what costs ten to twenty times the picture itself, and as clouds of
points: a depth picture, turned into places in the world, cropped and thinned out.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from genrl.vla.simulators.contract import Misuse
from genrl.vla.simulators.simulator import headless
from genrl_rewards.extras import install

DEPTH_SIZE = 84
"""Pixels of the depth picture."""

Floats = NDArray[np.float32]


class Box(NamedTuple):
    """The part of the world that a cloud shows, from its low to its high corner, in metres."""

    low: tuple[float, float, float]
    high: tuple[float, float, float]


def cloud(mujoco: Any, renderer: Any, count: int, box: Box) -> Floats:
    """`count` points [count, 3] of what the camera of a renderer's scene sees within the box, in the world's frame.

    Raises Misuse where it sees nothing there.
    """
    renderer.enable_depth_rendering()
    try:
        depth = renderer.render()
    finally:
        renderer.disable_depth_rendering()
    camera = mujoco.mjv_averageCamera(*renderer.scene.camera)  # of the two eyes, which is what is drawn
    points = placed(depth, camera)
    inside = points[((points >= box.low) & (points <= box.high)).all(1)]
    if not len(inside):
        raise Misuse(f"the camera sees nothing between {box.low} and {box.high}")
    return farthest(inside, count)


def placed(depth: Floats, camera: Any) -> Floats:
    """Places of the middles of a depth picture's pixels [H, W] in the world, [H W, 3]: distances along the axis of an
    OpenGL camera (`mjvGLCamera`), whose frustum at its near plane says how far apart the pixels' rays are."""
    height, width = depth.shape
    top, bottom, near = camera.frustum_top, camera.frustum_bottom, camera.frustum_near
    half = camera.frustum_width or 0.5 * (top - bottom) * width / height
    x = camera.frustum_center + half * (2.0 * (np.arange(width) + 0.5) / width - 1.0)
    y = top - (top - bottom) * (np.arange(height) + 0.5) / height
    forward, up = np.array(camera.forward), np.array(camera.up)
    ray = forward + (x[None, :, None] * np.cross(forward, up) + y[:, None, None] * up) / near
    points: Floats = (np.array(camera.pos) + depth[..., None] * ray).reshape(-1, 3).astype(np.float32)
    return points


def farthest(points: Floats, count: int) -> Floats:
    """Farthest-point sampling of points [M, 3]: the first, then always the one that is farthest from all chosen,
    [count, 3]; of M < count all, and the first again and again."""
    chosen = np.zeros(count, dtype=np.int64)
    columns, away = np.ascontiguousarray(points.T), np.full(len(points), np.inf, dtype=np.float32)
    for k in range(1, count):
        # Only the newest point can be nearer to the others than those before it: M distances a step instead of M times
        # k.
        gap = columns - columns[:, chosen[k - 1], None]
        np.minimum(away, np.einsum("dm,dm->m", gap, gap), out=away)
        chosen[k] = away.argmax()
    return points[chosen]


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
    renderer_made = mujoco.Renderer(model, size, size)
    for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
        renderer_made.scene.flags[flag] = 0
    return renderer_made

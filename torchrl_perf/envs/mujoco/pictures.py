"""Pictures of worlds by MuJoCo's own renderer, on the host and without a display."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import numpy as np

from torchrl_perf.envs.mujoco.models import needed

__all__ = ["WorldPainter", "choose_opengl"]

MOST_SHAPES = 2_000  # in a picture


def choose_opengl() -> str:
    """What draws MuJoCo's pictures: ``MUJOCO_GL``, which is set to EGL where it is not set and there is no window."""
    windows = os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    if sys.platform.startswith("linux") and not windows:
        os.environ.setdefault("MUJOCO_GL", "egl")
    return os.environ.get("MUJOCO_GL", "glfw").lower()


class WorldPainter:
    """Draws a model in given positions, seen by a camera that follows its first body.

    Args:
        model: a ``mujoco.MjModel``.
        height: H in pixels.
        width: W in pixels.

    Raises:
        ValueError: where OpenGL cannot be used, with what installs it.
    """

    def __init__(self, model: Any, height: int, width: int) -> None:
        mujoco = needed("mujoco")
        self._mujoco, self._model, self.size = mujoco, model, (height, width)
        self._data = mujoco.MjData(model)
        model.vis.global_.offheight = max(model.vis.global_.offheight, height)
        model.vis.global_.offwidth = max(model.vis.global_.offwidth, width)
        opengl = choose_opengl()
        try:
            # not mujoco.Renderer, whose OpenGL is chosen when MuJoCo is first imported, by whoever does that
            self._opengl = importlib.import_module(f"mujoco.{opengl}").GLContext(width, height)
            self._opengl.make_current()
            self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150.value)
        except Exception as error:
            raise ValueError(
                f"picture: expected OpenGL for MuJoCo's pictures, with MUJOCO_GL={opengl!r} received "
                f"{type(error).__name__}: {error}. Remedy: apt install libegl1 and MUJOCO_GL=egl, or libosmesa6 and "
                "MUJOCO_GL=osmesa."
            ) from error
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._context)
        self._scene, self._option = mujoco.MjvScene(model, MOST_SHAPES), mujoco.MjvOption()
        self._camera = mujoco.MjvCamera()
        mujoco.mjv_defaultFreeCamera(model, self._camera)
        self._camera.distance = 3 * self._reach()

    def _reach(self) -> float:
        """Metres from the first body's centre of mass to the end of the farthest shape that has one."""
        self._mujoco.mj_forward(self._model, self._data)
        shapes = np.flatnonzero((self._model.geom_rbound > 0) & (self._model.geom_bodyid > 0))
        if not len(shapes):
            return 1.0
        ways = self._data.geom_xpos[shapes] - self._data.subtree_com[min(1, self._model.nbody - 1)]
        return float((np.linalg.norm(ways, axis=-1) + self._model.geom_rbound[shapes]).max())

    def draw(self, qpos: np.ndarray) -> np.ndarray:
        """The picture of positions ``[Q]``, uint8 ``[H, W, 3]``."""
        mujoco, (height, width) = self._mujoco, self.size
        self._data.qpos[:] = qpos
        mujoco.mj_forward(self._model, self._data)
        self._camera.lookat[:] = self._data.subtree_com[min(1, self._model.nbody - 1)]
        self._opengl.make_current()
        shown = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(self._model, self._data, self._option, None, self._camera, shown, self._scene)
        whole, picture = mujoco.MjrRect(0, 0, width, height), np.empty((height, width, 3), np.uint8)
        mujoco.mjr_render(whole, self._scene, self._context)
        mujoco.mjr_readPixels(picture, None, whole, self._context)
        return picture[::-1].copy()  # OpenGL counts rows from below

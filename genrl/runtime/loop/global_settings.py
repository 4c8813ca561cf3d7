"""Settings of the whole process that a reward, simulator or pipeline may change, put back where a phase begins: with
other threads or another precision a resumed run would not equal an uninterrupted one."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

logger = logging.getLogger(__name__)


def _folder() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return None


def _enter(folder: str | None) -> None:
    with suppress(OSError):
        if folder is not None:
            os.chdir(folder)


# What libraries are known to change behind one's back, and what would change numbers or files; each with its getter and
# setter.
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the current folder": (_folder, _enter),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "torch's float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's deterministic algorithms": (
        torch.are_deterministic_algorithms_enabled,
        torch.use_deterministic_algorithms,
    ),
    "cudnn.benchmark": (
        lambda: torch.backends.cudnn.benchmark,
        lambda value: setattr(torch.backends.cudnn, "benchmark", value),
    ),
}


@dataclass
class GlobalSettings:
    """These settings as they were when this object was made."""

    values: dict[str, Any] = field(default_factory=lambda: {name: get() for name, (get, _) in _SETTINGS.items()})
    told: set[str] = field(default_factory=set)

    def put_back(self) -> None:
        """What was changed since; the first time with a warning."""
        for name, (get, put) in _SETTINGS.items():
            now, before = get(), self.values[name]
            if now == before:
                continue
            put(before)
            if name not in self.told:
                self.told.add(name)
                logger.warning("%s was changed to %s by a reward or other code: put back to %s", name, now, before)

"""Makes a torchvision that does not fit this torch importable, when it is imported first.

`from diffusers import ...` and transformers import it where it is installed; in a script that has imported genrl they
work then as the command line does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class Watcher:
    """Finds no module: it is asked before torchvision is found, and never again."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None, after torchvision's operators were declared where they cannot be loaded."""
        if name == "torchvision":
            sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
            from genrl_rewards.models.torchvision_compat import ensure  # imports torch, as torchvision does

            ensure()
        return None


def watch() -> None:
    """From here on, unless torchvision was imported before."""
    if "torchvision" not in sys.modules and not any(isinstance(finder, Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, Watcher())

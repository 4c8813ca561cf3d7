"""After `import genrl` a torchvision that does not fit is mended before diffusers or transformers import it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from genrl.quiet import Watcher, watch

BROKEN = """
import torch
if not hasattr(torch.ops.torchvision, "nms"):
    raise RuntimeError("operator torchvision::nms does not exist")
"""


ENSURED = "import genrl\nfrom genrl_rewards.models.torchvision_compat import ensure\nensure()"


@pytest.mark.parametrize("before", ["import genrl", ENSURED, "pass"])
def test_a_torchvision_without_its_operators_is_imported(before: str, tmp_path: Path) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/__init__.py").write_text(BROKEN)
    code = f"{before}\nimport torchvision"
    start = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\n"
    done = subprocess.run([sys.executable, "-c", start + code], capture_output=True, text=True)
    assert (done.returncode == 0) == (before != "pass"), done.stderr


def test_one_watcher_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    watch()
    watch()
    assert sum(isinstance(finder, Watcher) for finder in sys.meta_path) == 1

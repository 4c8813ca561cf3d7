"""A torchvision that does not fit this torch breaks transformers; the shim mends that. In a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import genrl_rewards

ROOT = str(Path(genrl_rewards.__file__).parents[1])
SHIM = "from genrl_rewards.models.torchvision_compat import ensure\nfound = ensure()\nassert ensure() == found\n"


def run(code: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed here")
def test_without_torchvision_nothing_is_declared() -> None:
    done = run(SHIM + "import torch\nassert found == 'absent'\ntorch.ops.torchvision.nms")
    assert done.stderr.strip().endswith("object has no attribute 'nms'"), done.stderr


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed here")
def test_transformers_imports_beside_whatever_torchvision_is_installed() -> None:
    plain = run("from transformers import CLIPModel")
    mended = run(
        "from genrl_rewards.scorers.preference import clipscore, pickscore\n"  # without help
        + SHIM
        + "from transformers import CLIPModel, CLIPImageProcessorPil\n"
        "import torch, torchvision\n"
        "from torchvision.transforms import v2\n"
        "assert v2.Resize(4)(torch.rand(3, 8, 8)).shape == (3, 4, 4)\n"
        "print(found)"
    )
    assert mended.returncode == 0, mended.stderr
    assert mended.stdout.split()[-1] == ("works" if plain.returncode == 0 else "declared")

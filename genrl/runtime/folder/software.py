"""The versions of what decides the numbers of a run."""

from __future__ import annotations

import platform
import subprocess
from importlib import metadata
from pathlib import Path

_PACKAGES = ("genrl", "torch", "diffusers", "transformers", "accelerate", "peft", "safetensors", "numpy", "pillow")
DISTRIBUTIONS = {"genrl": "genrl-diffusion"}
"""Names on the package index of packages that are imported by another; genrl on the index is another project."""


def versions() -> dict[str, str]:
    """Versions of Python and the packages which decide the numbers; "-" where one is not installed."""
    packages = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            packages[name] = metadata.version(DISTRIBUTIONS.get(name, name))
        except metadata.PackageNotFoundError:
            packages[name] = "-"
    return packages


def git_commit() -> str | None:
    """Commit of the checkout that genrl runs from, with `+` if files were changed; None for an installed package."""
    here = Path(__file__).resolve().parents[3]
    if not (here / ".git").exists():
        return None
    try:
        commit = _git(here, "rev-parse", "HEAD")
        return commit + ("+" if _git(here, "status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()

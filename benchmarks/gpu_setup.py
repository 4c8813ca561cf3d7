"""Make a bare machine with a GPU ready for `python -m benchmarks.gpu`, and say what is missing. Standard library alone.

    python3 benchmarks/gpu_setup.py WHEELS TARGET && PYTHONPATH=TARGET python3 -m benchmarks.gpu

WHEELS: a folder of wheels that were carried along; they are installed into TARGET without their needs, beside what the
machine's own Python has. Then every package that genrl needs is asked for by name, and torch for a GPU, in a few
seconds. Fails where something is missing, and names it with the command that would fetch it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMPORTS = "pytest, xdist, hypothesis, genrl.cli, genrl.diffusion.train, genrl.vlm.train, genrl.vla.train"
"""What imports nearly all that the checks need, with the needs of needs."""
TESTS = ("pytest", "pytest-xdist", "hypothesis", "triton", "torchao", "scipy")


def needed() -> list[str]:
    """Names of the packages that genrl asks for, and of those that the checks want."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [*(re.split(r"[<>=!~;\[ ]", one, maxsplit=1)[0] for one in project["dependencies"]), *TESTS]


def main() -> None:
    wheels, target = Path(sys.argv[1]), sys.argv[2]
    options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade", "--target", target]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *map(str, wheels.glob("*.whl"))], check=True)
    sys.path.insert(0, target)
    missing = []
    for name in needed():
        try:
            print(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            missing.append(name)
    import torch

    print(f"torch {torch.__version__}, GPU: {torch.cuda.is_available() and torch.cuda.get_device_name()}")
    if missing:
        tag = f"{sys.version_info.major}.{sys.version_info.minor}"
        sys.exit(f"missing: {', '.join(missing)}; where there is an index: pip download --no-deps --only-binary=:all: "
                 f"--python-version {tag} -d {wheels} {' '.join(missing)}")  # fmt: skip
    imported = subprocess.run(
        [sys.executable, "-c", f"import {IMPORTS}, benchmarks.gpu_checks"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{target}{os.pathsep}{ROOT}"},
    )  # fmt: skip
    if imported.returncode:
        sys.exit("a package that others need is missing: see above")
    if not torch.cuda.is_available():
        sys.exit("torch sees no GPU")


if __name__ == "__main__":
    main()

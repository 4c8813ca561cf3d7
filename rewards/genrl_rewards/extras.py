"""How the packages of an extra are installed."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires


def install(extra: str) -> str:
    """The command that installs an extra, by the names of its packages: genrl itself came from a clone or a wheel, and
    what the index has under its name is not known here."""
    try:
        lines = requires("genrl-diffusion") or ()
    except PackageNotFoundError:  # a source tree that was never installed
        lines = ()
    packages = [line.partition(";")[0].strip() for line in lines if re.search(rf"extra == ['\"]{extra}['\"]", line)]
    if not packages:
        return f"pip install '.[{extra}]' in the folder of genrl's clone"
    return "pip install " + " ".join(f"'{package}'" for package in packages)

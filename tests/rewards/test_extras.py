"""The command of an extra names its packages, whatever the index has under this package's name."""

from __future__ import annotations

from importlib import metadata

import pytest

from genrl_rewards import extras


def test_an_extra_is_installed_by_the_names_of_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        "torch>=2.8",
        'rapidocr>=3.10; extra == "ocr"',
        "triton>=3.6; platform_system == 'Linux' and extra == 'fast'",
    ]
    monkeypatch.setattr(extras, "requires", lambda name: lines)
    assert extras.install("ocr") == "pip install 'rapidocr>=3.10'"
    assert extras.install("fast") == "pip install 'triton>=3.6'"

    def absent(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(extras, "requires", absent)
    assert extras.install("ocr") == "pip install '.[ocr]' in the folder of genrl's clone"

"""Sets of given pictures are checked before anything is trained on, each picture opened once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from genrl.data.preferences import TARGET_COLUMNS, check_set
from genrl.data.prompts import Prompt, PromptError


def test_soundness_and_shapes_are_seen_in_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, side in (("source", 16), ("target", 16), ("long", 24)):
        Image.new("RGB", (side, 16)).save(tmp_path / f"{name}.png")
    seen: list[str] = []
    really = Image.open

    def counting(file: Any, *more: Any) -> Any:
        seen.append(Path(file).stem)
        return really(file, *more)

    monkeypatch.setattr(Image, "open", counting)

    def check(target: str) -> None:
        columns = {"source_image": str(tmp_path / "source.png"), "target_image": str(tmp_path / f"{target}.png")}
        rows = [Prompt("edit", columns, line=1)]
        check_set("a.jsonl", rows, TARGET_COLUMNS, beside="source_image", size=(32, 32))

    check("target")
    assert sorted(seen) == ["source", "target"]
    with pytest.raises(PromptError, match=r"a.jsonl:1: unlike shapes \(target_image 24 x 16, source_image 16 x 16"):
        check("long")

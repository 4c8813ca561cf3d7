"""The code on docs/vla_data.md runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs/vla_data.md"


def test_the_code_on_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 3
    exec(compile("\n".join(blocks), str(PAGE), "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "20 10 ['observation.image'] put the blue block in the far zone"
    assert "'action': (" in printed[1] and "'action_is_pad': (" in printed[1]
    assert printed[3:5] == ["21 (21, 6)", "23 (23, 6)"]
    assert "'success-00.gif'" in printed[5] and "'sheet.png'" in printed[5]
    assert printed[6].startswith("(0.8388") and printed[6].endswith(", 1.0)")

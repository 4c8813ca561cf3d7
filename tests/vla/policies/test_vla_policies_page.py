"""docs/vla_policies.md: its code runs, its sizes of contexts are those that are computed."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from genrl.vla.policies.folder import load_policy
from tests.vla.published import pi_folder, pi_observation

PAGE = Path(__file__).parents[3] / "docs" / "vla_policies.md"


def test_the_code_on_the_page_runs(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    pi_folder(tmp_path / "published")
    seen = pi_observation(1)
    seen["observation.image"] = seen.pop("observation.images.base_0_rgb")
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names = {"FOLDER": "published", "observation": seen, "x": torch.randn(1, 6, 32), "sigma": torch.ones(1)}
    exec(compile(block, str(PAGE), "exec"), names)
    assert names["velocity"].shape == (1, 6, 32)
    again = load_policy(tmp_path / "fine-tuned")
    assert again.critic and again.inputs == names["policy"].inputs


def test_the_sizes_on_the_page_follow_from_it() -> None:
    page = PAGE.read_text(encoding="utf-8")
    sizes = (("pi0", 18, 256, 256, 48), ("pi0.5", 18, 256, 256, 200), ("SmolVLA", 16, 5 * 64, 64, 49))
    for name, layers, keys, picture, rest in sizes:
        places = [picture * cameras + rest for cameras in (1, 2, 3)]
        numbers = 2 * layers * keys * places[-1]
        row = f"| {name} | {' / '.join(map(str, places))} | {numbers * 4 / 1e6:.1f} MB | {numbers * 2 / 1e6:.1f} MB |"
        assert row in page

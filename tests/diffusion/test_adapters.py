"""Whole runs with every type of adapter: on-policy ratios, resumed to the bit, exported merged; begun from another."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers import DiffusionPipeline

from genrl.config import load
from genrl.diffusion.config.estimate import read_components, trained_parameters
from genrl.diffusion.files.export import export
from genrl.diffusion.policy.adapters import load_lora
from genrl.diffusion.train import train
from genrl.runtime.folder.run import Run
from tests.diffusion import runs

picture = partial(runs.picture, guidance_scale=7.0)


def trained(folder: Path, model: Path, name: str, **lora: Any) -> Path:
    keys = {"rank": 4, "alpha": 8.0} | lora if "from" not in lora else lora
    trainer = {"algorithm": "flow_grpo", "kl_weight": 0.01}  # the reference takes part
    return train(runs.config(folder, model, output=str(folder / name), lora=keys, trainer=trainer))


def check_resumed(run: Path) -> None:
    """From the first of two iterations; and what was on-policy had ratios of 1."""
    assert runs.differences(run, runs.resumed(run, run.parent, 1)) == []
    assert [row["ratio/max_abs_dev"] for row in runs.rows(run)[1:]] == [0.0, 0.0]


@pytest.mark.parametrize(
    "kind", [pytest.param("dora", marks=pytest.mark.slow), pytest.param("rslora", marks=pytest.mark.slow), "lokr"]
)
def test_each_type(folder: Path, model: Path, kind: str) -> None:
    run = trained(folder, model, "run", type=kind)
    check_resumed(run)
    config = load(Run(run).config)
    weights = runs.last_state(run).tensors["weights"]
    assert trained_parameters(config, read_components(model)) == sum(t.numel() for t in weights.values())  # type: ignore[arg-type]

    plain = DiffusionPipeline.from_pretrained(model)
    base = picture(plain)
    load_lora(plain, str(run / "lora"))
    merged = DiffusionPipeline.from_pretrained(export(run, folder / "merged", full=True))
    np.testing.assert_allclose(picture(merged), picture(plain), rtol=1e-4, atol=1e-4)
    assert not np.allclose(picture(plain), base, atol=1e-3)


@pytest.mark.slow
def test_from_another_beside_a_frozen_one(folder: Path, model: Path, finished: Path) -> None:
    """The reference is the model that training begins with, in a resumed run, too."""
    first, second = trained(folder, model, "first", rank=2, alpha=6.0), finished
    run = trained(folder, model, "third", **{"from": str(first / "lora"), "frozen": [str(second / "lora")]})
    check_resumed(run)
    rows = runs.rows(run)
    begun = [row["kl_reference"] for row in rows[1:] if "kl_reference" in row]
    assert not begun or begun[0] == 0.0
    card = (run / "lora" / "README.md").read_text()
    assert "pipe.set_adapters(['trained', 'frozen_0'])" in card and str(second / "lora") in card
    pipe = DiffusionPipeline.from_pretrained(model)
    for name, source in (("trained", run), ("frozen_0", second)):
        load_lora(pipe, str(source / "lora"), name)
    pipe.set_adapters(["trained", "frozen_0"])
    merged = DiffusionPipeline.from_pretrained(export(run, folder / "merged", full=True))
    np.testing.assert_allclose(picture(merged), picture(pipe), rtol=1e-4, atol=1e-4)

"""Two processes (gloo) that compute every sample together, each half of its tokens, beside one that does all."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models import transformers as networks
from torch import Tensor

from genrl.diffusion.config.model_rules import DIVIDED
from genrl.runtime.folder.run import Run, read_metrics
from tests.diffusion import runs
from tests.diffusion.families import saved
from tests.diffusion.test_distributed import GRPO, NFT, distance, recorded

NOT_DIVIDED = {
    "ChronoEditTransformer3DModel",
    "HeliosTransformer3DModel",
    "LTX2VideoTransformer3DModel",
    "LTXVideoTransformer3DModel",
    "MiniMaxH3Transformer3DModel",
    "QwenImageTransformer2DModel",
}
"""Classes that have a plan in diffusers, and are refused."""
CALLS: dict[str, dict[str, Any]] = {
    "flux": {"guidance_scale": 3.5, "pipeline_args": {"max_sequence_length": 16}},
    "flux2": {"pipeline_args": {"max_sequence_length": 48, "text_encoder_out_layers": [1, 2]}},
    "wan_t2v": {"guidance_scale": 5.0, "num_frames": 5, "pipeline_args": {}},
}
PAIR: dict[str, Any] = {"distributed": {"context": 2}}


def within(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    return float((found.double() - wanted.double()).abs().max()) <= tolerance * float(wanted.double().abs().max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "trainer", "lora"), [("flux", NFT, None), ("flux2", GRPO, None), ("wan_t2v", GRPO, runs.LORA)]
)
def test_learnt_from_alike(folder: Path, name: str, trainer: dict[str, Any], lora: dict[str, Any] | None) -> None:
    """Samples, log-probabilities and scores within rounding; the gradient is the sum over both processes."""
    (folder / "light.py").write_text("def light(images):\n    return images.flatten(1).mean(1)  # of a video, too\n")
    changes: dict[str, Any] = {"trainer": trainer, "sampling": CALLS[name], "iterations": 1, "lora": lora}
    changes["rewards"] = [{"name": f"{folder / 'light.py'}:light"}]
    model = saved(name, folder)
    (alone,) = recorded(folder, model, 1, **changes)
    parts = recorded(folder, model, 2, "context", **PAIR, **changes)
    gradients = {key: alone[key] for key in alone if key.startswith("gradient/")}
    for part in parts:
        assert part.keys() == alone.keys()  # both have all samples
        assert all(torch.equal(part[key], parts[0][key]) for key in alone)
        for key in alone:
            if not key.startswith(("gradient/", "position")) or key.endswith(("final", "slots")) or "log-prob" in key:
                assert within(part[key], alone[key], 1e-5), key
        # advantages divide by the spread of nearly equal scores, which raises the rounding of the samples (Wan: 4e-4)
        assert 0 < distance(part, gradients) < 1e-3 * distance(gradients, {})
    rows = [read_metrics(Run(folder / run / "run").metrics)[-1] for run in ("world-1", "context-2")]
    for key in ("model_calls/sample", "model_calls/train", "updates"):
        assert rows[0][key] == rows[1][key]
    if trainer is GRPO:
        assert rows[1]["ratio/max_abs_dev"] == 0.0


@pytest.mark.slow
def test_groups_of_processes_share_samples_out(folder: Path) -> None:
    """Four processes, two to a sample, whose bases are in shards over all four: as two to a sample."""
    model = saved("flux", folder)
    changes = {"sampling": {**CALLS["flux"], "prompts_per_iteration": 4}, "iterations": 1}
    pair = recorded(folder, model, 2, "pair", **PAIR, **changes)[0]
    parts = recorded(folder, model, 4, "groups", distributed={"context": 2, "fsdp": True}, **changes)
    drawn = [{key for key in part if key.startswith("position/")} for part in parts]
    assert drawn[0] == drawn[1] and drawn[2] == drawn[3] and not drawn[0] & drawn[2]
    gradients = {key: pair[key] for key in pair if key.startswith("gradient/")}
    for part in parts:
        assert all(torch.equal(part[key], pair[key]) for key in part if not key.startswith("gradient/"))
        assert distance(part, gradients) < 1e-6 * distance(gradients, {})


@pytest.mark.slow
def test_stops_and_goes_on(folder: Path) -> None:
    """To the bit; evaluations and the adapter that both processes verify included."""
    changes = {"sampling": CALLS["flux"], "iterations": 1, "evaluation": {"every": 1}, **PAIR}
    model = saved("flux", folder)
    files = [runs.written(folder, model, name, **changes | {"iterations": n}) for name, n in (("one", 2), ("two", 1))]
    for file in files:
        runs.finish(file, 2, runs.train_file)
    runs.finish(files[0], 2, runs.train_file, str(folder / "two" / "run"))
    assert runs.differences(folder / "one" / "run", folder / "two" / "run") == []
    assert (folder / "one" / "run" / "lora" / "README.md").is_file()


def test_every_plan_of_diffusers_is_known_here() -> None:
    """A plan that is new in diffusers is to be tried."""
    known = {name for name in dir(networks) if getattr(getattr(networks, name), "_cp_plan", None)}
    assert set(DIVIDED) <= known and known - set(DIVIDED) == NOT_DIVIDED

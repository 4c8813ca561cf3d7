"""Orient-Anything in the published format: angles from bins, the network by hand, and files that are none."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from genrl_rewards.models.orient_anything import OrientAnything, orientation_of
from tests.rewards import tiny_orient


@pytest.mark.parametrize(("bins", "rotation"), [(180, -30.0), (360, -120.0)])
def test_angles_are_the_bins_with_the_largest_scores(bins: int, rotation: float) -> None:
    scores = torch.zeros(360 + 180 + bins + 2)
    scores[35], scores[360 + 100], scores[360 + 180 + 60], scores[-2] = 2.0, 3.0, 4.0, 1.0
    assert orientation_of(scores) == pytest.approx((35.0, 10.0, rotation, 1 / (1 + math.exp(-1))))


def test_the_network_is_dino_and_two_layers_on_its_class_token(tmp_path: Path) -> None:
    """The layers by hand, from the file; the folder of the hub's layout and the file itself are the same."""
    file, backbone = tiny_orient.save(tmp_path)
    random = np.random.default_rng(0)
    pictures = [Image.fromarray(random.integers(0, 255, (40, 28, 3), dtype=np.uint8)) for _ in range(3)]
    model = OrientAnything(str(tmp_path), str(backbone))
    found = model(pictures)
    assert found == OrientAnything(str(file), str(backbone))(pictures) and len(set(found)) > 1
    held = torch.load(file, weights_only=True)
    pixels = model.processor(images=pictures, return_tensors="pt")["pixel_values"]
    assert torch.equal(model.dino.state_dict()["layernorm.weight"], held["dinov2.layernorm.weight"])
    with torch.no_grad():
        x = model.dino(pixel_values=pixels).last_hidden_state[:, 0]
    for net in ("net1", "net2"):
        linear, norm = (
            {name.rsplit(".", 1)[1]: v for name, v in held.items() if name.startswith(f"down_sampler.{net}.{k}.")}
            for k in (0, 1)
        )
        x = x @ linear["weight"].T + linear["bias"]
        x = (x - norm["running_mean"]) / (norm["running_var"] + 1e-5).sqrt() * norm["weight"] + norm["bias"]
        x = x.clamp_min(0) if net == "net1" else x
    assert [orientation_of(scores)[:3] for scores in x] == [one[:3] for one in found]


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    file, backbone = tiny_orient.save(tmp_path)
    held = torch.load(file, weights_only=True)
    other = tmp_path / "other.pt"

    def refused(weights: dict[str, torch.Tensor], words: str) -> None:
        torch.save(weights, other)
        with pytest.raises(ValueError, match=words):
            OrientAnything(str(other), str(backbone))

    refused({"dinov2.layernorm.bias": torch.ones(3)}, "holds no Orient-Anything")
    refused({k: v for k, v in held.items() if k != "dinov2.layernorm.bias"}, r"does not fit .*layernorm\.bias")
    refused({k: v for k, v in held.items() if k != "down_sampler.net2.0.bias"}, "of another architecture")
    wide = {k: torch.ones(722, 32) if k == "down_sampler.net1.0.weight" else v for k, v in held.items()}
    refused(wide, "was made from a 'dinov2' of width 32; .* is a 'dinov2' of width 16")
    with pytest.raises(ValueError, match=r"has no croplargeEX2/dino_weight\.pt"):
        OrientAnything(str(backbone), str(backbone))

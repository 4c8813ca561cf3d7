"""Targets and ranks of an adapter against the layers of a pipeline that is on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from genrl.config import ConfigError, check_files, load_located
from genrl.config.adapter_layers import layer_problems
from genrl.config.estimate import Component
from genrl.config.sections import LoRA

SHAPES = {
    "blocks.0.attn.to_q.weight": (8, 8),
    "blocks.0.attn.to_out.0.weight": (8, 8),
    "blocks.0.ff.weight": (8, 8),
    "blocks.0.norm.weight": (8,),
}
TRANSFORMER = Component("transformer", "X", 200, 0, SHAPES, {})
ENCODER = Component("text_encoder", "Y", 64, 0, {"layers.0.to_v.weight": (8, 8)}, {})


@pytest.mark.parametrize(
    ("lora", "wrong"),
    [
        (LoRA(), {}),
        (LoRA(targets=("to_q", "attn.to_out.0", "ff"), ranks={"ff": 2, "transformer": 3}), {}),
        (LoRA(targets=("to_q", "norm")), {"model.lora.targets": "no layer of the transformer (X) is called norm"}),
        (LoRA(targets=("to_v",)), {"model.lora.targets": "is called to_v; its layers end in ff, to_q"}),
        (LoRA(ranks={"ff": 2}), {"model.lora.ranks.ff": "no adapted layer's name ends in ff"}),
        (LoRA(ranks={"unet": 2}), {"model.lora.ranks.unet": "components: transformer; a layer: blocks.0.attn.to_q"}),
    ],
)
def test_layers_that_are_not_there(lora: LoRA, wrong: dict[str, str]) -> None:
    found = dict(layer_problems(lora, [ENCODER, TRANSFORMER]))
    assert found.keys() == wrong.keys() and all(wrong[key] in text for key, text in found.items())


def test_names_that_are_not_known() -> None:
    unread = Component("transformer", "X", 0, 0, {}, {}, "no weights")
    assert list(layer_problems(LoRA(targets=("nothing",), ranks={"no": 1}), [unread])) == []


def test_check_knows_what_training_refuses(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    config, origins = load_located("configs/quickstart.yaml", ["model.lora.ranks={to_x: 2}"])
    with pytest.raises(ConfigError, match=r"model\.lora\.ranks\.to_x.*no adapted layer's name ends in to_x"):
        check_files(config, origins)

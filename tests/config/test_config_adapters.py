"""What the disk tells of the LoRAs that a configuration names, and how `from` is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from genrl.config import ConfigError, LoRA, check_files, dump, load

QUICK = Path("configs/flow_grpo.yaml")


def test_from_survives_a_file(tmp_path: Path) -> None:
    config = load(QUICK, ["model.lora.from=org/lora", "trackers=[]", f"output={tmp_path}/run"])
    (tmp_path / "again.yaml").write_text(dump(config))
    assert "    from: org/lora" in dump(config) and load(tmp_path / "again.yaml") == config
    assert LoRA.model_validate({"from": "org/lora"}).begin == "org/lora"


@pytest.mark.parametrize("key", ["model.lora.from", "model.lora.frozen.0"])
def test_folders_of_adapters(tmp_path: Path, key: str) -> None:
    def notes(source: object) -> list[str]:
        value = f"model.lora.from={source}" if key.endswith("from") else f"model.lora.frozen=[{source}]"
        return check_files(load(QUICK, [value, "trackers=[]", f"output={tmp_path}/run"]))

    assert any(note.startswith(f"{key}: org/lora is not on this machine") for note in notes("org/lora"))
    (tmp_path / "adapter").mkdir()
    with pytest.raises(ConfigError, match=rf"{key}: .* there is no \.safetensors file"):
        notes(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=f"{key}: no such folder: .*adaptr; did you mean .*adapter"):
        notes(tmp_path / "adaptr")
    (tmp_path / "adapter" / "a.safetensors").touch()
    assert not any(note.startswith(key) for note in notes(tmp_path / "adapter"))


@pytest.mark.parametrize(
    ("weight", "plain"), [("lora_B.weight", True), ("lokr_w1", False), ("lora_magnitude_vector", False)]
)
def test_a_teacher_is_had_of_a_lora_alone(tmp_path: Path, weight: str, plain: bool) -> None:
    save_file({f"transformer.x.{weight}": torch.zeros(2)}, tmp_path / "a.safetensors")
    changes = [f"model.lora={{from: {tmp_path}}}", "trackers=[]", f"output={tmp_path}/run"]
    config = load(QUICK.parent / "diffusion" / "diff_instruct.yaml", changes)
    if plain:
        check_files(config)
        return
    with pytest.raises(ConfigError, match=f"model.lora.from: .* of a LoRA alone; .* also has transformer.x.{weight}"):
        check_files(config)

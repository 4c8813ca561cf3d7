"""A LoRA for other programs: the names that they read, at the strength that was trained, or a refusal."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import DiffusionPipeline
from safetensors.torch import load_file, save_file

from genrl.data import prompts
from genrl.diffusion.files import formats
from genrl.diffusion.files.export import export, probe_of
from genrl.diffusion.files.formats import ExportError, form_problem
from genrl.diffusion.policy.policy import Policy
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES
from tests.diffusion.files.test_export import made_run


def saved(folder: Path, family: str, **lora: Any) -> Path:
    """A run of a family with a LoRA far from its start, at a strength that is not 1."""
    made = FAMILIES[family]()
    made.pipe.save_pretrained(folder / "base")
    trainer = {"algorithm": "flow_grpo"} | ({"kernel": "ddim", "noise_level": 1.0} if family == "sd15" else {})
    keys: dict[str, Any] = {"lora": {"rank": 4, "alpha": 6.0} | lora, "sampling": {"pipeline_args": {}}}
    config = runs.config(folder, folder / "base", trainer=trainer, **keys)
    return made_run(config, Policy(made.pipe), probe_of(config, prompts.load(config.prompts.train)[0]))


def picture(folder: Path, lora: Path | None) -> torch.Tensor:
    pipe = DiffusionPipeline.from_pretrained(folder / "base")
    pipe.set_progress_bar_config(disable=True)
    if lora is not None:
        pipe.load_lora_weights(str(lora))
    generator = torch.Generator().manual_seed(3)
    made = pipe("a cat", num_inference_steps=3, height=16, width=16, generator=generator, output_type="np")
    return torch.as_tensor(made.images)


@pytest.mark.parametrize(
    ("family", "form"),
    [("sd15", "kohya"), pytest.param("sd15", "comfyui", marks=pytest.mark.slow), ("sd3", "comfyui")],
)
def test_loads_anywhere_as_it_was_trained(folder: Path, family: str, form: Any) -> None:
    run = saved(folder, family, **({} if form == "comfyui" else {"type": "rslora", "ranks": {"to_q": 2}}))
    out = export(run, folder / "out", form=form)
    names = load_file(out / f"lora_{form}.safetensors")
    start = "transformer." if family == "sd3" else "lora_unet_"
    assert all(name.startswith(start) for name in names)
    plain = export(run, folder / "plain")
    base, wanted, found = (picture(folder, lora) for lora in (None, plain, out))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert float((wanted - base).abs().max()) > 1e-3
    card = (out / "README.md").read_text()
    assert "load_lora_weights" in card and {"kohya": "kohya's names", "comfyui": "ComfyUI's names"}[form] in card
    assert "names" not in (plain / "README.md").read_text()


def test_what_acts_differently_is_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At another strength, as it would be without the scale."""
    run = saved(folder, "sd15")

    def weaker(tensors: Any, file: Path, metadata: Any) -> None:
        save_file({k: v / 1.5 if "lora_up" in k else v for k, v in tensors.items()}, file, metadata=metadata)

    monkeypatch.setattr(formats, "save_file", weaker)
    with pytest.raises(ExportError, match="acts differently"):
        export(run, folder / "out", form="kohya")
    assert not (folder / "out").exists()
    with pytest.raises(ValueError, match="--format kohya: is a form of LoRAs"):
        export(run, folder / "out", full=True, form="kohya")


def test_refused() -> None:
    sd3 = {"transformer": "SD3Transformer2DModel"}
    rows: list[tuple[Any, dict[str, str], str, str]] = [
        ("kohya", sd3, "lora", "write comfyui"),
        ("comfyui", {"transformer": "WanTransformer3DModel"}, "lora", "does not know"),
        ("comfyui", {"unet": "UNet2DConditionModel"}, "dora", "this is a dora"),
        ("comfyui", sd3, "lokr", "this is a lokr"),
    ]
    for form, denoisers, kind, says in rows:
        assert says in str(form_problem(form, denoisers, kind))

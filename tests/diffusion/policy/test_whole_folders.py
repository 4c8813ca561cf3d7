"""Folders that cannot load: check and loader refuse each for the true reason; what they load is accounted for."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from genrl.config.folders import weights_problem
from genrl.diffusion.config.files import folder_problems
from genrl.diffusion.config.sections import Model
from genrl.diffusion.policy.loading import load_pipeline
from tests.diffusion.families import FAMILIES

UNET, TEXT = "unet/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 335\n"


@pytest.fixture
def copy(sd: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(sd, tmp_path / "sd"))


def rename(file: str, *parts: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).rename(folder / Path(file).with_name(".".join(parts)))


def cut(file: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes((data := (folder / file).read_bytes())[: len(data) // 2])


def write(file: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_bytes(data)


def remove(*files: str) -> Callable[[Path], object]:
    return lambda folder: [shutil.rmtree(f) if (f := folder / file).is_dir() else f.unlink() for file in files]


def listed(shard: str) -> Callable[[Path], None]:
    """An index of one file under the name of a shard, and a second that is not there."""

    def change(folder: Path) -> None:
        file = folder / UNET
        names = list(load_file(file))
        file.rename(file.with_name("diffusion_pytorch_model-00001-of-00002.safetensors"))
        places = dict.fromkeys(names, "diffusion_pytorch_model-00001-of-00002.safetensors") | {names[0]: shard}
        index = {"metadata": {}, "weight_map": places}
        (folder / "unet" / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))

    return change


def vocabulary(folder: Path) -> None:
    for file in (folder / "tokenizer").iterdir():
        if file.name not in ("tokenizer_config.json", "special_tokens_map.json"):
            file.unlink()


FOLDERS = {
    "variant only": (rename(UNET, "diffusion_pytorch_model", "fp16", "safetensors"), "write model.variant: fp16"),
    "pointer": (write(TEXT, POINTER), "text_encoder model.safetensors is a Git LFS pointer.*git lfs pull"),
    "cut": (cut(UNET), "is cut: it has .* bytes; download it again"),
    "empty": (write(TEXT, b""), "model.safetensors is empty"),
    "a shard missing": (listed("diffusion_pytorch_model-00002-of-00002.safetensors"), "lacks 1 of the files that"),
    "shards without an index": (
        rename(UNET, "diffusion_pytorch_model-00001-of-00002", "safetensors"),
        "has shards .* but no .safetensors.index.json",
    ),
    "a component missing": (remove("vae"), "there is no folder vae, although model_index.json has a AutoencoderKL"),
    "no weights": (remove(TEXT), "text_encoder holds no weights"),
    "no config": (remove("unet/config.json"), "unet/config.json is missing"),
    "no scheduler": (remove("scheduler/scheduler_config.json"), "scheduler/scheduler_config.json is missing"),
    "no vocabulary": (vocabulary, "tokenizer has no vocabulary"),
    "pickles": (
        lambda f: (torch.save({"a": torch.ones(1)}, f / "unet/diffusion_pytorch_model.bin"), (f / UNET).unlink()),
        "pickled weights alone .*model.use_safetensors: false",
    ),
    "0 parameters": (lambda f: save_file({"a": torch.ones(0)}, f / UNET), "holds no weights"),
    "a page of a proxy": (write(UNET, b"<!DOCTYPE html><html>log in</html>"), "not a safetensors file"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_cannot_load_is_refused_for_the_true_reason(copy: Path, name: str) -> None:
    change, reason = FOLDERS[name]
    assert folder_problems(Model(path=str(copy)), copy) == []
    change(copy)
    with pytest.raises(ValueError, match=reason):  # by the same function as the check
        load_pipeline(Model(path=str(copy)))
    assert len(folder_problems(Model(path=str(copy)), copy)) == 1


def test_variants_and_shards_that_are_whole_load(copy: Path) -> None:
    for file in (UNET, TEXT, "vae/diffusion_pytorch_model.safetensors"):
        stem = Path(file).name.partition(".")[0]
        (copy / file).rename((copy / file).with_name(f"{stem}.fp16.safetensors"))
    assert folder_problems(Model(path=str(copy), variant="fp16"), copy) == []
    load_pipeline(Model(path=str(copy), variant="fp16"))


def edited(file: Path, change: str) -> None:
    weights = load_file(file)
    key = sorted(name for name in weights if ".0." in name)[0]
    match change:
        case "missing":
            del weights[key]
        case "shape":
            weights[key] = torch.zeros(3, 3)
        case "layer":
            weights[key.replace(".0.", ".9.", 1)] = weights[key].clone()
        case "extra":
            weights["logit_bias"] = torch.arange(3)
    save_file(weights, file, {"format": "pt"})


@pytest.mark.parametrize("part", [UNET, TEXT, "vae/diffusion_pytorch_model.safetensors"])
@pytest.mark.parametrize(
    ("change", "says"),
    [("missing", "lacks 1 weights"), ("shape", r"shape|MISMATCH"), ("layer", "layers that the config.json")],
)
def test_every_weight_is_filled_or_the_load_is_refused(copy: Path, part: str, change: str, says: str) -> None:
    edited(copy / part, change)
    with pytest.raises(ValueError, match=says):
        load_pipeline(Model(path=str(copy)))


def test_a_key_that_nothing_uses_is_named(copy: Path, caplog: Any, tmp_path: Path) -> None:
    edited(copy / TEXT, "extra")
    with caplog.at_level(logging.WARNING):
        load_pipeline(Model(path=str(copy)))
    assert "1 weights of its files are of no use to CLIPTextModel: logit_bias" in caplog.text
    save_file({"a": torch.ones(2)}, tmp_path / "model.fp16.safetensors")
    assert "only the variant fp16" in (weights_problem(tmp_path) or "")
    assert weights_problem(tmp_path, "fp16") is None


def test_a_component_is_left_out_by_a_key(tmp_path: Path) -> None:
    """SD3 without its T5."""
    FAMILIES["sd3"]().pipe.save_pretrained(tmp_path / "sd3")
    index = json.loads((tmp_path / "sd3" / "model_index.json").read_text())
    without = [name for name in ("text_encoder_3", "tokenizer_3") if name in index]
    for name in without:
        shutil.rmtree(tmp_path / "sd3" / name, ignore_errors=True)
    pipe = load_pipeline(Model(path=str(tmp_path / "sd3"), without=without))
    assert without and all(pipe.components[name] is None for name in without)
    wrong = folder_problems(Model(path=str(tmp_path / "sd3"), without=["text_encoder_9", "vae"]), tmp_path / "sd3")
    assert any("text_encoder_9, which it has not" in text for text in wrong)
    assert any("vae, which nothing can go without" in text for text in wrong)

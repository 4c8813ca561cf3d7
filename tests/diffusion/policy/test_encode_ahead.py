"""Prompts encoded before training: what is drawn is the same, the encoders are gone, and the disk serves other runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel, SD3Transformer2DModel, WanTransformer3DModel
from torch import Tensor, nn

from genrl.config import LoRA
from genrl.diffusion import train as training
from genrl.diffusion.config.estimate import Component
from genrl.diffusion.config.memory_estimate import _kept_by_blocks
from genrl.diffusion.policy import encode_ahead
from genrl.diffusion.policy.encoding import NotEncoded
from genrl.diffusion.policy.encoding_store import Store
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, NoiseKey
from genrl.diffusion.policy.weights import trainable
from genrl.diffusion.train import encode, open_policy, train
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES
from tests.diffusion.policy.tiers import tiered

AHEAD = {"text_encoders": "encode_then_free"}


def quiet(done: int, count: int) -> None:
    pass


def refuse_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*args: Any) -> None:
        raise AssertionError("a text encoder was loaded")

    monkeypatch.setattr(encode_ahead, "load_components", never)


def drawn_ahead(name: str, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples of these prompts, plain and with encodings made ahead, pairwise."""

    def batch(prompts: list[str]) -> Batch:
        keys: list[NoiseKey] = [("k", k) for k in range(len(prompts))]
        return Batch(prompts, keys, {"num_inference_steps": 2, **FAMILIES[name]().call})

    wanted = Policy(FAMILIES[name]().pipe).roll_out(batch(texts)).final
    pipe: Any = FAMILIES[name]().pipe
    encoders = {part: getattr(pipe, part) for part in encode_ahead.text_encoders(pipe) if getattr(pipe, part)}
    for part in encoders:
        setattr(pipe, part, None)
    policy = Policy(pipe, text_encoders="encode_then_free")
    with policy.memo.present(encoders):
        for text in texts:
            policy.calls.encode(batch([texts[0], text]))
    assert policy.memo.encoders == []
    return wanted, policy.roll_out(batch(texts)).final


@pytest.mark.parametrize(
    "name", tiered("sd15 sdxl flux flux2 lumina2 sana z_image wan22 ltx".split(), ("sdxl", "flux", "z_image"))
)
def test_samples_are_the_same(name: str) -> None:
    wanted, found = drawn_ahead(name, ["a red star", "two blue dogs in a large garden", "a red star"])
    assert torch.equal(wanted, found)


@pytest.mark.parametrize("name", tiered(["cogview4", "qwen_image"]))
def test_encodings_of_unequal_length_cannot_be_made_ahead(name: str) -> None:
    with pytest.raises(ValueError, match=r"model.offload.text_encoders: .* to different lengths.*write between"):
        drawn_ahead(name, ["a red star", "two blue dogs in a large garden"])


def test_the_encoders_alone_are_placed_and_gone(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is one device here: what is asked to move to it, in order."""
    moved: list[str] = []
    to = nn.Module.to

    def watched(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        moved.append(type(self).__name__)
        return to(self, *args, **kwargs)

    load = encode_ahead.load_components

    def loaded(*args: Any) -> dict[str, nn.Module]:
        found = load(*args)
        monkeypatch.setattr(nn.Module, "to", watched)
        return found

    monkeypatch.setattr(encode_ahead, "load_components", loaded)
    policy = open_policy(runs.config(folder, model, model={"offload": AHEAD}), "cpu")
    assert moved == ["CLIPTextModelWithProjection", "CLIPTextModelWithProjection", "T5EncoderModel"]
    assert [policy.pipe.components[f"text_encoder{n}"] for n in ("", "_2", "_3")] == [None, None, None]
    with pytest.raises(NotEncoded, match=r"model.offload.text_encoders: .*'another prompt'.*write between"):
        policy.pipe.encode_prompt(["another prompt"], ["another prompt"], ["another prompt"])


def test_a_full_folder_needs_no_text_encoder(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`genrl encode`, then a run that does not load them and draws the same; with guidance in evaluation alone."""
    common = {"evaluation": {"every": 2, "num_prompts": 2, "guidance_scale": 3.0}}
    plain = train(runs.config(folder, model, **common))
    kept = {"offload": AHEAD, "encodings": str(folder / "encodings")}
    config = runs.config(folder, model, **common, model=kept, output=str(folder / "other"))
    count, new, written = encode(config, "cpu", quiet)
    assert (count, new) == (6, 6) and written > 0  # 4 prompts to train on, 2 held-out ones
    assert encode(config, "cpu", quiet) == (6, 0, 0)
    refuse_loading(monkeypatch)
    assert runs.differences(plain, train(config)) == []


def test_the_folder_tells_models_apart(folder: Path, model: Path) -> None:
    """Other precision, other encodings; and a prompt more is encoded alone."""
    kept = {"encodings": str(folder / "encodings")}
    assert encode(runs.config(folder, model, model=kept), "cpu", quiet)[1] == 6
    assert encode(runs.config(folder, model, model={**kept, "dtype": "bfloat16"}), "cpu", quiet)[1] == 6
    assert encode(runs.config(folder, model, model={**kept, "quantize": "int8"}), "cpu", quiet)[1] == 6
    (folder / "eval.txt").write_text("three stars\na yellow dog\nsix cats")
    more = runs.config(folder, model, model=kept, evaluation={"every": 2, "num_prompts": 3})
    assert encode(more, "cpu", quiet)[:2] == (7, 1)


def test_the_store_is_bounded_and_survives_damage(tmp_path: Path) -> None:
    value = (torch.arange(1000.0), None, [torch.ones(2, 3, dtype=torch.bfloat16), "text"], 3)
    size = 5_000
    store = Store(tmp_path, "identity", 5 * size)
    assert store.read(store.name(("a", 1))) is None
    store.write(store.name(("a", 1)), value)
    found = Store(tmp_path, "identity", 5 * size).read(store.name(("a", 1)))
    assert found is not None and torch.equal(found[0][0], value[0]) and torch.equal(found[0][2][0], value[2][0])
    assert found[0][1] is None and found[0][2][1] == "text" and found[0][3] == 3
    assert Store(tmp_path, "another", 5 * size).read(Store(tmp_path, "another", 5 * size).name(("a", 1))) is None
    (file,) = tmp_path.glob("*/*.safetensors")
    file.write_bytes(file.read_bytes()[:100])
    assert store.read(store.name(("a", 1))) is None and not file.exists()
    for k in range(20):  # of five processes
        Store(tmp_path, "identity", 5 * size).write(store.name(("b", k)), value)
        assert store.read(store.name(("b", 0))) is not None  # used at every step, so never the oldest
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*.safetensors")) <= 5 * size
    assert store.read(store.name(("b", 1))) is None and store.read(store.name(("b", 19))) is not None
    with pytest.raises(ValueError, match=r"model.encodings: the encodings of this run alone take more"):
        for k in range(10):
            store.write(store.name(("c", k)), value)
    with pytest.raises(ValueError, match=r"model.encodings: an encoding holds a set"):
        store.write("x", {1})


def test_refused_where_prompts_cannot_be_known(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"model.encodings: no folder is named"):
        encode(runs.config(folder, model), "cpu", quiet)
    monkeypatch.setattr(encode_ahead.os, "sysconf", lambda name: 10)
    with pytest.raises(ValueError, match=r"model.encodings: 6 encodings take about .* half of this machine's memory"):
        training.open_policy(runs.config(folder, model, model={"offload": AHEAD}), "cpu")


# -- The table of the memory estimate, against what blocks of denoisers keep for the backward pass


WIDTH, TEXT = 512, 77
ROTATED = {"attention_head_dim": 128, "num_attention_heads": 4}
PICTURE = torch.randn(1, 256, 64)
STATES = torch.randn(1, TEXT, 64)
POOLED = torch.randn(1, 64)


def sd3(**settings: Any) -> tuple[nn.Module, Callable[..., Any]]:
    model = SD3Transformer2DModel(
        sample_size=32, num_layers=2, attention_head_dim=64, num_attention_heads=8, joint_attention_dim=64,
        caption_projection_dim=WIDTH, pooled_projection_dim=64, **settings,
    )  # fmt: skip
    picture = torch.randn(1, 16, 32, 32)
    return model, lambda to: model(to(picture), to(STATES), to(POOLED), torch.tensor([500.0]))


def flux() -> tuple[nn.Module, Callable[..., Any]]:
    model = FluxTransformer2DModel(
        num_layers=1, num_single_layers=2, joint_attention_dim=64, pooled_projection_dim=64, guidance_embeds=True,
        **ROTATED,
    )  # fmt: skip
    return model, lambda to: model(
        to(PICTURE), to(STATES), to(POOLED), to(torch.tensor([0.5])), torch.zeros(256, 3), torch.zeros(TEXT, 3),
        guidance=torch.tensor([3.5]),
    )  # fmt: skip


def qwen_image() -> tuple[nn.Module, Callable[..., Any]]:
    model = QwenImageTransformer2DModel(num_layers=2, joint_attention_dim=64, **ROTATED)
    mask = torch.ones(1, TEXT, dtype=torch.long)
    return model, lambda to: model(
        to(PICTURE), to(STATES), mask, to(torch.tensor([0.5])), img_shapes=[[(1, 16, 16)]]
    )  # fmt: skip


def wan() -> tuple[nn.Module, Callable[..., Any]]:
    model = WanTransformer3DModel(num_layers=2, text_dim=64, freq_dim=64, ffn_dim=2973, **ROTATED)  # as 8960 of 1536
    video = torch.randn(1, 16, 3, 32, 32)
    return model, lambda to: model(to(video), torch.tensor([500.0]), to(STATES[:, :8]))


MODELS = {
    "SD3": (sd3, 256 + TEXT),
    "SD3.5": (lambda: sd3(qk_norm="rms_norm"), 256 + TEXT),
    "SD3.5, dual": (lambda: sd3(qk_norm="rms_norm", dual_attention_layers=(0,)), 256 + TEXT),
    "FLUX.1": (flux, 256 + TEXT),
    "Qwen-Image": (qwen_image, 256 + TEXT),
    "Wan": (wan, 3 * 256),
}
"""Name -> model of the published proportions, and tokens that run through its blocks."""


@pytest.mark.parametrize(("name", "way"), [*((name, "whole") for name in MODELS), ("SD3", "lora"), ("FLUX.1", "half")])
def test_what_blocks_keep(name: str, way: str) -> None:
    make, tokens = MODELS[name]
    model, call = make()
    dtype = torch.bfloat16 if way == "half" else torch.float32
    model.to(dtype).requires_grad_(False)
    trainable({"transformer": model}, None if way == "whole" else LoRA())
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        call(lambda tensor: tensor.to(dtype))
    found = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)
    settings = dict(model.config)
    layers = settings["num_layers"] + settings.get("num_single_layers", 0)
    component = Component("transformer", type(model).__name__, 0, 0, {}, settings)
    estimate = getattr(_kept_by_blocks(component, layers, 256 / tokens if "SD3" in name else 1.0), way)
    assert found / (tokens * layers * WIDTH) == pytest.approx(estimate, rel=0.12)

"""Model calls against hand counts, sizes against files, kept memory against what blocks really keep."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel, SD3Transformer2DModel, WanTransformer3DModel
from safetensors.numpy import save_file
from torch import Tensor

from genrl.config import LoRA, load
from genrl.diffusion.config.estimate import Component, plan, read_components, read_header, trained_parameters
from genrl.diffusion.config.memory_estimate import _kept_by_blocks, memory
from genrl.diffusion.config.schema import Config
from genrl.diffusion.policy.adapters import trainable
from tests.diffusion import runs

FLOW_GRPO = {"algorithm": "flow_grpo"}
TREE_RPO = {"algorithm": "dynamic_tree_rpo", "tree": {"ways": 4}}


def config(**sections: Any) -> Config:
    of_sampling = {"prompts_per_iteration": 3, "group_size": 4, "batch_size": 4, "num_inference_steps": 5}
    sampling = {**of_sampling, "guidance_scale": 1.0, **sections.pop("sampling", {})}
    evaluation = {"every": 4, "num_prompts": 6, **sections.pop("evaluation", {})}
    prompts = {"train": "a.txt", "eval": "b.txt"}
    return runs.unloaded(prompts=prompts, sampling=sampling, evaluation=evaluation, **{"iterations": 10, **sections})


@pytest.mark.parametrize(
    ("sections", "sample", "train", "backward"),
    [
        ("", 60, 48, 48),  # 12 samples x 5 steps; x 4 trained steps
        ("sampling: {guidance_scale: 4.0}", 120, 96, 96),
        ("trainer: {algorithm: flow_grpo, kl_weight: 0.1}", 60, 96, 48),
        ("trainer: {algorithm: flow_grpo, keep_graph: true}", 60, 0, 48),
        ("trainer: {algorithm: flow_grpo, keep_graph: true, kl_weight: 0.1}", 60, 48, 48),  # the reference's
        ("trainer: {algorithm: flow_grpo, window: {size: 2}}", 60, 24, 24),
        ("trainer: {algorithm: flow_grpo, guidance_in_training: false}, sampling: {guidance_scale: 4.0}", 120, 96, 48),
        ("trainer: {algorithm: grpo_guard, updates_per_iteration: 3}", 60, 80, 48),  # means of two thirds
        ("trainer: {algorithm: prdp, kernel: flow_sde, inner_epochs: 2}", 60, 192, 96),
        ("trainer: {algorithm: diffusion_nft}", 60, 144, 48),
        # the policy, the reference, the slow copy; at 6 levels; the old one for two thirds
        ("trainer: {algorithm: awm, updates_per_iteration: 3}", 60, 264, 72),
        ("trainer: {algorithm: awm, kl_weight: 0, ema_kl_weight: 0}", 60, 72, 72),
        ("trainer: {algorithm: dgpo, first_steps: 5}, sampling: {guidance_scale: 4.0}", 120, 144, 48),
        ("trainer: {algorithm: crd, kl_weight: 0, timesteps_per_sample: 2}", 60, 48, 24),
        ("trainer: {algorithm: dpo, timesteps_per_sample: 3}", 60, 36, 18),  # 3 pairs
        ("trainer: {algorithm: dpo_offline}, sampling: {prompts_per_iteration: 6, group_size: 2}", 0, 24, 12),
        ("trainer: {algorithm: d3po}", 60, 96, 48),
        ("trainer: {algorithm: draft, steps: 3}, sampling: {guidance_scale: 4.0}", 120, 144, 72),
        ("trainer: {algorithm: draft, truncation: alignprop, steps: 2}", 60, 30, 18),  # 1 or 4 calls
        ("trainer: {algorithm: draft, truncation: refl, steps: 3}", 48, 12, 12),  # 3, 4 or 5 steps drawn
        # the assistant's two steps, its score, the teacher's two, the generator
        ("trainer: {algorithm: diff_instruct, assistant_steps: 2}, sampling: {num_inference_steps: 1}", 12, 72, 72),
        ("trainer: {algorithm: diff_instruct, guidance_scale: 1}, sampling: {num_inference_steps: 1}", 12, 48, 48),
        ("trainer: {algorithm: diffusion_nft, timesteps_per_sample: 2}", 60, 72, 24),
        ("trainer: {algorithm: diffusion_nft, old_policy_decay: none, kl_weight: 0}", 60, 48, 48),
        ("sampling: {pipeline_args: {true_cfg_scale: 4.0, negative_prompt: ' '}}", 120, 96, 96),
        ("sampling: {pipeline_args: {true_cfg_scale: 4.0}, guidance_scale: null}", 60, 48, 48),
    ],
)
def test_model_calls(sections: str, sample: int, train: int, backward: int) -> None:
    result = plan(config(**yaml.safe_load(f"{{{sections}}}")))
    assert (result.sample_calls, result.train_calls, result.backward_calls) == (sample, train, backward)
    assert (result.images, result.micro_batches) == (12, 3)


WINDOW = {"size": 2, "high": 4}


@pytest.mark.parametrize(
    ("trainer", "sample", "train"),
    [
        # one tree: 0, 1, 2 shared steps by place, the split's own call, then 4 chains
        ({"window": WINDOW, "tree": {"ways": 4}}, (17 + 14 + 11) / 3, 5),
        # places 0, 1, 2 with likelihood 4 : 2 : 1
        ({"window": {**WINDOW, "schedule": "geometric"}, "tree": {"ways": 4}}, (4 * 17 + 2 * 14 + 11) / 7, 5),
        ({"tree": {"ways": 2, "at": [0]}}, 2 * (1 + 2 * 4), 2 * (1 + 2 * 3)),  # two roots, all steps but the last
        # without the pruned depths 3 and 4 (steps 2, 3)
        ({"tree": {"ways": 2, "at": [0, 3], "prune": {"depths": [3, 4]}}}, 11, 3),
        # 2 trained steps, and ceil(0.5 x 3) = 2 of the solver
        ({"window": {**WINDOW, "high": 2}, "tail_ratio": 0.5}, 4 * (2 + 2), 8),
        # the last 1, then 2 of steps 0..3 are the window: 5 iterations each
        ({"window": {**WINDOW, "schedule": "backward", "shortest": 1}, "tree": {"ways": 4}}, (8 + 11) / 2, (1 + 5) / 2),
        ({**TREE_RPO, "window": {**WINDOW, "low": 2}}, 11, 5 + 2),
        ({**TREE_RPO, "window": {**WINDOW, "low": 2}, "layer_tuning": {"target": "best_image"}}, 11, 5),
        ({"window": {**WINDOW, "low": 2}, "tree": {"ways": 4}, "kl_weight": 0.1, "inner_epochs": 2}, 11, 2 * 2 * 5),
    ],
)
def test_model_calls_of_windows_and_trees(trainer: dict[str, Any], sample: float, train: float) -> None:
    """By hand, for one of three prompts, averaged over 10 iterations; as runs have them: test_trees."""
    result = plan(config(trainer={**FLOW_GRPO, **trainer}))
    assert result.sample_calls == pytest.approx(3 * sample)
    assert result.train_calls == pytest.approx(3 * train)
    assert result.total_calls(10) == round(30 * (sample + train)) + result.evaluations * result.evaluation_calls


def test_whole_run() -> None:
    result = plan(config(trainer={**FLOW_GRPO, "updates_per_iteration": 3, "inner_epochs": 2}))
    assert result.optimizer_steps == 60
    assert result.evaluations == 4  # before the first iteration, after 4 and 8, and at the end
    assert result.evaluation_calls == 30
    assert result.total_calls(10) == 10 * (60 + 96) + 4 * 30
    assert plan(config(evaluation={"every": 0})).evaluations == 0
    assert plan(config(evaluation={"num_inference_steps": 9, "guidance_scale": 2.0})).evaluation_calls == 6 * 9 * 2
    flux = Component("transformer", "FluxTransformer2DModel", 1, 4, {}, {"guidance_embeds": True})
    embedded = config(sampling={"guidance_scale": 3.5})  # an input of the model: one call
    assert plan(embedded, (flux,)).sample_calls == 60 and plan(embedded).sample_calls == 120
    tree = {**TREE_RPO, "window": {**WINDOW, "low": 2}}
    for judged, train, backward in ((True, 42, 30), (False, 36, 15)):  # learned, judged, and the best path
        trainer = {**tree, "guidance_in_training": judged}
        guided = plan(config(trainer=trainer, sampling={"guidance_scale": 4.0}))
        assert (guided.sample_calls, guided.train_calls, guided.backward_calls) == (66, train, backward)


def write_pipeline(folder: Path) -> None:
    """A pipeline folder with a transformer in two shards (and a variant), a VAE, and a component without weights."""
    parts = {"transformer": ["diffusers", "SD3Transformer2DModel"], "vae": ["diffusers", "AutoencoderKL"],
             "scheduler": ["diffusers", "DDIMScheduler"], "unet": [None, None]}  # fmt: skip
    for name in ("transformer", "vae", "scheduler"):
        (folder / name).mkdir(parents=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "X", **parts}))
    settings = {"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 8, "patch_size": 2, "sample_size": 16}
    (folder / "transformer" / "config.json").write_text(json.dumps(settings))
    (folder / "vae" / "config.json").write_text(json.dumps({"block_out_channels": [1, 2, 3]}))
    q, to_out = "blocks.0.attn.to_q", "blocks.0.attn.to_out.0.weight"
    first = {f"{q}.weight": np.zeros((32, 16), np.float32), f"{q}.bias": np.zeros(32, np.float32)}
    second = {to_out: np.zeros((32, 32), np.float16), "blocks.0.ff.weight": np.zeros((8, 8), np.float32)}
    file = folder / "transformer" / "diffusion_pytorch_model"
    save_file(first, f"{file}-00001-of-00002.safetensors", {"format": "pt"})
    save_file(second, f"{file}-00002-of-00002.safetensors")
    save_file({"x": np.zeros((3, 3), np.float16)}, f"{file}.fp16.safetensors")
    save_file({"conv": np.zeros((2, 3, 1, 1), np.float32)}, folder / "vae" / "diffusion_pytorch_model.safetensors")


def test_components_are_read_from_headers(tmp_path: Path) -> None:
    write_pipeline(tmp_path)
    transformer, vae = read_components(tmp_path)
    assert (transformer.name, transformer.kind) == ("transformer", "SD3Transformer2DModel")
    assert transformer.num_parameters == 32 * 16 + 32 + 32 * 32 + 64
    assert transformer.num_file_bytes == 4 * (32 * 16 + 32 + 64) + 2 * 32 * 32
    assert (vae.num_parameters, vae.note) == (6, "")
    assert read_components(tmp_path, "fp16")[0].num_parameters == 9
    assert read_components(tmp_path / "absent") == ()
    (tmp_path / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"broken")
    vae = read_components(tmp_path)[1]
    assert vae.note == "diffusion_pytorch_model.safetensors: not a safetensors file" and vae.num_parameters == 0


def test_memory_parts(tmp_path: Path) -> None:
    write_pipeline(tmp_path)
    components = read_components(tmp_path)
    with_lora = config(model={"lora": {"rank": 2}, "dtype": "bfloat16"})
    adapters, size = 2 * (32 + 16) + 2 * (32 + 32), components[0].num_parameters
    assert trained_parameters(with_lora, components) == adapters
    parts = dict(memory(with_lora, components))
    assert parts["adapters"] == parts["gradients (float32)"] == parts["average (ema)"] == 4 * adapters
    assert parts["optimiser state (adamw)"] == 8 * adapters
    assert parts["copy to undo an iteration"] == (4 + 8 + 4) * adapters
    assert parts["weights of transformer"] == 2 * size and "reference" not in parts
    lion = dict(memory(config(model={"lora": {"rank": 2}}, optimizer={"name": "lion"}), components))
    assert lion["optimiser state (lion)"] == 4 * adapters
    assert lion["copy to undo an iteration"] == (4 + 4 + 4) * adapters
    of_model = {"lora": None, "dtype": "bfloat16", "autocast": "bfloat16"}
    full = config(model=of_model, trainer={"algorithm": "diffusion_nft"}, ema=None)
    parts = dict(memory(full, components))
    assert trained_parameters(full, components) == size
    assert parts["weights of transformer"] == parts["old policy"] == parts["reference"] == 4 * size
    assert "average (ema)" not in parts and parts["weights of vae"] == 12


def test_activations_scale_with_tokens_batch_and_layers(tmp_path: Path) -> None:
    """What is kept of sampling is of the iteration that keeps most, not of the mean: where the judge has its turns, or
    depths are pruned for some of the iterations."""
    write_pipeline(tmp_path)
    components = read_components(tmp_path)
    key = "activations of one micro-batch (rough)"

    def size(**sampling: Any) -> int:
        return dict(memory(config(sampling=sampling), components))[key]

    small = size(height=32, width=32)  # VAE scale 4, patch 2: 4 x 4 tokens
    # batch, tokens, layers, width x bytes kept by SD3's blocks and the rank of one adapter
    assert small == 4 * 16 * 2 * (32 * 48 + 32 * 4)
    assert size(height=64, width=32) == 2 * small and size(height=32, width=32, batch_size=2) == small // 2
    assert size(height=32, width=32, guidance_scale=4.0) == 2 * small
    assert size() == size(height=64, width=64)  # the model's own size: 16 latents of 4 pixels
    checkpointed = config(model={"gradient_checkpointing": True}, sampling={"height": 32, "width": 32})
    assert dict(memory(checkpointed, components))[key] < small

    def kept(trainer: dict[str, Any]) -> int:
        result = memory(config(trainer=trainer, sampling={"height": 32, "width": 32}), components)
        return dict(result)["activations kept from sampling (rough)"]

    keeps = {**FLOW_GRPO, "keep_graph": True}
    assert kept(keeps) == 12 * 4 / 4 * small
    adversary = {"references": "pictures", "schedule": "alternate", "every": 2}
    assert kept({**keeps, "algorithm": "adv_grpo", "adversary": adversary}) == kept(keeps)
    tree = {"ways": 2, "at": [0, 3]}
    assert kept({**keeps, "tree": tree}) == 7 * 3 / 4 * small


def test_quantised_and_offloaded_weights(tmp_path: Path) -> None:
    """By hand: a matrix of 64 x 32, a bias of 64, a table of 10 x 32."""
    shapes = {"a.weight": (64, 32), "a.bias": (64,), "embed.weight": (10, 32)}
    transformer = Component("transformer", "X", 2048 + 64 + 320, 0, shapes, {})
    encoder = Component("text_encoder", "Y", 2048 + 64 + 320, 0, shapes, {})
    vae = Component("vae", "Z", 100, 0, {"w": (100,)}, {})

    def parts(**model: Any) -> dict[str, int]:
        return dict(memory(config(model=model), (transformer, encoder, vae)))

    key = "weights of transformer"
    assert parts()[key] == 4 * 2432
    assert parts(quantize="int8")[key] == 2048 + 4 * 64 + 4 * (64 + 320)  # scales are one per row
    assert parts(quantize="int8", dtype="bfloat16")["weights of text_encoder"] == 2048 + 2 * 64 + 2 * (64 + 320)
    assert parts(quantize={"text_encoder": "int8"})[key] == 4 * 2432
    assert parts(quantize="nf4", dtype="bfloat16")[key] == round(2048 * 4.127 / 8) + 2 * (64 + 320)
    between = parts(offload={"text_encoders": "between"})
    assert "weights of text_encoder" not in between
    assert between["text encoders while they encode, beyond that"] == 4 * 2432
    ahead = parts(offload={"text_encoders": "encode_then_free"})
    assert ahead.keys() == {key, "weights of vae"}  # alone on the device they need less than all the rest later
    big = Component("text_encoder", "Y", 5000, 0, {}, {})
    result = dict(memory(config(model={"offload": {"text_encoders": "encode_then_free"}}), (transformer, big, vae)))
    assert sum(result.values()) == 20_000


def test_the_formula_is_what_was_measured(root: Path) -> None:
    """Within 15 %; measured by `python -m benchmarks.memory` on two CPU cores: docs/memory.md."""
    components = read_components(root / "assets" / "tiny-t2i")
    common = ["sampling.batch_size=32", "sampling.num_inference_steps=3", "trainer.window={size: 2, high: 2}"]
    common += ["evaluation.every=0"]
    for changes, measured in (
        ([], 123.3),
        (["model.gradient_checkpointing=true"], 79.5),
        (["model.lora=null", "optimizer.lr=1e-5"], 231.6),
    ):
        result = load(root / "configs" / "flow_grpo.yaml", [*common, *changes])
        assert isinstance(result, Config)
        assert sum(size for _, size in memory(result, components)) / 1e6 == pytest.approx(measured, rel=0.15)


def test_files_that_are_not_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    for raw, says in (
        (b"\x80\x02}q\x00.", "not a safetensors file"),  # a pickle
        (struct.pack("<Q", 4) + b"\xff\xfe\x00\x00", "not JSON"),
        (struct.pack("<Q", 10) + b'{"a": "b"}', "is not a tensor"),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "not JSON"),
    ):
        path.write_bytes(raw)
        with pytest.raises(ValueError, match=says):
            list(read_header(path))


WIDTH, TEXT = 512, 77
ROTATED = {"attention_head_dim": 128, "num_attention_heads": 4}
PICTURE, STATES, POOLED = torch.randn(1, 256, 64), torch.randn(1, TEXT, 64), torch.randn(1, 64)
LATENTS, VIDEO = torch.randn(1, 16, 32, 32), torch.randn(1, 16, 3, 32, 32)
TIME, HALF = torch.tensor([500.0]), torch.tensor([0.5])
SD3 = {
    **{"sample_size": 32, "num_layers": 2, "attention_head_dim": 64, "num_attention_heads": 8},
    **{"joint_attention_dim": 64, "caption_projection_dim": WIDTH, "pooled_projection_dim": 64},
}
FLUX = {"num_layers": 1, "num_single_layers": 2, "joint_attention_dim": 64, "pooled_projection_dim": 64}
FLUX_PLACES = {"img_ids": torch.zeros(256, 3), "txt_ids": torch.zeros(TEXT, 3), "guidance": torch.tensor([3.5])}
QWEN = {"num_layers": 2, "joint_attention_dim": 64}
WAN = {"num_layers": 2, "text_dim": 64, "freq_dim": 64, "ffn_dim": 2973}  # as 8960 of 1536


OF_SD3, OF_FLUX = (LATENTS, STATES, POOLED, TIME), (PICTURE, STATES, POOLED, HALF)
OF_QWEN = (PICTURE, STATES, torch.ones(1, TEXT).long(), HALF)
NORMED = SD3 | {"qk_norm": "rms_norm"}
MODELS: dict[str, tuple[Any, dict[str, Any], tuple[Tensor, ...], dict[str, Any], int]] = {
    "SD3": (SD3Transformer2DModel, SD3, OF_SD3, {}, 256 + TEXT),
    "SD3.5": (SD3Transformer2DModel, NORMED, OF_SD3, {}, 256 + TEXT),
    "SD3.5, dual": (SD3Transformer2DModel, NORMED | {"dual_attention_layers": (0,)}, OF_SD3, {}, 256 + TEXT),
    "FLUX.1": (FluxTransformer2DModel, ROTATED | FLUX | {"guidance_embeds": True}, OF_FLUX, FLUX_PLACES, 256 + TEXT),
    "Qwen-Image": (QwenImageTransformer2DModel, ROTATED | QWEN, OF_QWEN, {"img_shapes": [[(1, 16, 16)]]}, 256 + TEXT),
    "Wan": (WanTransformer3DModel, ROTATED | WAN, (VIDEO, TIME, STATES[:, :8]), {}, 3 * 256),
}
"""Name -> class and sizes in the published proportions, its inputs, and tokens that run through its blocks."""


@pytest.mark.parametrize(("name", "way"), [*((name, "whole") for name in MODELS), ("SD3", "lora"), ("FLUX.1", "half")])
def test_what_blocks_keep(name: str, way: str) -> None:
    kind, sizes, inputs, places, tokens = MODELS[name]
    model = kind(**sizes)
    dtype = torch.bfloat16 if way == "half" else torch.float32
    model.to(dtype).requires_grad_(False)
    trainable({"transformer": model}, None if way == "whole" else LoRA())
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(*(one.to(dtype) if one.is_floating_point() else one for one in inputs), **places)
    result = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in own)
    settings = dict(model.config)
    layers = settings["num_layers"] + settings.get("num_single_layers", 0)
    component = Component("transformer", type(model).__name__, 0, 0, {}, settings)
    estimate = getattr(_kept_by_blocks(component, layers, 256 / tokens if "SD3" in name else 1.0), way)
    assert result / (tokens * layers * WIDTH) == pytest.approx(estimate, rel=0.12)

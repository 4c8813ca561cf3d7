"""Tiny checkpoints in the layout of LeRobot's published ones, written from lists of the published names.

The lists are the check that ours is that layout: names as in lerobot/pi0_base (777 tensors) and pi05_base (812), with
the shapes of their architectures as functions of a few sizes. `{n}` runs over the layers of a stack.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace as Sizes

import torch
from safetensors.torch import save_file
from torch import Tensor

from genrl.vla.policies.policy import ENVIRONMENT, STATE


class Shapes(dict[str, tuple[int, ...]]):
    def affine(self, name: str, *weight: int) -> None:
        """A weight and the bias, or shift, that goes with it."""
        self[f"{name}.weight"], self[f"{name}.bias"] = weight, weight[:1]


WORDS = "Task State Action put the red green blue block in far zone touch : , ; <bos> <unk>".split()
LINES = ["put the red block in the far zone", "touch the blue block", "touch the green block"]

PI_TINY = Sizes(
    vocabulary=290, width=64, layers=4, mlp=128, queries=128, head=16,
    eye=32, eye_layers=2, eye_mlp=64, patch=14, patches=4, expert=64, expert_mlp=128, padded=32,
)  # fmt: skip
PI_REAL = Sizes(
    vocabulary=257152, width=2048, layers=18, mlp=16384, queries=2048, head=256,
    eye=1152, eye_layers=27, eye_mlp=4304, patch=14, patches=256, expert=1024, expert_mlp=4096, padded=32,
)  # fmt: skip


def pi_shapes(s: Sizes, *, adaptive: bool) -> Shapes:
    """Names and shapes of lerobot/pi0_base, or pi05_base."""
    model, expert = "paligemma_with_expert.paligemma.model.", "paligemma_with_expert.gemma_expert."
    found = Shapes({"paligemma_with_expert.paligemma.lm_head.weight": (s.vocabulary, s.width)})
    found.affine(model + "multi_modal_projector.linear", s.width, s.eye)
    found[model + "language_model.norm.weight"] = (s.width,)
    eye_ends(found, model + "vision_tower.vision_model.", s)
    found[expert + "lm_head.weight"] = (s.vocabulary, s.expert)
    found.affine("action_in_proj", s.expert, s.padded)
    found.affine("action_out_proj", s.padded, s.expert)
    eye_layers(found, model + "vision_tower.vision_model.", s)
    norms, expert = ("input_layernorm", "post_attention_layernorm"), expert + "model."
    for stack, width, mlp in ((model + "language_model.", s.width, s.mlp), (expert, s.expert, s.expert_mlp)):
        for n in range(s.layers):
            layer = f"{stack}layers.{n}."
            found |= decoder_shapes(layer, width, mlp, s.queries, s.head)
            if not (adaptive and stack == expert):
                found |= {f"{layer}{norm}.weight": (width,) for norm in norms}
    if adaptive:
        for norm in (*(f"layers.{n}.{norm}" for n in range(s.layers) for norm in norms), "norm"):
            found.affine(f"{expert}{norm}.dense", 3 * s.expert, s.expert)
        times = {"time_mlp_in": s.expert, "time_mlp_out": s.expert}
    else:
        found[expert + "norm.weight"] = (s.expert,)
        found.affine("state_proj", s.expert, s.padded)
        times = {"action_time_mlp_in": 2 * s.expert, "action_time_mlp_out": s.expert}
    for name, wide in times.items():
        found.affine(name, s.expert, wide)
    return found


SMOL_TINY = Sizes(
    vocabulary=290, width=64, layers=4, mlp=96, queries=64, head=32, size=16, eye=32, eye_layers=2, eye_mlp=64,
    patch=16, patches=4, shuffled=128, expert=48, expert_mlp=256, padded=32,
    heads=4, key_heads=2, eye_heads=4, picture=32, all_layers=8,
)  # fmt: skip
SMOL_REAL = Sizes(
    vocabulary=49280, width=960, layers=16, mlp=2560, queries=960, head=320, size=64, eye=768, eye_layers=12,
    eye_mlp=3072, patch=16, patches=1024, shuffled=12288, expert=720, expert_mlp=2048, padded=32,
    heads=15, key_heads=5, eye_heads=12, picture=512, all_layers=32,
)  # fmt: skip


def smol_shapes(s: Sizes) -> Shapes:
    """Names and shapes of lerobot/smolvla_base."""
    model, expert = "model.vlm_with_expert.vlm.model.", "model.vlm_with_expert.lm_expert."
    found = Shapes({"model.vlm_with_expert.vlm.lm_head.weight": (s.vocabulary, s.width)})
    found[model + "text_model.embed_tokens.weight"] = (s.vocabulary, s.width)
    found[model + "text_model.norm.weight"] = (s.width,)
    found[model + "connector.modality_projection.proj.weight"] = (s.width, s.shuffled)
    eye_ends(found, model + "vision_model.", s)
    found[expert + "norm.weight"] = (s.expert,)
    for name, rows, columns in (
        ("state_proj", s.width, s.padded),
        ("action_in_proj", s.expert, s.padded),
        ("action_out_proj", s.padded, s.expert),
        ("action_time_mlp_in", s.expert, 2 * s.expert),
        ("action_time_mlp_out", s.expert, s.expert),
    ):
        found.affine(f"model.{name}", rows, columns)
    eye_layers(found, model + "vision_model.", s)
    for stack, width, mlp in ((model + "text_model.", s.width, s.mlp), (expert, s.expert, s.expert_mlp)):
        for n in range(s.layers):
            layer = f"{stack}layers.{n}."
            found |= decoder_shapes(layer, width, mlp, s.queries, s.head)
            found |= {f"{layer}{norm}_layernorm.weight": (width,) for norm in ("input", "post_attention")}
            if stack == expert and n % 2:
                found |= {f"{layer}self_attn.{part}_proj.weight": (s.head, s.head) for part in "kv"}
    return found


def eye_ends(found: Shapes, eye: str, s: Sizes) -> None:
    found.affine(eye + "embeddings.patch_embedding", s.eye, 3, s.patch, s.patch)
    found[eye + "embeddings.position_embedding.weight"] = (s.patches, s.eye)
    found.affine(eye + "post_layernorm", s.eye)


def eye_layers(found: Shapes, eye: str, s: Sizes) -> None:
    for layer in (f"{eye}encoder.layers.{n}." for n in range(s.eye_layers)):
        for norm in ("layer_norm1", "layer_norm2"):
            found.affine(layer + norm, s.eye)
        for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
            found.affine(f"{layer}self_attn.{projection}", s.eye, s.eye)
        found.affine(layer + "mlp.fc1", s.eye_mlp, s.eye)
        found.affine(layer + "mlp.fc2", s.eye, s.eye_mlp)


def decoder_shapes(layer: str, width: int, mlp: int, queries: int, keys: int) -> dict[str, tuple[int, ...]]:
    """The matrices of a Gemma's or Llama's layer."""
    attention = {"q": (queries, width), "k": (keys, width), "v": (keys, width), "o": (width, queries)}
    projections = {"gate": (mlp, width), "up": (mlp, width), "down": (width, mlp)}
    found = {f"{layer}self_attn.{name}_proj.weight": shape for name, shape in attention.items()}
    return found | {f"{layer}mlp.{name}_proj.weight": shape for name, shape in projections.items()}


def random_weights(shapes: Shapes, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Numbers that keep activations near 1 and leave nothing without effect."""
    rng = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes.items():
        fan = max(1, torch.Size(shape[1:]).numel())
        scale = 0.2 if len(shape) == 1 else fan**-0.5
        found[name] = (torch.randn(shape, generator=rng) * scale).to(dtype)
    return found


def write_tokenizer(folder: Path) -> None:
    """Words and the numbers -1 to 255, <pad> 0, <bos> in front."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", *WORDS, *(str(n) for n in range(-1, 256))]
    inner = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(pattern=r":", behavior="isolated"),
         pre_tokenizers.Split(pattern=",", behavior="isolated"), pre_tokenizers.Split(pattern=";", behavior="isolated")]
    )  # fmt: skip
    begin = [("<bos>", names.index("<bos>"))]
    inner.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=begin)
    outer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", unk_token="<unk>")
    outer.save_pretrained(folder / "tokenizer")


def write_folder(
    folder: Path,
    config: dict,
    weights: dict[str, Tensor],
    steps: list[dict],
    stats: dict[str, Tensor],
    metadata: dict[str, str] | None = None,
    *,
    normal_first: bool = False,
) -> None:
    """config.json, model.safetensors, both processors with statistics, as LeRobot saves them; normal_first: numbers are
    normalised before `steps`, as the prompt of pi0.5 needs them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=4))
    save_file(weights, folder / "model.safetensors", metadata=metadata)
    features = config["input_features"] | config["output_features"]
    how = {"eps": 1e-8, "features": features, "norm_map": config["normalization_mapping"]}
    before = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        *steps,
        {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}},
    ]
    before.insert(2 if normal_first else len(before), {"registry_name": "normalizer_processor", "config": how})
    after = [
        {"registry_name": "unnormalizer_processor", "config": how},
        {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}},
    ]
    for name, pipeline in (("policy_preprocessor", before), ("policy_postprocessor", after)):
        for place, step in enumerate(pipeline):
            if "normalizer" in step["registry_name"]:
                step["state_file"] = f"{name}_step_{place}_{step['registry_name']}.safetensors"
                save_file(stats, folder / step["state_file"])
        (folder / f"{name}.json").write_text(json.dumps({"name": name, "steps": pipeline}, indent=2))


def statistics_of(widths: dict[str, int], seed: int = 1) -> dict[str, Tensor]:
    """Some of every kind, by feature."""
    rng = torch.Generator().manual_seed(seed)
    found = {}
    for name, width in widths.items():
        low = -1.0 - torch.rand(width, generator=rng)
        high = 1.0 + torch.rand(width, generator=rng)
        found |= {f"{name}.min": low - 0.5, f"{name}.q01": low, f"{name}.q10": low + 0.3}
        found |= {f"{name}.max": high + 0.5, f"{name}.q99": high, f"{name}.q90": high - 0.3}
        found |= {f"{name}.mean": (low + high) / 2, f"{name}.std": (high - low) / 3}
        found[f"{name}.count"] = torch.tensor([100.0])
    return found


def pi_folder(
    folder: Path,
    *,
    adaptive: bool = False,
    prefix: str = "",
    dtype: torch.dtype = torch.float32,
    weights: dict[str, Tensor] | None = None,
    **settings,
) -> dict[str, Tensor]:
    """A tiny pi0 or pi0.5 with two cameras and an empty one; the weights by bare published name."""
    mode = "QUANTILES" if adaptive else "MEAN_STD"
    picture, cameras = {"type": "VISUAL", "shape": [3, 24, 32]}, ("base_0_rgb", "left_wrist_0_rgb", "empty_camera_0")
    config = {
        "type": "pi05" if adaptive else "pi0",
        "input_features": {f"observation.images.{camera}": picture for camera in cameras}
        | {"observation.state": {"type": "STATE", "shape": [5]}},
        "output_features": {"action": {"type": "ACTION", "shape": [3]}},
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}, "paligemma_variant": "dummy",
        "action_expert_variant": "dummy", "chunk_size": 6, "n_action_steps": 4, "max_state_dim": 32,
        "max_action_dim": 32, "num_inference_steps": 10, "image_resolution": [28, 28], "empty_cameras": 1,
        "tokenizer_max_length": 60 if adaptive else 12, "dtype": "float32", "freeze_vision_encoder": False,
        "train_expert_only": True,
    } | settings  # fmt: skip
    tokenizer = {
        "max_length": config["tokenizer_max_length"], "task_key": "task", "padding_side": "right",
        "padding": "max_length", "truncation": True, "tokenizer_name": "google/paligemma-3b-pt-224",
    }  # fmt: skip
    prompt = "pi05_prepare_state_tokenizer_processor_step" if adaptive else "pi0_new_line_processor"
    steps = [
        {"registry_name": prompt, "config": {}},
        {"registry_name": "relative_actions_processor", "config": {"enabled": False, "exclude_joints": []}},
        {"registry_name": "tokenizer_processor", "config": tokenizer},
    ]
    weights = weights or random_weights(pi_shapes(PI_TINY, adaptive=adaptive), dtype=dtype)
    tied = "paligemma_with_expert.paligemma."
    metadata = {"format": "pt", f"{tied}model.language_model.embed_tokens.weight": f"{tied}lm_head.weight"}
    stats = statistics_of({"observation.state": 5, "action": 3})
    named = {prefix + key: value for key, value in weights.items()}
    write_folder(folder, config, named, steps, stats, metadata, normal_first=adaptive)
    write_tokenizer(folder)
    return weights


def pi_observation(batch: int = 3, seed: int = 2) -> dict[str, Tensor]:
    """Without the instruction's tokens."""
    rng = torch.Generator().manual_seed(seed)
    pictures = torch.randint(0, 256, (2, batch, 24, 32, 3), generator=rng, dtype=torch.uint8)
    return {
        "observation.images.base_0_rgb": pictures[0],
        "observation.images.left_wrist_0_rgb": pictures[1],
        "observation.state": torch.randn(batch, 5, generator=rng),
    }


def smol_folder(
    folder: Path,
    *,
    s: Sizes = SMOL_TINY,
    dtype: torch.dtype = torch.float32,
    weights: dict[str, Tensor] | None = None,
    **settings,
) -> dict[str, Tensor]:
    """A SmolVLA with two cameras, its backbone's description in vlm/; the weights by published name."""
    picture = {"type": "VISUAL", "shape": [3, 24, 32]}
    config = {
        "type": "smolvla",
        "input_features": {"observation.state": {"type": "STATE", "shape": [5]}}
        | {f"observation.images.{camera}": picture for camera in ("base_0_rgb", "left_wrist_0_rgb")},
        "output_features": {"action": {"type": "ACTION", "shape": [3]}},
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}, "chunk_size": 6,
        "n_action_steps": 4, "max_state_dim": 32, "max_action_dim": 32,
        "resize_imgs_with_padding": [s.picture, s.picture], "tokenizer_max_length": 12, "num_steps": 10,
        "vlm_model_name": "vlm", "num_vlm_layers": s.layers, "num_expert_layers": 0, "self_attn_every_n_layers": 2,
        "expert_width_multiplier": 0.75, "attention_mode": "cross_attn", "add_image_special_tokens": False,
        "freeze_vision_encoder": True, "train_expert_only": True, "train_state_proj": True,
    } | settings  # fmt: skip
    text = {"model_type": "llama", "hidden_size": s.width, "intermediate_size": s.mlp, "rope_theta": 100000.0,
            "num_hidden_layers": s.all_layers, "num_attention_heads": s.heads, "num_key_value_heads": s.key_heads,
            "head_dim": s.size, "rms_norm_eps": 1e-5, "vocab_size": s.vocabulary}  # fmt: skip
    vision = {"model_type": "smolvlm_vision", "hidden_size": s.eye, "intermediate_size": s.eye_mlp,
              "num_hidden_layers": s.eye_layers, "num_attention_heads": s.eye_heads, "patch_size": s.patch,
              "image_size": s.picture}  # fmt: skip
    scale = round((s.shuffled / s.eye) ** 0.5)
    vlm = {"model_type": "smolvlm", "text_config": text, "vision_config": vision, "scale_factor": scale}
    (folder / "vlm").mkdir(parents=True, exist_ok=True)
    (folder / "vlm" / "config.json").write_text(json.dumps(vlm))
    tokenizer = {
        "max_length": 12, "task_key": "task", "padding_side": "right", "padding": "longest", "truncation": True,
        "tokenizer_name": "HuggingFaceTB/SmolVLM2-500M-Video-Instruct",
    }  # fmt: skip
    words = {"registry_name": "tokenizer_processor", "config": tokenizer}
    steps = [{"registry_name": "smolvla_new_line_processor", "config": {}}, words]
    weights = weights or random_weights(smol_shapes(s), dtype=dtype)
    write_folder(folder, config, weights, steps, statistics_of({"observation.state": 5, "action": 3}), {"format": "pt"})
    write_tokenizer(folder)
    return weights


DIFFUSION_TINY = Sizes(dims=(16, 24, 32), kernel=3, time=12, points=4, cell=4, state=5, action=3)
DIFFUSION_REAL = Sizes(dims=(512, 1024, 2048), kernel=5, time=128, points=32, cell=9, state=2, action=2)


def resnet_shapes(found: Shapes, names: tuple[str, str, list[str]], norm: Callable[[str, int], None]) -> None:
    """A ResNet-18; names: of its first convolution, of the norm after it, and of the four stages."""
    first, after, stages = names
    found[f"{first}.weight"], before = (64, 3, 7, 7), 64
    norm(after, 64)
    for stage, width in zip(stages, (64, 128, 256, 512), strict=True):
        for own in (f"{stage}.0.", f"{stage}.1."):
            found[own + "conv1.weight"], found[own + "conv2.weight"] = (width, before, 3, 3), (width, width, 3, 3)
            norm(own + "bn1", width)
            norm(own + "bn2", width)
            if before != width:
                found[own + "downsample.0.weight"] = (width, before, 1, 1)
                norm(own + "downsample.1", width)
            before = width


def diffusion_shapes(s: Sizes, *, cameras: int = 1, separate: bool = False, groups: bool = True) -> Shapes:
    """Names and shapes of lerobot/diffusion_pusht."""
    found = Shapes()

    def norm(name: str, width: int) -> None:
        found.affine(name, width)
        if not groups:
            found.update({f"{name}.running_mean": (width,), f"{name}.running_var": (width,)})
            found[f"{name}.num_batches_tracked"] = ()

    for camera in range(cameras if separate else 1):
        eye = f"diffusion.rgb_encoder.{camera}." if separate else "diffusion.rgb_encoder."
        first, after = eye + "backbone.0", eye + "backbone.1"
        resnet_shapes(found, (first, after, [f"{eye}backbone.{n}" for n in (4, 5, 6, 7)]), norm)
        found[eye + "pool.pos_grid"] = (s.cell, 2)
        found.affine(eye + "pool.nets", s.points, 512, 1, 1)
        found[eye + "out.bias"], found[eye + "out.weight"] = (2 * s.points,), (2 * s.points, 2 * s.points)
    unet = "diffusion.unet."
    condition = s.time + 2 * (s.state + cameras * 2 * s.points)
    found.affine(unet + "diffusion_step_encoder.1", 4 * s.time, s.time)
    found.affine(unet + "diffusion_step_encoder.3", s.time, 4 * s.time)

    def block(name: str, before: int, after: int) -> None:
        found.affine(f"{name}.block.0", after, before, s.kernel)
        found.affine(f"{name}.block.1", after)

    def residual(name: str, before: int, after: int) -> None:
        block(f"{name}.conv1", before, after)
        block(f"{name}.conv2", after, after)
        found.affine(f"{name}.cond_encoder.1", 2 * after, condition)
        if before != after:
            found.affine(f"{name}.residual_conv", after, before, 1)

    last = len(s.dims) - 1
    for stage, (before, after) in enumerate(zip((s.action, *s.dims[:-1]), s.dims, strict=True)):
        residual(f"{unet}down_modules.{stage}.0", before, after)
        residual(f"{unet}down_modules.{stage}.1", after, after)
        if stage < last:
            found.affine(f"{unet}down_modules.{stage}.2", after, after, 3)
    for number in range(2):
        residual(f"{unet}mid_modules.{number}", s.dims[-1], s.dims[-1])
    for stage, number in enumerate(reversed(range(last))):
        shallow, deep = s.dims[number], s.dims[number + 1]
        residual(f"{unet}up_modules.{stage}.0", 2 * deep, shallow)
        residual(f"{unet}up_modules.{stage}.1", shallow, shallow)
        found.affine(f"{unet}up_modules.{stage}.2", shallow, shallow, 4)
    block(f"{unet}final_conv.0", s.dims[0], s.dims[0])
    found.affine(f"{unet}final_conv.1", s.action, s.dims[0], 1)
    return found


def diffusion_folder(
    folder: Path, *, cameras: int = 1, groups: bool = True, state: int = 5, **settings
) -> dict[str, Tensor]:
    """A tiny Diffusion Policy (its ResNet-18 is a real one); the weights by published name."""
    s = Sizes(**vars(DIFFUSION_TINY) | {"state": state})
    names = [f"observation.images.camera{n}" for n in range(cameras)]
    picture = {"type": "VISUAL", "shape": [3, 36, 40]}
    config = {
        "type": "diffusion",
        "input_features": {name: picture for name in names} | {STATE: {"type": "STATE", "shape": [s.state]}},
        "output_features": {"action": {"type": "ACTION", "shape": [s.action]}},
        "normalization_mapping": {"VISUAL": "MEAN_STD", "STATE": "MIN_MAX", "ACTION": "MIN_MAX"}, "n_obs_steps": 2,
        "horizon": 8, "n_action_steps": 4, "vision_backbone": "resnet18", "crop_shape": [34, 36],
        "crop_is_random": True, "pretrained_backbone_weights": None, "use_group_norm": groups,
        "spatial_softmax_num_keypoints": s.points, "use_separate_rgb_encoder_per_camera": False,
        "down_dims": list(s.dims), "kernel_size": s.kernel, "n_groups": 8, "diffusion_step_embed_dim": s.time,
        "use_film_scale_modulation": True, "noise_scheduler_type": "DDPM", "num_train_timesteps": 100,
        "beta_schedule": "squaredcos_cap_v2", "prediction_type": "epsilon", "clip_sample": True,
        "clip_sample_range": 1.0,
    } | settings  # fmt: skip
    separate = config["use_separate_rgb_encoder_per_camera"]
    weights = random_weights(diffusion_shapes(s, cameras=cameras, separate=separate, groups=groups))
    for key in weights:
        if key.endswith("running_var"):
            weights[key] = weights[key].abs() + 0.5
        if key.endswith("pos_grid"):
            weights[key] = torch.tensor([[-1.0, -1.0], [1.0, -1.0], [-1.0, 1.0], [1.0, 1.0]])
        if key.endswith("num_batches_tracked"):
            weights[key] = torch.tensor(7)
        if key.endswith((".bn1.weight", ".bn2.weight", "block.1.weight")):
            weights[key] = weights[key] + 1.0
    write_folder(folder, config, weights, [], statistics_of({STATE: s.state, "action": s.action}) | of_pictures(names))
    return weights


def of_pictures(names: list[str]) -> dict[str, Tensor]:
    mean, std = torch.tensor([[0.4, 0.5, 0.6], [0.2, 0.25, 0.3]])[..., None, None]
    return {f"{name}.{key}": value.clone() for name in names for key, value in (("mean", mean), ("std", std))}


ACT_TINY = Sizes(
    size=32, heads=4, wide=48, encoder=2, decoder=2, vae=2, latent=6, chunk=8, state=5, environment=4, action=3
)
ACT_REAL = Sizes(
    size=512, heads=8, wide=3200, encoder=4, decoder=1, vae=4, latent=32, chunk=100, state=14, environment=0, action=14
)


def act_shapes(s: Sizes, *, cameras: int = 1, use_vae: bool = True, pre_norm: bool = False) -> Shapes:
    """Names and shapes of lerobot/act_aloha_sim_transfer_cube_human."""
    found = Shapes()

    def stack(name: str, layers: int, attentions: tuple[str, ...], *, ends: bool) -> None:
        for layer in (f"model.{name}.layers.{n}." for n in range(layers)):
            for attention in attentions:
                found[f"{layer}{attention}.in_proj_weight"] = (3 * s.size, s.size)
                found[f"{layer}{attention}.in_proj_bias"] = (3 * s.size,)
                found.affine(f"{layer}{attention}.out_proj", s.size, s.size)
            found.affine(layer + "linear1", s.wide, s.size)
            found.affine(layer + "linear2", s.size, s.wide)
            for number in range(1, 2 + len(attentions)):
                found.affine(f"{layer}norm{number}", s.size)
        if ends:
            found.affine(f"model.{name}.norm", s.size)

    if use_vae:
        stack("vae_encoder", s.vae, ("self_attn",), ends=pre_norm)
        found["model.vae_encoder_cls_embed.weight"] = (1, s.size)
        found.affine("model.vae_encoder_robot_state_input_proj", s.size, s.state)
        found.affine("model.vae_encoder_action_input_proj", s.size, s.action)
        found.affine("model.vae_encoder_latent_output_proj", 2 * s.latent, s.size)
        found["model.vae_encoder_pos_enc"] = (1, 2 + s.chunk, s.size)
    stack("encoder", s.encoder, ("self_attn",), ends=pre_norm)
    stack("decoder", s.decoder, ("self_attn", "multihead_attn"), ends=True)
    found.affine("model.encoder_robot_state_input_proj", s.size, s.state)
    if s.environment:
        found.affine("model.encoder_env_state_input_proj", s.size, s.environment)
    found.affine("model.encoder_latent_input_proj", s.size, s.latent)
    found["model.encoder_1d_feature_pos_embed.weight"] = (2 + bool(s.environment), s.size)
    found["model.decoder_pos_embed.weight"] = (s.chunk, s.size)
    found.affine("model.action_head", s.action, s.size)
    if not cameras:
        return found
    found.affine("model.encoder_img_feat_input_proj", s.size, 512, 1, 1)

    def frozen(name: str, width: int) -> None:
        found.update({f"{name}.{part}": (width,) for part in ("weight", "bias", "running_mean", "running_var")})

    eye = "model.backbone."
    resnet_shapes(found, (eye + "conv1", eye + "bn1", [f"{eye}layer{n}" for n in (1, 2, 3, 4)]), frozen)
    return found


def act_folder(
    folder: Path, *, s: Sizes = ACT_TINY, cameras: int = 2, weights: dict[str, Tensor] | None = None, **settings
) -> dict[str, Tensor]:
    """A tiny ACT (its ResNet-18 is a real one) that reads state, environment and pictures; the weights by published
    name."""
    names = [f"observation.images.camera{n}" for n in range(cameras)]
    picture = {"type": "VISUAL", "shape": [3, 36, 40]}
    inputs = {name: picture for name in names} | {STATE: {"type": "STATE", "shape": [s.state]}}
    if s.environment:
        inputs[ENVIRONMENT] = {"type": "ENV", "shape": [s.environment]}
    config = {
        "type": "act", "n_obs_steps": 1, "input_features": inputs,
        "output_features": {"action": {"type": "ACTION", "shape": [s.action]}},
        "normalization_mapping": {"VISUAL": "MEAN_STD", "STATE": "MEAN_STD", "ENV": "MEAN_STD", "ACTION": "MEAN_STD"},
        "chunk_size": s.chunk, "n_action_steps": s.chunk // 2, "vision_backbone": "resnet18",
        "pretrained_backbone_weights": None, "replace_final_stride_with_dilation": 0, "pre_norm": False,
        "dim_model": s.size, "n_heads": s.heads, "dim_feedforward": s.wide, "feedforward_activation": "relu",
        "n_encoder_layers": s.encoder, "n_decoder_layers": s.decoder, "use_vae": True, "latent_dim": s.latent,
        "n_vae_encoder_layers": s.vae, "temporal_ensemble_coeff": None, "dropout": 0.1, "kl_weight": 10.0,
        "optimizer_lr": 1e-5,
    } | settings  # fmt: skip
    shapes = act_shapes(s, cameras=cameras, use_vae=config["use_vae"], pre_norm=config["pre_norm"])
    weights = weights or random_weights(shapes)
    for key in weights:
        if key.endswith("running_var"):
            weights[key] = weights[key].abs() + 0.5
        if key.endswith((".bn1.weight", ".bn2.weight", "downsample.1.weight")) or re.search(r"norm\d?\.weight$", key):
            weights[key] = weights[key] + 1.0
        if key.endswith("pos_embed.weight"):
            weights[key] = weights[key] * s.size**0.5  # places and queries are as far apart as in a new ACT
        if key.endswith("vae_encoder_pos_enc"):
            place = torch.arange(2 + s.chunk, dtype=torch.float64)[:, None]
            angle = place * 10_000.0 ** -(torch.arange(s.size, dtype=torch.float64) // 2 * 2 / s.size)
            weights[key] = torch.where(torch.arange(s.size) % 2 == 0, angle.sin(), angle.cos()).float()[None]
    stats = statistics_of({STATE: s.state, ENVIRONMENT: s.environment, "action": s.action}) | of_pictures(names)
    write_folder(folder, config, weights, [], stats, {"format": "pt"})
    return weights


def act_observation(batch: int = 3, seed: int = 2, cameras: int = 2) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    pictures = torch.randint(0, 256, (cameras, batch, 36, 40, 3), generator=rng, dtype=torch.uint8)
    found = {f"observation.images.camera{n}": picture for n, picture in enumerate(pictures)}
    found |= {STATE: torch.randn(batch, 5, generator=rng), ENVIRONMENT: torch.randn(batch, 4, generator=rng)}
    return found


def diffusion_observation(batch: int = 3, history: int | None = 2, cameras: int = 1) -> dict[str, Tensor]:
    """As `diffusion_folder` reads it; history: observations, None for one without that axis."""
    rng = torch.Generator().manual_seed(2)
    shape = (batch,) if history is None else (batch, history)
    pictures = (torch.randint(0, 256, (*shape, 36, 40, 3), generator=rng, dtype=torch.uint8) for _ in range(cameras))
    found = {f"observation.images.camera{n}": picture for n, picture in enumerate(pictures)}
    return found | {STATE: torch.randn(*shape, 5, generator=rng)}

"""A tiny GR00T N1.7 in LeRobot's layout, written from a list of the names and shapes that LeRobot 0.6.1 gives it."""

import json
from pathlib import Path
from types import SimpleNamespace as Sizes
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.vla.published import WORDS, Shapes, decoder_shapes, random_weights, statistics_of

TINY = Sizes(
    vocabulary=40, width=64, layers=3, mlp=96, queries=64, head=32, size=16, eye=32, eye_layers=3, eye_mlp=64,
    patch=16, patches=64, deep=2, frames=2, merge=2, robots=3, state=10, action=12, horizon=8, hidden=40, expert=48,
    blocks=4, above=2, places=16,
)  # fmt: skip
REAL = Sizes(
    vocabulary=151936, width=2048, layers=16, mlp=6144, queries=2048, head=1024, size=128, eye=1024, eye_layers=24,
    eye_mlp=4096, patch=16, patches=2304, deep=3, frames=2, merge=2, robots=32, state=132, action=132, horizon=40,
    hidden=1024, expert=1536, blocks=32, above=4, places=1024,
)  # fmt: skip
SPECIAL = "<|im_start|> <|im_end|> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|> <|endoftext|>".split()
CAMERAS = ("observation.images.front", "observation.images.wrist")
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{% for c in m.content %}{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ c.text }}\
{% endif %}{% endfor %}<|im_end|>
{% endfor %}"""


def groot_shapes(s: Sizes) -> Shapes:
    """Names and shapes of what LeRobot saves."""
    found = Shapes()
    model = "_groot_model.backbone.model.model."
    text, eye, head = model + "language_model.", model + "visual.", "_groot_model.action_head."
    found["_groot_model.backbone.model.lm_head.weight"] = (s.vocabulary, s.width)  # tied: the embedding's other name
    found[text + "norm.weight"] = (s.width,)
    for n in range(s.layers):
        layer = f"{text}layers.{n}."
        found |= decoder_shapes(layer, s.width, s.mlp, s.queries, s.head)
        found |= {f"{layer}self_attn.{p}_norm.weight": (s.size,) for p in "qk"}
        found |= {f"{layer}{p}_layernorm.weight": (s.width,) for p in ("input", "post_attention")}
    found[eye + "patch_embed.proj.weight"] = (s.eye, 3, s.frames, s.patch, s.patch)
    found[eye + "patch_embed.proj.bias"] = (s.eye,)
    found[eye + "pos_embed.weight"] = (s.patches, s.eye)
    for n in range(s.eye_layers):
        block = f"{eye}blocks.{n}."
        found.affine(block + "norm1", s.eye)
        found.affine(block + "norm2", s.eye)
        found.affine(block + "attn.qkv", 3 * s.eye, s.eye)
        found.affine(block + "attn.proj", s.eye, s.eye)
        found.affine(block + "mlp.linear_fc1", s.eye_mlp, s.eye)
        found.affine(block + "mlp.linear_fc2", s.eye, s.eye_mlp)
    wide = s.eye * s.merge**2
    mergers = [(eye + "merger", s.eye), *((f"{eye}deepstack_merger_list.{n}", wide) for n in range(s.deep))]
    for merger, normed in mergers:
        found.affine(merger + ".norm", normed)
        found.affine(merger + ".linear_fc1", wide, wide)
        found.affine(merger + ".linear_fc2", s.width, wide)
    found.affine(head + "model.timestep_encoder.timestep_embedder.linear_1", s.expert, 256)
    found.affine(head + "model.timestep_encoder.timestep_embedder.linear_2", s.expert, s.expert)
    for stack, depth, width in (("model", s.blocks, s.expert), ("vl_self_attention", s.above, s.width)):
        for n in range(depth):
            block = f"{head}{stack}.transformer_blocks.{n}."
            other = s.width if stack == "model" and n % 2 == 0 else width
            for projection, reads in (("to_q", width), ("to_k", other), ("to_v", other), ("to_out.0", width)):
                found.affine(f"{block}attn1.{projection}", width, reads)
            found.affine(block + "ff.net.0.proj", 4 * width, width)
            found.affine(block + "ff.net.2", width, 4 * width)
            if stack == "model":
                found.affine(block + "norm1.linear", 2 * width, width)
            else:
                found.affine(block + "norm1", width)
                found.affine(block + "norm3", width)
    found.affine(head + "model.proj_out_1", 2 * s.expert, s.expert)
    found.affine(head + "model.proj_out_2", s.hidden, s.expert)
    found.affine(head + "vlln", s.width)
    found[head + "position_embedding.weight"] = (s.places, s.expert)
    for name, inputs, outputs in (
        ("state_encoder.layer1", s.state, s.hidden), ("state_encoder.layer2", s.hidden, s.expert),
        ("action_encoder.W1", s.action, s.expert), ("action_encoder.W2", 2 * s.expert, s.expert),
        ("action_encoder.W3", s.expert, s.expert),
        ("action_decoder.layer1", s.hidden, s.hidden), ("action_decoder.layer2", s.hidden, s.action),
    ):  # fmt: skip
        found |= {f"{head}{name}.W": (s.robots, inputs, outputs), f"{head}{name}.b": (s.robots, outputs)}
    return found


def groot_weights(s: Sizes = TINY, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random ones, on the scale of linear layers, which those of the robots have the other way round."""
    weights = random_weights(groot_shapes(s), dtype=dtype)
    for key, value in weights.items():
        if key.endswith(".W"):
            weights[key] = value * value.shape[2] ** 0.5
    return weights


def write_tokenizer(folder: Path) -> None:
    """Words between spaces; <zero> is what Qwen has an exclamation mark for."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<zero>", *SPECIAL, "user", *(word for word in WORDS if "<bos>" not in word)]
    inner = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    how = {"pad_token": SPECIAL[-1], "unk_token": "<unk>", "additional_special_tokens": SPECIAL[:-1]}
    outer = PreTrainedTokenizerFast(tokenizer_object=inner, **how)
    outer.chat_template = TEMPLATE
    outer.save_pretrained(folder / "tokenizer")


def base_config(s: Sizes = TINY) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json of the base model, and of its backbone."""
    base = {
        "model_type": "Gr00tN1d7", "model_name": "./base/backbone", "backbone_model_type": "qwen",
        "backbone_embedding_dim": s.width, "select_layer": s.layers, "max_state_dim": s.state,
        "max_action_dim": s.action, "action_horizon": s.horizon, "hidden_size": s.hidden,
        "input_embedding_dim": s.expert, "max_seq_len": s.places, "max_num_embodiments": s.robots,
        "diffusion_model_cfg": {
            "positional_embeddings": None, "num_layers": s.blocks, "num_attention_heads": 4, "attention_head_dim": 12,
            "norm_type": "ada_norm", "dropout": 0.2, "final_dropout": True, "output_dim": s.hidden,
            "interleave_self_attention": True,
        },
        "vl_self_attention_cfg": {
            "positional_embeddings": None, "num_layers": s.above, "num_attention_heads": 4, "attention_head_dim": 16,
            "dropout": 0.2, "final_dropout": True,
        },
    }  # fmt: skip
    text = {
        "model_type": "qwen3_vl_text", "hidden_size": s.width, "intermediate_size": s.mlp, "head_dim": s.size,
        "num_hidden_layers": s.layers + 1, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
        "vocab_size": s.vocabulary, "rope_theta": 10000.0, "max_position_embeddings": 512,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
    }  # fmt: skip
    vision = {
        "model_type": "qwen3_vl", "hidden_size": s.eye, "intermediate_size": s.eye_mlp, "depth": s.eye_layers,
        "num_heads": 4, "patch_size": s.patch, "out_hidden_size": s.width, "num_position_embeddings": s.patches,
        "deepstack_visual_indexes": [0, 2], "spatial_merge_size": s.merge, "temporal_patch_size": s.frames,
    }  # fmt: skip
    ids = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 3, "vision_end_token_id": 4}
    vlm = {"model_type": "qwen3_vl", "text_config": text, "vision_config": vision, "tie_word_embeddings": True} | ids
    return base, vlm


def groot_folder(
    folder: Path,
    *,
    weights: dict[str, Tensor] | None = None,
    eye: dict[str, Any] | None = None,
    groups: bool = False,
    **settings: Any,
) -> dict[str, Tensor]:
    """A tiny one with two cameras, its base's description in base/; the weights by published name.

    eye: changes of how pictures are shown. groups: its actions have the base's statistics, by groups.
    """
    picture = {"type": "VISUAL", "shape": [3, 24, 32]}
    config: dict[str, Any] = {
        "type": "groot",
        "input_features": {name: picture for name in reversed(CAMERAS)}
        | {"observation.state": {"type": "STATE", "shape": [5]}},
        "output_features": {"action": {"type": "ACTION", "shape": [3]}},
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "IDENTITY", "ACTION": "IDENTITY"},
        "chunk_size": TINY.horizon, "n_action_steps": TINY.horizon, "max_state_dim": TINY.state,
        "max_action_dim": TINY.action, "base_model_path": "./base", "embodiment_tag": "new_embodiment",
        "action_decode_transform": None, "tune_llm": False, "tune_visual": False, "tune_projector": True,
        "tune_diffusion_model": True, "tune_vlln": True, "tune_top_llm_layers": 0, "use_bf16": False, "device": "cpu",
    } | settings  # fmt: skip
    pack: dict[str, Any] = {
        "state_horizon": 1, "action_horizon": TINY.horizon, "valid_action_horizon": TINY.horizon, "video_horizon": None,
        "max_state_dim": TINY.state, "max_action_dim": TINY.action, "language_key": "task", "formalize_language": True,
        "embodiment_tag": config["embodiment_tag"],
        "embodiment_mapping": {"libero_sim": 1, "new_embodiment": 2, "simpler_env_google": 0},
        "normalize_min_max": True, "state_dropout_prob": 0.0, "clip_outliers": True, "use_percentiles": groups,
        "video_modality_keys": None, "raw_stats": None, "modality_config": None,
    }  # fmt: skip
    show = {
        "model_name": "nvidia/Cosmos-Reason2-2B", "image_crop_size": [230, 230], "image_target_size": [256, 256],
        "shortest_image_edge": None, "crop_fraction": None, "use_albumentations": False, "letter_box_transform": False,
        "device": "cpu",
    } | (eye or {})  # fmt: skip
    device = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}
    stats = statistics_of({"observation.state": 5, "action": 3})
    decode: dict[str, Any] = {
        "registry_name": "groot_action_unpack_unnormalize_v2",
        "config": {"env_action_dim": 3, "normalize_min_max": True, "clip_normalized_action": True,
                   "libero_gripper_action": False, "libero_gripper_binarize": True},
    }  # fmt: skip
    if groups:
        names = {"arm": slice(0, 2), "gripper": slice(2, 3)}
        raw = {
            name: {key: stats[f"action.{key}"][part].tolist() for key in ("min", "max", "mean", "std", "q01", "q99")}
            for name, part in names.items()
        }
        absolute = {"rep": "ABSOLUTE", "type": "NON_EEF", "format": "DEFAULT"}
        modality = {"action": {"modality_keys": list(names), "action_configs": [absolute] * 2,
                               "delta_indices": list(range(TINY.horizon))}}  # fmt: skip
        told = {"raw_stats": {"action": raw}, "modality_config": modality, "use_percentiles": True}
        pack |= told
        how = {"env_action_dim": 3, "use_relative_action": False, "action_decode_transform": None}
        decode = {"registry_name": "groot_n1_7_action_decode_v1", "config": told | how}
    before = [
        {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
        {"registry_name": "to_batch_processor", "config": {}},
        {"registry_name": "groot_n1_7_pack_inputs_v1", "config": pack},
        {"registry_name": "groot_n1_7_vlm_encode_v1", "config": show},
        device,
    ]
    weights = groot_weights() if weights is None else weights
    folder.mkdir(parents=True, exist_ok=True)
    for name, pipeline in (("policy_preprocessor", before), ("policy_postprocessor", [decode, device])):
        for place, step in enumerate(pipeline):
            if step["registry_name"] in ("groot_n1_7_pack_inputs_v1", "groot_action_unpack_unnormalize_v2"):
                step["state_file"] = f"{name}_step_{place}_{step['registry_name']}.safetensors"
                save_file(stats, folder / str(step["state_file"]))
        (folder / f"{name}.json").write_text(json.dumps({"name": name, "steps": pipeline}, indent=2))
    (folder / "config.json").write_text(json.dumps(config, indent=4))
    tied = "_groot_model.backbone.model."
    metadata = {"format": "pt", f"{tied}model.language_model.embed_tokens.weight": f"{tied}lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata=metadata)
    base, vlm = base_config()
    (folder / "base" / "backbone").mkdir(parents=True, exist_ok=True)
    (folder / "base" / "config.json").write_text(json.dumps(base))
    (folder / "base" / "backbone" / "config.json").write_text(json.dumps(vlm))
    write_tokenizer(folder)
    return weights


def groot_observation(batch: int = 3, seed: int = 2) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    pictures = torch.randint(0, 256, (2, batch, 24, 32, 3), generator=rng, dtype=torch.uint8)
    return dict(zip(CAMERAS, pictures, strict=True)) | {"observation.state": torch.randn(batch, 5, generator=rng)}

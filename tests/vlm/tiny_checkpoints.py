"""Random checkpoints of a few ten thousand numbers in the true formats, one per family of vision-language models."""

from collections.abc import Sequence
from pathlib import Path

import torch

from genrl.vlm.policies import processor as pictures  # first: it makes transformers importable beside any torchvision
from tests.rewards import tiny_vlm

import transformers as hf  # isort: skip

FAMILIES = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3", "llava", "llava_next", "llava_onevision"),
    *("internvl", "gemma3", "mistral3", "pixtral", "glm4v", "glm46v", "kimi_k25"),
)
QWEN = ["vision_start", "vision_end", "vision_pad", "image_pad", "video_pad"]
PLACES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
IDEFICS = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *PLACES]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.content %}"
    "{% if c.type == 'image' %}IMAGE{% elif c.type == 'video' %}VIDEO{% else %}{{ c.text }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAYERS = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
TEXT = {**LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}


def save(family: str, folder: Path, layers: int = 2) -> Path:
    """A checkpoint with weights, tokenizer, image processor and chat template. layers: of a Qwen's decoder."""
    makers = {"smolvlm": idefics, "idefics3": idefics, "llava": _llava, "llava_next": _llava, "gemma3": _gemma3}
    makers |= {"llava_onevision": _llava_onevision, "internvl": _internvl, "kimi_k25": _kimi}
    makers |= {"mistral3": _pixtral, "pixtral": _pixtral, "glm4v": _glm, "glm46v": _glm}
    return makers[family](family, folder) if family in makers else _qwen(family, folder, layers)


def _tokenizer(special: list[str], image: str, video: str = "", words: Sequence[str] = ()) -> hf.Qwen2Tokenizer:
    vocabulary, merges = tiny_vlm.spelled(words)
    made = hf.Qwen2Tokenizer(vocab=vocabulary, merges=merges)
    made.add_special_tokens({"additional_special_tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *special]})
    made.pad_token, made.eos_token = "<|endoftext|>", "<|im_end|>"
    made.chat_template = TEMPLATE.replace("IMAGE", image).replace("VIDEO", video)
    return made


def _save(model: torch.nn.Module, tokenizer: hf.Qwen2Tokenizer, folder: Path) -> None:
    tiny_vlm.randomise(model)
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    model.generation_config.repetition_penalty = 1.5  # the makers' defaults must not reach the sampler
    model.save_pretrained(folder)


def _qwen(family: str, folder: Path, layers: int) -> Path:
    image, video = (f"<|vision_start|><|{kind}_pad|><|vision_end|>" for kind in ("image", "video"))
    made = _tokenizer([f"<|{name}|>" for name in QWEN], image, video)
    ids = {name: made.convert_tokens_to_ids(f"<|{name}|>") for name in QWEN}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = {**TEXT, "vocab_size": len(made), "rope_parameters": rope, "tie_word_embeddings": False}
    text |= {"num_hidden_layers": layers}
    vision = {"depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 4}
    common = {"image_token_id": ids["image_pad"], "video_token_id": ids["video_pad"], "tie_word_embeddings": False}
    common |= {"vision_start_token_id": ids["vision_start"], "vision_end_token_id": ids["vision_end"]}
    if family == "qwen2_vl":
        vision |= {"embed_dim": 32, "mlp_ratio": 2}
        model = hf.Qwen2VLForConditionalGeneration(hf.Qwen2VLConfig(text_config=text, vision_config=vision, **common))
    elif family == "qwen2_5_vl":
        vision |= {"intermediate_size": 48, "out_hidden_size": 32, "fullatt_block_indexes": [1], "window_size": 16}
        config = hf.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **common)
        model = hf.Qwen2_5_VLForConditionalGeneration(config)
    else:
        text |= {"head_dim": 8}
        text["rope_parameters"] = {**rope, "mrope_interleaved": True}
        vision |= {"intermediate_size": 48, "out_hidden_size": 32, "num_position_embeddings": 64}
        vision |= {"deepstack_visual_indexes": [0]}
        model = hf.Qwen3VLForConditionalGeneration(hf.Qwen3VLConfig(text_config=text, vision_config=vision, **common))
    _save(model, made, folder)
    made.save_pretrained(folder)
    hf.Qwen2VLImageProcessorPil(patch_size=4, min_pixels=16 * 16, max_pixels=32 * 32).save_pretrained(folder)
    return folder


def idefics(family: str, folder: Path, words: Sequence[str] = ()) -> Path:
    """words: which are single tokens."""
    made = _tokenizer(IDEFICS, "<image>", words=words)
    text = {**TEXT, "model_type": "llama", "vocab_size": len(made), "pad_token_id": made.pad_token_id}
    vision = {**LAYERS, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
    common = {"image_token_id": made.convert_tokens_to_ids("<image>"), "scale_factor": 2}
    common |= {"pad_token_id": made.pad_token_id, "vision_config": vision, "text_config": text}
    size = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
    if family == "smolvlm":
        _save(hf.SmolVLMForConditionalGeneration(hf.SmolVLMConfig(**common)), made, folder)
        images = hf.SmolVLMImageProcessorPil(**size)
        pictures.SmolPictures(images, made, 4, made.chat_template).save_pretrained(folder)
    else:
        _save(hf.Idefics3ForConditionalGeneration(hf.Idefics3Config(**common)), made, folder)
        images = hf.Idefics3ImageProcessorPil(**size)
        hf.Idefics3Processor(images, made, image_seq_len=4, chat_template=made.chat_template).save_pretrained(folder)
    return folder


def _llava(family: str, folder: Path) -> Path:
    made = _tokenizer(["<image>"], "<image>")
    common = {
        "vision_config": hf.SiglipVisionConfig(**LAYERS, num_attention_heads=2, image_size=16, patch_size=4),
        "text_config": {**TEXT, "model_type": "llama", "vocab_size": len(made)},
        "image_token_index": made.convert_tokens_to_ids("<image>"),
        "vision_feature_select_strategy": "full",
        "vision_feature_layer": -1,
    }
    how = {"patch_size": 4, "vision_feature_select_strategy": "full", "chat_template": made.chat_template}
    size = {"height": 16, "width": 16}
    if family == "llava":
        _save(hf.LlavaForConditionalGeneration(hf.LlavaConfig(**common)), made, folder)
        hf.LlavaProcessor(hf.SiglipImageProcessorPil(size=size), made, **how).save_pretrained(folder)
    else:  # tiles of a picture's own proportions, and the whole: as many as the picture needs
        places = [[16, 32], [32, 16], [32, 32]]
        config = hf.LlavaNextConfig(**common, image_grid_pinpoints=places)
        _save(hf.LlavaNextForConditionalGeneration(config), made, folder)
        images = hf.LlavaNextImageProcessorPil(size={"shortest_edge": 16}, crop_size=size, image_grid_pinpoints=places)
        hf.LlavaNextProcessor(images, made, **how).save_pretrained(folder)
    return folder


def _internvl(family: str, folder: Path) -> Path:
    named = {"start_image": "<img>", "end_image": "</img>", "context_image": "<IMG_CONTEXT>", "video": "<video>"}
    made = _tokenizer(list(named.values()), "<IMG_CONTEXT>\n", "<video>\n")
    made = _with_names(made, {f"{name}_token": token for name, token in named.items()})
    vision = {**LAYERS, "num_attention_heads": 2, "image_size": [16, 16], "patch_size": [4, 4]}
    text = {**TEXT, "model_type": "qwen2", "vocab_size": len(made)}
    ids = {"image_token_id": made.convert_tokens_to_ids("<IMG_CONTEXT>"), "image_seq_length": 4}
    config = hf.InternVLConfig(vision_config=vision, text_config=text, tie_word_embeddings=False, **ids)
    _save(hf.InternVLForConditionalGeneration(config), made, folder)
    size = {"height": 16, "width": 16}
    images = hf.GotOcr2ImageProcessorPil(size=size, crop_to_patches=True, min_patches=1, max_patches=4)
    how = {"image_seq_length": 4, "chat_template": made.chat_template}
    hf.InternVLProcessor(images, made, hf.InternVLVideoProcessor(size=size), **how).save_pretrained(folder)
    return folder


def _llava_onevision(family: str, folder: Path) -> Path:
    made = _tokenizer(["<image>", "<video>"], "<image>\n")
    size, places = {"height": 16, "width": 16}, [[16, 16], [16, 32], [32, 16], [32, 32]]
    config = hf.LlavaOnevisionConfig(
        vision_config=hf.SiglipVisionConfig(**LAYERS, num_attention_heads=2, image_size=16, patch_size=4),
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": len(made)},
        image_token_index=made.convert_tokens_to_ids("<image>"),
        video_token_index=made.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=places,
    )
    _save(hf.LlavaOnevisionForConditionalGeneration(config), made, folder)
    images = hf.LlavaOnevisionImageProcessorPil(size=size, image_grid_pinpoints=places)
    videos = hf.LlavaOnevisionVideoProcessor(size=size)
    how = {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "chat_template": made.chat_template}
    hf.LlavaOnevisionProcessor(images, made, videos, **how).save_pretrained(folder)
    return folder


def _gemma3(family: str, folder: Path) -> Path:
    """A window of 12 tokens, shorter than the prompts; one layer with it, one without."""
    named = {"image": "<image_soft_token>", "boi": "<start_of_image>", "eoi": "<end_of_image>"}
    made = _tokenizer(list(named.values()), "<start_of_image>")
    made = _with_names(made, {f"{name}_token": token for name, token in named.items()})
    text = {**TEXT, "vocab_size": len(made), "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 12}
    text |= {"layer_types": ["sliding_attention", "full_attention"], "eos_token_id": made.eos_token_id}
    config = hf.Gemma3Config(
        text_config=text,
        vision_config={**LAYERS, "num_attention_heads": 2, "image_size": 16, "patch_size": 4},
        mm_tokens_per_image=4,
        **{f"{name}_token_index": made.convert_tokens_to_ids(token) for name, token in named.items()},
        tie_word_embeddings=True,
    )
    _save(hf.Gemma3ForConditionalGeneration(config), made, folder)
    images = hf.Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    hf.Gemma3Processor(images, made, made.chat_template, image_seq_length=4).save_pretrained(folder)
    return folder


def _pixtral(family: str, folder: Path) -> Path:
    """Mistral 3.1 merges 2 x 2 patches; Pixtral itself is a LLaVA whose tower takes pictures of any size."""
    made = _tokenizer(["[IMG]", "[IMG_BREAK]", "[IMG_END]"], "[IMG]")
    vision = {**LAYERS, "model_type": "pixtral", "num_attention_heads": 2, "image_size": 32, "patch_size": 4}
    vision |= {"head_dim": 16, "rope_parameters": {"rope_type": "axial", "rope_theta": 1e4}}
    common = {"vision_config": vision, "image_token_index": made.convert_tokens_to_ids("[IMG]")}
    common |= {"text_config": {**TEXT, "model_type": "mistral", "head_dim": 8, "vocab_size": len(made)}}
    merge = 2 if family == "mistral3" else 1
    if family == "mistral3":
        model = hf.Mistral3ForConditionalGeneration(hf.Mistral3Config(**common, tie_word_embeddings=False))
    else:
        rest = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
        model = hf.LlavaForConditionalGeneration(hf.LlavaConfig(**common, **rest))
    _save(model, made, folder)
    images = hf.PixtralImageProcessorPil(patch_size=4, size={"longest_edge": 24})
    how = {"patch_size": 4, "spatial_merge_size": merge, "chat_template": made.chat_template}
    hf.PixtralProcessor(images, made, **how).save_pretrained(folder)
    return folder


def _glm(family: str, folder: Path) -> Path:
    names = [f"{end}_of_{kind}" for kind in ("image", "video") for end in ("begin", "end")]
    made = _tokenizer([f"<|{n}|>" for n in ("image", "video", *names)], "<|begin_of_image|><|image|><|end_of_image|>")
    ids = {n: made.convert_tokens_to_ids(f"<|{n}|>") for n in ("image", "video", *names)}
    keys = {"image_token_id": "image", "video_token_id": "video"}
    keys |= {f"{kind}_start_token_id": f"begin_of_{kind}" for kind in ("image", "video")}
    keys |= {f"{kind}_end_token_id": f"end_of_{kind}" for kind in ("image", "video")}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2], "partial_rotary_factor": 1.0}
    text = {**TEXT, "model_type": "glm4v_text", "vocab_size": len(made), "rope_parameters": rope}
    vision = {"model_type": "glm4v_vision", "depth": 2, "hidden_size": 32, "num_heads": 2, "image_size": 16}
    vision |= {"patch_size": 4, "out_hidden_size": 32, "intermediate_size": 48}
    common = {"text_config": text, "vision_config": vision, **{key: ids[name] for key, name in keys.items()}}
    size = {"size": {"shortest_edge": 16 * 16 * 2, "longest_edge": 32 * 32 * 2}, "patch_size": 4}
    if family == "glm4v":
        _save(hf.Glm4vForConditionalGeneration(hf.Glm4vConfig(**common)), made, folder)
        images, videos, kind = hf.Glm4vImageProcessorPil(**size), hf.Glm4vVideoProcessor(**size), hf.Glm4vProcessor
    else:
        _save(hf.Glm46VForConditionalGeneration(hf.Glm46VConfig(**common)), made, folder)
        images, videos, kind = hf.Glm46VImageProcessorPil(**size), hf.Glm46VVideoProcessor(**size), hf.Glm46VProcessor
    kind(images, made, videos, chat_template=made.chat_template).save_pretrained(folder)
    return folder


def _kimi(family: str, folder: Path) -> Path:
    """Multi-head latent attention, and experts from the second layer on."""
    names = ["<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>"]
    made = _with_names(_tokenizer([*names, "<|video|>"], "<|media_pad|>"), {"image_token": "<|media_pad|>"})
    text = {**LAYERS, "model_type": "deepseek_v3", "vocab_size": len(made), "num_attention_heads": 4}
    text |= {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8}
    text |= {"qk_nope_head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2}
    text |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "max_position_embeddings": 512}
    vision = {**LAYERS, "num_attention_heads": 2, "patch_size": 4, "pos_emb_height": 8, "pos_emb_width": 8}
    marks = {"image": "media_pad", "video": "video", "vision_start": "media_begin", "vision_end": "media_end"}
    ids = {f"{key}_token_id": made.convert_tokens_to_ids(f"<|{name}|>") for key, name in marks.items()}
    common = {"projection_hidden_size": 32, "tie_word_embeddings": False}
    config = hf.Kimi_K25Config(text_config=text, vision_config=vision, **common, **ids)
    _save(hf.Kimi_K25ForConditionalGeneration(config), made, folder)
    images, videos = hf.Kimi_K25ImageProcessor(patch_size=4), hf.Kimi_K25VideoProcessor(patch_size=4)
    hf.Kimi_K25Processor(images, made, videos, chat_template=made.chat_template).save_pretrained(folder)
    return folder


def _with_names(tokenizer: hf.Qwen2Tokenizer, names: dict[str, str]) -> hf.Qwen2Tokenizer:
    """The tokenizer with special tokens that processors ask it for by name, as makers save them."""
    tokenizer._set_model_specific_special_tokens(special_tokens=names)
    return tokenizer

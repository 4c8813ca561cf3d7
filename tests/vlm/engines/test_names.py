"""Names of weights for an engine whose modules are nested deeper."""

from __future__ import annotations

from genrl.vlm.engines.vllm import nested

ENGINE = [
    "vision_tower.vision_model.embeddings.patch.weight",
    "vision_tower.vision_model.layers.0.attn.qkv_proj.weight",
    "vision_tower.vision_model.layers.0.attn.out_proj.weight",
    "language_model.model.layers.0.norm.weight",
    "language_model.lm_head.weight",
]


def plain(name: str) -> str | None:
    return name


def prefixed(name: str) -> str | None:
    """As vLLM maps names of transformers since 4.52."""
    for old, new in {"model.language_model.": "language_model.model.", "model.vision_tower.": "vision_tower."}.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return None if name == "ignored.weight" else name


def test_a_level_that_the_checkpoint_has_not_is_added() -> None:
    names = {
        "vision_tower.post_norm.weight": "vision_tower.vision_model.post_norm.weight",  # the engine has none
        "vision_tower.embeddings.patch.weight": "vision_tower.vision_model.embeddings.patch.weight",
        "vision_tower.layers.0.attn.q_proj.weight": "vision_tower.vision_model.layers.0.attn.q_proj.weight",
    }
    assert nested(names, ENGINE, plain) == names
    whole = {f"model.{name}": f"model.{found}" for name, found in names.items()}
    assert nested(whole, ENGINE, prefixed) == whole


def test_names_that_the_engine_has_stay() -> None:
    assert nested(ENGINE, ENGINE, plain) == {name: name for name in ENGINE}
    mapped = [
        "model.language_model.layers.0.norm.weight",
        "ignored.weight",
        "vision_tower.vision_model.post_norm.weight",
    ]
    assert nested(mapped, ENGINE, prefixed) == {name: name for name in mapped}


def test_what_the_engine_may_know_by_another_rule_is_left_to_it() -> None:
    """The root, a level of two, and weights that it joins."""
    left = ["lm_head.weight", "model.layers.0.norm.weight", "vision_tower.vision_model.layers.0.attn.v_proj.weight"]
    assert nested(left, ENGINE, plain) == {name: name for name in left}
    two = ["a.x.norm.weight", "a.y.norm.weight"]
    assert nested(["a.norm.weight"], two, plain) == {"a.norm.weight": "a.norm.weight"}

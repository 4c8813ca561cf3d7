"""From what a configuration says of a method to its `Preset`: the published one, and the functions changed by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any, get_args

from pydantic import TypeAdapter, ValidationError

from genrl.config.errors import ConfigError, Origins, Problem, dotted, origin_of
from genrl.config.vlm import VLMConfig
from genrl.config.vlm_rules import CRITICS
from genrl.config.yaml_source import KeyPath
from genrl.vlm.methods import recipe
from genrl.vlm.methods.extras import needed
from genrl.vlm.methods.presets import MUSIC_RL, PRESETS
from genrl.vlm.methods.recipe import Preset, extra_forwards

ONE: dict[str, tuple[type, ...]] = {
    "advantage": get_args(recipe.Advantage),
    "surrogate": get_args(recipe.Surrogate),
    "group_loss": get_args(recipe.GroupLoss),
}
SEVERAL: dict[str, tuple[type, ...]] = {
    "transforms": get_args(recipe.Transform),
    "weights": get_args(recipe.TokenWeight),
    "regularisers": get_args(recipe.Regulariser),
    "reward_terms": get_args(recipe.RewardTerm),
}

BY_QUESTION = ("masked_image", "degraded", "ema", "divergence", "scores", "components")
"""What `extras.needed` lists beside the reference and entropies."""


class _Wrong(Exception):
    def __init__(self, path: KeyPath, text: str) -> None:
        super().__init__(text)
        self.path, self.text = path, text


def preset_of(config: VLMConfig, origins: Origins | None = None) -> Preset:
    """The method of a run. Raises ConfigError for an unknown function or constant, with the nearest, and for functions
    that do not go together; `origins` (from `load_located`) gives file and line."""
    try:
        made = _composed(config)
        for path, text in _impossible(config, made):
            raise _Wrong(path, text)
    except _Wrong as error:
        problem = Problem(origin_of(error.path, origins or {}), dotted(error.path), error.text)
        raise ConfigError([problem]) from None
    return made


def _composed(config: VLMConfig) -> Preset:
    settings, base = config.trainer, {**PRESETS, "music_rl": MUSIC_RL}[config.trainer.preset]
    changes: dict[str, Any] = {}
    for key, kinds in ONE.items():
        written = getattr(settings, key)
        if written is not None:
            changes[key] = _choice(written, kinds, ("trainer", key), getattr(base, key))
    for key, kinds in SEVERAL.items():
        written = getattr(settings, key)
        if written is not None:
            found = {type(one): one for one in getattr(base, key)}
            changes[key] = tuple(
                _choice(one, kinds, ("trainer", key, k), _named(one, found)) for k, one in enumerate(written)
            )
    if settings.surrogate is not None and settings.group_loss is None and base.group_loss is not None:
        changes["group_loss"] = None
    if settings.group_loss is not None and settings.surrogate is None and base.surrogate is not None:
        changes["surrogate"] = None
    if settings.aggregation is not None:
        changes["aggregation"] = settings.aggregation
    advantage = changes.get("advantage", base.advantage)
    if isinstance(advantage, recipe.NormaliseThenSum) and settings.advantage is None:
        changes["advantage"] = replace(advantage, weights=tuple(reward.weight for reward in config.rewards))
    if changes.get("aggregation", base.aggregation) == "const":
        changes["length"] = config.generation.max_new_tokens
    uncorrected = not any(isinstance(one, recipe.EngineMismatch) for one in base.weights)
    if config.generation.engine == "vllm" and settings.weights is None and uncorrected:
        if changes.get("group_loss", base.group_loss) is None:  # which takes no weights
            changes["weights"] = (*base.weights, recipe.EngineMismatch())  # TRL's default
    try:
        return replace(base, **changes)
    except ValueError as error:
        raise _Wrong(("trainer",), str(error)) from None


def _named(written: str | dict[str, Any], found: Mapping[type, Any]) -> Any:
    name = written if isinstance(written, str) else written.get("name")
    return next((one for one in found.values() if one.name == name), None)


def _choice(written: str | dict[str, Any], kinds: tuple[type, ...], path: KeyPath, own: Any) -> Any:
    """One function with its constants; those that are not written are the preset's, where it has that function."""
    values = {"name": written} if isinstance(written, str) else dict(written)
    known = {_name(kind): kind for kind in kinds}
    name = values.pop("name", None if own is None else own.name)
    if name is None:
        raise _Wrong(path, f"say which function is meant by `name`: one of {', '.join(known)}")
    if name not in known:
        raise _Wrong((*path, "name"), f"found {name!r}; allowed: one of {', '.join(known)}{_near(str(name), known)}")
    kind = known[name]
    constants = {field.name: field for field in fields(kind) if field.name != "name"}
    for key in values:
        if key not in constants:
            inside = ", ".join(constants) or "none"
            raise _Wrong((*path, key), f"unknown key{_near(key, constants)}; constants of {name}: {inside}")
    start = {key: getattr(own, key) for key in constants} if own is not None and own.name == name else {}
    try:
        return TypeAdapter(kind).validate_python({**start, **values})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = (*path, *first["loc"])
        raise _Wrong(where, f"found {first['input']!r}: {first['msg'][:1].lower()}{first['msg'][1:]}") from None


def _name(kind: type) -> str:
    return str(next(field.default for field in fields(kind) if field.name == "name"))


def _near(name: str, known: Mapping[str, object]) -> str:
    close = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _impossible(config: VLMConfig, preset: Preset) -> Iterator[tuple[KeyPath, str]]:
    size, micro = config.generation.group_size, config.trainer.micro_batch
    critic = isinstance(preset.advantage, recipe.CriticAdvantage)
    alone = critic or (isinstance(preset.advantage, recipe.WhitenedReturns) and not preset.advantage.baseline)
    if critic != any(isinstance(one, recipe.ValueLoss) for one in preset.regularisers):
        text = "a critic's advantage and its loss go together: advantage {name: critic} and regulariser {name: value}"
        yield ("trainer", "regularisers"), text
    elif critic != (config.trainer.preset in (*CRITICS, "music_rl")):  # which has a trainer of its own
        text = f"critics are those of {' and '.join(CRITICS)}; start from one of them"
        yield ("trainer", "preset"), text
    if config.environment is not None:
        lacks = [name for name in BY_QUESTION if getattr(needed(preset), name)]
        if lacks:
            text = f"{config.trainer.preset} reads what only questions have ({lacks[0]}), not episodes; nearest: grpo"
            yield ("trainer", "preset"), text
    if size < 2 and not alone:
        text = f"{preset.advantage.name!r} compares the answers of a group; write 2 or more (8 is usual)"
        yield ("generation", "group_size"), text
    if preset.group_loss is not None and micro is not None and micro < size:
        text = f"{preset.group_loss.name!r} is a loss of whole groups; write {size} (generation.group_size) or more"
        yield ("trainer", "micro_batch"), text
    if config.vlm.output != "text" and any(isinstance(one, recipe.EntropyBonus) for one in preset.regularisers):
        text = f"entropies of a model whose output is {config.vlm.output} have no gradient; nearest: entropy_penalty"
        yield ("trainer", "regularisers"), text
    pictured = {one.extra for one in extra_forwards(preset)} & {"masked_image", "degraded", "ema"}
    pictured |= {one.name for one in preset.weights if isinstance(one, recipe.Divergence)}
    if config.vlm.output != "text" and pictured:
        text = f"it reads {min(pictured)}, of texts about pictures; this model's output is {config.vlm.output}"
        yield ("trainer", "preset"), f"{text}; nearest: grpo"
    if isinstance(preset.advantage, recipe.Hierarchical) and config.vlm.output != "voxels":
        yield ("trainer", "advantage"), "only answers of two steps have it; write vlm.output: voxels, or group"
    if isinstance(preset.surrogate, recipe.LinearBound) and config.vlm.output != "masked_text":
        text = "its columns are bounds of a masked diffusion model; write vlm.output: masked_text, or surrogate: clip"
        yield ("trainer", "surrogate"), text
    if isinstance(preset.advantage, recipe.NormaliseThenSum) and len(preset.advantage.weights) != len(config.rewards):
        text = f"{len(preset.advantage.weights)} weights for {len(config.rewards)} rewards; write one each"
        yield ("trainer", "advantage", "weights"), text
    on_policy = config.trainer.updates == config.trainer.epochs == 1
    if isinstance(preset.group_loss, recipe.Classification | recipe.Regression) and on_policy:
        if isinstance(preset.group_loss, recipe.Regression):
            text = "the regression compares with what the weights were; write 2 or more updates or epochs"
            yield ("trainer", "epochs"), text

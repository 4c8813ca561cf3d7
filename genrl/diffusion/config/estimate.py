"""What a configuration will cost: model calls by closed form, memory from the headers of weight files. No torch.

Shapes of published pipelines that are not on this machine yet travel with the package (`published.json`).

A model call is one denoiser evaluation of one sample, as the metrics `model_calls/*` count it; a guided step is two.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from genrl.config.folders import DTYPE_BYTES, HeaderError, read_header, read_json, unpacked, weight_files
from genrl.config.sections import LoRA
from genrl.diffusion.config.model_rules import DENOISERS, DIVIDED, is_text_encoder
from genrl.diffusion.config.schema import Config
from genrl.diffusion.config.sections import ATTENTION_LAYERS, ENCODER_LAYERS


@dataclass(frozen=True)
class Component:
    """One network of a pipeline folder."""

    name: str
    kind: str
    """Class named in model_index.json."""
    num_parameters: int
    num_file_bytes: int
    shapes: Mapping[str, tuple[int, ...]]
    """Weight name -> shape."""
    settings: Mapping[str, Any]
    """Its config.json."""
    note: str = ""
    """Why nothing could be read, if so."""


@dataclass(frozen=True)
class Plan:
    """One iteration (the mean over all), and the whole run."""

    images: int
    micro_batches: int
    trained_steps: float
    """Denoising steps, or noise levels, trained per sample."""
    guidance: int
    """Model calls per guided step: 1 or 2."""
    sample_calls: float
    independent_calls: float
    """Those of as many ends that share nothing."""
    train_calls: float
    """Forward calls in training, those without gradient included."""
    backward_calls: float
    kept: float
    """Micro-batches whose graphs of sampling are kept, in the iteration that keeps most."""
    optimizer_steps: int
    evaluations: int
    evaluation_calls: int
    """Of one evaluation."""

    def total_calls(self, iterations: int) -> int:
        """Forward model calls of the run."""
        return round(iterations * (self.sample_calls + self.train_calls)) + self.evaluations * self.evaluation_calls


def plan(config: Config, components: tuple[Component, ...] = (), held_out: int | None = None) -> Plan:
    """Closed-form cost of `config`; `components` tell whether guidance is an input of the model or a second call.
    held_out: how many prompts for evaluation there are, if that is known; else as many as are asked for."""
    sampling, trainer, evaluation = config.sampling, config.trainer, config.evaluation

    def guided(scale: float | None) -> int:
        return _guidance(scale, sampling.pipeline_args, components)

    calls, both = trainer.calls(config, guided), guided(sampling.guidance_scale)
    keep = config.economy.keep
    part = 1.0 if keep is None else keep / sampling.group_size
    scale = sampling.guidance_scale if evaluation.guidance_scale is None else evaluation.guidance_scale
    prompts = evaluation.num_prompts if held_out is None else min(evaluation.num_prompts, held_out)
    pictures = prompts * evaluation.group_size * calls.evaluated
    steps, every = evaluation.num_inference_steps or sampling.num_inference_steps, evaluation.every
    return Plan(
        images=sampling.images_per_iteration,
        micro_batches=sum(map(len, trainer.cut(config, 1))),
        trained_steps=calls.trained,
        guidance=both,
        sample_calls=calls.sample,
        independent_calls=sampling.images_per_iteration * sampling.num_inference_steps * calls.ends * both,
        train_calls=calls.train * part,
        backward_calls=calls.backward * part,
        kept=calls.kept,
        optimizer_steps=config.optimizer_steps,
        evaluations=1 + math.ceil(config.iterations / every) if every else 0,
        evaluation_calls=pictures * steps * guided(scale),
    )


def _guidance(scale: float | None, pipeline_args: Mapping[str, Any], components: tuple[Component, ...]) -> int:
    """2 where the pipeline evaluates the model twice per step. Unknown (null, the pipeline's default) counts as 2."""
    true_cfg = pipeline_args.get("true_cfg_scale")
    if isinstance(true_cfg, int | float):
        # diffusers makes the second call of such a pipeline only with a negative prompt.
        return 2 if true_cfg > 1 and pipeline_args.get("negative_prompt") is not None else 1
    if any(component.settings.get("guidance_embeds") is True for component in components):
        return 1
    return 1 if scale is not None and scale <= 1 else 2


def read_components(folder: Path, variant: str | None = None, without: Sequence[str] = ()) -> tuple[Component, ...]:
    """The networks of a pipeline folder but those left out, from model_index.json and the headers of their safetensors
    files."""
    index = read_json(folder / "model_index.json")
    components = []
    for name, entry in index.items():
        listed = isinstance(entry, list) and len(entry) == 2 and entry[1] and name not in without
        if listed and (folder / name / "config.json").is_file():
            components.append(_component(folder / name, name, str(entry[1]), variant))
    return tuple(components)


def _component(folder: Path, name: str, kind: str, variant: str | None) -> Component:
    settings = read_json(folder / "config.json")
    files = weight_files(folder, variant)
    shapes: dict[str, tuple[int, ...]] = {}
    num_bytes = 0
    note = "" if files else "no safetensors file"
    for file in files:
        try:
            for key, shape, dtype in read_header(file):
                shapes[key] = shape
                num_bytes += math.prod(shape) * DTYPE_BYTES.get(dtype, 0)
        except (HeaderError, OSError) as error:
            note = f"{file.name}: {error}"
    num_parameters = sum(math.prod(shape) for shape in shapes.values())
    return Component(name, kind, num_parameters, num_bytes, shapes, settings, note)


def trained_parameters(config: Config, components: tuple[Component, ...]) -> int:
    """Number of weights that are trained: those of the adapters, or all of the denoisers."""
    denoisers = [component for component in components if component.name in DENOISERS]
    lora = config.model.lora
    if lora is None:
        return sum(component.num_parameters for component in denoisers)
    if lora.begin is not None:
        files = [file for file in Path(lora.begin).expanduser().rglob("*.safetensors") if file.is_file()]
        return sum(math.prod(shape) for file in files for _, shape, _ in read_header(file))
    adapted = [(component, lora.targets or ATTENTION_LAYERS) for component in denoisers]
    if lora.text_encoders:  # which of them diffusers loads adapters of, its classes tell: those of CLIP
        clip = [c for c in components if is_text_encoder(c.name) and c.kind.startswith("CLIP")]
        adapted += [(component, ENCODER_LAYERS) for component in clip]
    return sum(
        _adapter_size(lora, rank_of(lora, component.name, module), shape)
        for component, targets in adapted
        for module, shape in _adapted(component, targets)
    )


def adapted_ranks(component: Component, lora: LoRA) -> int:
    """The ranks of a network's adapters, summed over its layers."""
    targets = lora.targets or ATTENTION_LAYERS
    return sum(rank_of(lora, component.name, module) for module, _ in _adapted(component, targets))


def _adapted(component: Component, targets: tuple[str, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in component.shapes.items():
        module = name.removesuffix(".weight")
        if len(shape) == 2 and name.endswith(".weight") and matches(module, targets):
            yield module, shape


def rank_of(lora: LoRA, component: str, module: str) -> int:
    """Rank of one layer, as peft reads `ranks`."""
    named = (rank for pattern, rank in lora.ranks.items() if fits(pattern, module))
    return next(named, lora.ranks.get(component, lora.rank))


def fits(pattern: str, module: str) -> bool:
    """Match a name as peft does by `rank_pattern`."""
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


def _adapter_size(lora: LoRA, rank: int, shape: tuple[int, ...]) -> int:
    """Numbers of the adapter of a matrix."""
    if lora.type != "lokr":
        return rank * sum(shape) + (shape[0] if lora.type == "dora" else 0)
    (out_small, out_large), (in_small, in_large) = (_near_square(side) for side in shape)
    # peft holds the large factor whole where the rank would not make it smaller.
    low = rank * (out_large + in_large) if rank < max(out_large, in_large) / 2 else out_large * in_large
    return out_small * in_small + low


def _near_square(number: int) -> tuple[int, int]:
    """The factors that lie closest to each other, the smaller first: how peft's LoKr splits a side."""
    small = next(n for n in range(math.isqrt(number), 0, -1) if number % n == 0)
    return small, number // small


def matches(module: str, targets: tuple[str, ...]) -> bool:
    """Match a name as peft does by `target_modules`."""
    return any(module == target or module.endswith(f".{target}") for target in targets)


def side_step(denoiser: Mapping[str, Any], vae: Mapping[str, Any]) -> int | None:
    """Number of which the sides of pictures must be multiples, in pixels; None where these configurations do not
    tell."""
    if not isinstance(channels := vae.get("block_out_channels"), list):
        return None
    return int(2 ** (len(channels) - 1) * _patch(denoiser))


def tokens(config: Config, settings: Mapping[str, Any], vae: Mapping[str, Any]) -> int:
    """Latent tokens of one sample, the largest of them; text tokens are left out."""
    return max(token_counts(config, settings, vae))


def token_counts(config: Config, settings: Mapping[str, Any], vae: Mapping[str, Any]) -> list[int]:
    """Latent tokens of a sample of each size that the configuration names."""
    channels = vae.get("block_out_channels")
    scale = 2 ** (len(channels) - 1) if isinstance(channels, list) else 8
    patch = _patch(settings)
    packed = 2 if patch == 1 and settings.get("in_channels") in (64, 128) else patch  # FLUX packs 2 x 2 beforehand
    sampling = config.sampling
    plain = (*sides(config, settings, scale), sampling.num_frames or 1)
    listed = () if sampling.buckets == "rows" else sampling.buckets
    sizes = [(*bucket, *plain[len(bucket) :]) for bucket in listed] or [plain]
    unit: int = scale * packed
    return [
        # Autoencoders of videos keep the first frame alone and take four of the others together.
        max(1, int((1 + (frames - 1) // 4) * (height // unit) * (width // unit)))
        for height, width, frames in sizes
    ]


def sides(config: Config, denoiser: Mapping[str, Any], scale: int) -> tuple[int, int]:
    """Height and width of the samples, in pixels; null = the model's own. scale: pixels to a latent."""
    side = scale * (number(denoiser.get("sample_size")) or 128)
    return config.sampling.height or side, config.sampling.width or side


def _patch(denoiser: Mapping[str, Any]) -> int:
    """Side of a token's patch, in latents."""
    size = denoiser.get("patch_size")
    return int(size[-1]) if isinstance(size, list) else max(number(size), 1)


def number(value: object) -> int:
    """A setting that is a whole number; 0 for any other."""
    return value if isinstance(value, int) else 0


def layer_problems(lora: LoRA, components: Collection[Component]) -> Iterator[tuple[str, str]]:
    """(key, what is wrong) for each target that is no layer of a denoiser, and each rank that is of no adapted layer;
    nothing where the weights' names are not known."""
    denoisers = [component for component in components if component.name in DENOISERS and component.shapes]
    adapted: list[str] = []
    for denoiser in denoisers:
        layers = [name.removesuffix(".weight") for name, shape in denoiser.shapes.items() if len(shape) in (2, 4)]
        for target in lora.targets or ():
            if not any(matches(layer, (target,)) for layer in layers):
                ends = sorted({layer.rsplit(".", 1)[-1] for layer in layers if not layer.endswith(".0")})
                text = f"no layer of the {denoiser.name} ({denoiser.kind}) is called {target}; its layers end in "
                yield "model.lora.targets", text + ", ".join(ends)
        adapted += [layer for layer in layers if matches(layer, lora.targets or ATTENTION_LAYERS)]
    encoders = {c.name for c in components if lora.text_encoders and is_text_encoder(c.name)}
    for pattern in lora.ranks if adapted else ():
        if pattern not in {d.name for d in denoisers} | encoders and not any(fits(pattern, layer) for layer in adapted):
            names = ", ".join(denoiser.name for denoiser in denoisers)
            text = f"no adapted layer's name ends in {pattern}, and no component is called so; components: {names}; "
            yield f"model.lora.ranks.{pattern}", text + f"a layer: {adapted[0]}"


def context_problems(config: Config, components: tuple[Component, ...]) -> Iterator[str]:
    """Why the tokens of this pipeline's samples cannot be divided as `distributed.context` says."""
    from genrl.diffusion.config.memory_estimate import text_tokens

    count = config.distributed.context
    vae = next((component.settings for component in components if component.name == "vae"), {})
    for denoiser in (component for component in components if component.name in DENOISERS) if count > 1 else ():
        if denoiser.kind not in DIVIDED:
            yield f"diffusers divides no tokens of a {denoiser.kind}, or none that was tested; write 1"
            continue
        heads = denoiser.settings.get("num_attention_heads")
        text = 0 if denoiser.kind.startswith("Wan") else text_tokens(config, components)
        numbers = [("heads of its attention", heads if isinstance(heads, int) else 0), ("tokens of its text", text)]
        evaluation = config.evaluation
        judged = {name: side for name in ("height", "width") if (side := getattr(evaluation, name)) is not None}
        evaluated = config.model_copy(update={"sampling": config.sampling.model_copy(update=judged)})
        for sized in (config, evaluated):
            counts = token_counts(sized, denoiser.settings, vae)
            numbers += [("tokens of a picture or video", number) for number in counts]
        for what, number in dict.fromkeys(numbers):
            if number % count:
                yield f"{denoiser.name} has {number} {what}, which {count} processes cannot share evenly"


@cache
def _published_table() -> Mapping[str, Any]:
    """`networks` by a name, and `pipelines`: hub id -> component -> name. benchmarks/published_shapes.py makes it."""
    table: Mapping[str, Any] = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
    return table


def published(source: str) -> tuple[Component, ...]:
    """The networks of a hub id; none where the table does not know it. Their bytes on disk are not known (0)."""
    names = _published_table()["pipelines"].get(source, {})
    return tuple(_published_component(part, _published_table()["networks"][name]) for part, name in names.items())


def _published_component(part: str, network: Mapping[str, Any]) -> Component:
    shapes = dict(unpacked(network["shapes"]))
    return Component(part, network["class"], sum(map(math.prod, shapes.values())), 0, shapes, network["settings"])

"""What a pipeline's class in diffusers says of itself, read from its source: no torch is imported for a check."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from math import lcm
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from genrl.diffusion.config.sections import Model, Sampling

CONSISTENCY = ("LCMScheduler", "TCDScheduler", "SCMScheduler", "FlowMatchLCMScheduler")
"""Schedulers of consistency models."""
NOT_DDIM = (
    "a consistency model jumps to the clean picture in each step and adds new noise, which no kernel does; train the "
    "model that it was distilled from, or a few-step model of another scheduler"
)


FAILS = {
    "ChromaInpaintPipeline": "fails in diffusers itself (it reads `guidance_embeds`, which no Chroma has)",
    "StableDiffusionAdapterPipeline": "decodes to arrays of numpy whatever output_type says, and rewards are given "
    "tensors; T2I-Adapters of SDXL (StableDiffusionXLAdapterPipeline) are decoded as tensors",
}
"""Pipelines that plain diffusers cannot run either, or not to tensors -> why."""
SPACED_BY = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas", "use_lu_lambdas")
OWN = "self.scheduler"
SINGLY = ("AutoencoderKLAllegro", "AutoencoderKLHunyuanVideo15")
"""VAEs that cannot decode several videos together."""
TILES = {"height": 120, "width": 80, "num_frames": 8}
"""By how much the tiles of an AutoencoderKLAllegro overlap, which decodes in no other way."""


class Loop(NamedTuple):
    """How the class that has `__call__` uses schedulers."""

    stepped: frozenset[str]
    """Whose `step` is called, as it is written there: self.scheduler."""
    in_part: bool
    """Whether each step is given a part of the latents alone."""
    reads: frozenset[str]
    """Members of the pipeline's own scheduler: sigmas, config.sigma_max."""
    writes: bool
    """Whether it writes the next state into its latents, in place."""


class Source(NamedTuple):
    """Of a class and the classes it derives from, as far as they are diffusers' own."""

    methods: frozenset[str]
    arguments: frozenset[str]
    """Of `__call__`."""
    bases: frozenset[str]
    strength: float | None
    """By default, of a pipeline that cuts its schedule by it; None where it does not."""
    undecorated: bool
    """Whether `__call__` is without a decorator, such as `torch.no_grad()`."""
    loop: Loop | None
    """None of a class without `__call__`."""


@cache
def source_of(name: str) -> Source | None:
    """None for a class that is not diffusers'."""
    text = _text_of(name)
    if text is None:
        return None
    methods, arguments, bases = set(re.findall(r"^    def (\w+)\(", text, re.MULTILINE)), set[str](), set[str]()
    strength: float | None = None
    decorated: bool | None = None
    loop: Loop | None = None
    if re.search(r"def get_timesteps\([^)]*\bsigmas\b", text):
        methods.remove("get_timesteps")  # cuts the noise levels before the scheduler is asked (LTX conditions)
    if "__call__" in methods:  # others are not parsed, which takes long
        source = _parsed(text)
        call = next(node for node in source.body if isinstance(node, ast.FunctionDef) and node.name == "__call__")
        arguments = {arg.arg for arg in (*call.args.args, *call.args.kwonlyargs)}
        decorated, loop = bool(call.decorator_list), _loop(source)
        strength = _default(call.args, "strength")
    heading = re.match(r"class \w+\(([^)]*)\)", text)
    for base in re.findall(r"\w+", heading[1]) if heading else ():
        bases.add(base)
        if inherited := source_of(base):
            methods |= inherited.methods
            bases |= inherited.bases
            if decorated is None:
                arguments, decorated = set(inherited.arguments), not inherited.undecorated
                strength, loop = inherited.strength, inherited.loop
    strength = strength if "get_timesteps" in methods else None
    return Source(frozenset(methods), frozenset(arguments), frozenset(bases), strength, not decorated, loop)


def _parsed(text: str) -> ast.ClassDef:
    node = ast.parse(text).body[0]
    assert isinstance(node, ast.ClassDef)
    return node


@cache
def _defaults(scheduler: str) -> dict[str, object]:
    """Constants that settings of a scheduler of this class have unless they are set."""
    text = _text_of(scheduler)
    members = [] if text is None else _parsed(text).body
    init = next((node for node in members if isinstance(node, ast.FunctionDef) and node.name == "__init__"), None)
    if init is None:
        return {}
    pairs = zip(reversed(init.args.args), reversed(init.args.defaults), strict=False)
    return {node.arg: value.value for node, value in pairs if isinstance(value, ast.Constant)}


@cache
def settings_of(scheduler: str) -> frozenset[str]:
    """What a scheduler of this class can be set to; empty for a class that is not diffusers'."""
    text = _text_of(scheduler)
    members = [] if text is None else _parsed(text).body
    inits = [node for node in members if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    return frozenset(arg.arg for node in inits for arg in node.args.args) - {"self"}


EULER = "FlowMatchEulerDiscreteScheduler"
PREDICTIONS = ("epsilon", "v_prediction", "sample")


def is_flow_scheduler(settings: Mapping[str, object]) -> bool:
    """Whether a scheduler of this configuration keeps its class in training."""
    return "FlowMatch" in str(settings.get("_class_name")) or bool(settings.get("use_flow_sigmas"))


def scheduler_refusal(kind: str, settings: Mapping[str, object]) -> str | None:
    """Why a scheduler of this class and these settings cannot be the policy: as a sentence. The one rule of the check,
    which reads a file, and of the policy, which has the object."""
    if kind in CONSISTENCY:
        return f"its scheduler is a {kind}: {NOT_DDIM}"
    if "Inverse" in kind:
        return f"its scheduler is a {kind}, which goes from the picture to the noise; give the one that draws pictures"
    known, source = settings_of(kind), source_of(kind)
    bases = {kind} if source is None else {kind, *source.bases}
    held = {name: settings.get(name, default) for name, default in _defaults(kind).items()} | dict(settings)
    advice = f"write {EULER} as _class_name in scheduler/scheduler_config.json, which has the same noise levels"
    if "FlowMatchHeun" in kind:  # its second half step starts from a state that is no sample of a transition
        return f"its scheduler is a {kind}, which calls the model twice a step and averages: no kernel does; {advice}"
    if EULER in bases:
        if held.get("stochastic_sampling"):
            return f"{kind} with stochastic_sampling has no deterministic step: set model.scheduler.stochastic_sampling"
        return None
    predicts = str(held.get("prediction_type", "epsilon"))
    if "stages" in known:
        return f"its scheduler is a {kind}, whose noise levels start anew in each of its stages: no kernel does"
    if held.get("use_flow_sigmas"):
        if kind == "SASolverScheduler" or str(held.get("algorithm_type", "")).startswith("sde"):
            return f"{kind} adds noise of its own in each step, so that evaluation has no deterministic step; {advice}"
        if predicts == "flow_prediction":
            return None
        return f"{kind} has use_flow_sigmas, but prediction_type {predicts}; set it to flow_prediction"
    if predicts == "flow_prediction":
        hint = "set use_flow_sigmas to true" if "use_flow_sigmas" in known else f"it has no flow sigmas; {advice}"
        return f"{kind} predicts a flow by the noise levels of a beta schedule: {hint}"
    if known and "beta_schedule" not in known or "beta_schedule" not in {*known, *settings}:
        return (
            f"the scheduler {kind} is neither a flow-matching scheduler nor one with a beta schedule: there is no "
            "Gaussian transition for it"
        )
    if predicts not in PREDICTIONS:
        return f"{kind} has prediction_type {predicts}; there are kernels for {', '.join(PREDICTIONS)} and flows"
    return None


def replaced_schedule(kind: str, settings: Mapping[str, object]) -> str | None:
    """Remark on settings of noise levels that DDIM, which takes the place of the scheduler, does not have."""
    lost = [name for name in SPACED_BY if settings.get(name)]
    if not lost or is_flow_scheduler(settings):
        return None
    spacing = settings.get("timestep_spacing", "leading")
    return f"{kind} spaces its noise levels by {', '.join(lost)}; training and evaluation go by DDIM's {spacing} steps"


def scheduler_problems(kind: str, settings: Mapping[str, object], *, is_flow: bool) -> Iterator[tuple[str, str]]:
    """(setting, text) of those that a scheduler of this class has not, or DDIM, which takes its place."""
    known, ddim = settings_of(kind), settings_of("DDIMScheduler")
    for name in settings if known else ():
        near = get_close_matches(name, known, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        if name not in known:
            yield name, f"a {kind} has no such setting; {meant}it has {', '.join(sorted(known))}"
        elif not is_flow and name not in ddim:
            yield name, f"DDIM, which takes the place of {kind} in training, has no such setting; remove it"


def _loop(pipeline: ast.ClassDef) -> Loop:
    nodes = list(ast.walk(pipeline))
    members = (_written(node) for node in nodes if isinstance(node, ast.Attribute))
    cut = {
        target.id
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Subscript)
        if any(isinstance(index, ast.Slice) for index in ast.walk(node.value.slice))
        for target in node.targets
        if isinstance(target, ast.Name) and target.id != _written(node.value.value)
    }
    stepped, in_part = set[str](), set[bool]()
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "step":
            whose = ast.unparse(node.func.value)  # which may be one of a list
            stepped |= {whose} if "scheduler" in whose else set()
            sample = node.args[2] if whose == OWN and len(node.args) > 2 else None
            later = isinstance(sample, ast.Subscript) and any(
                isinstance(index, ast.Slice) and index.lower is not None for index in ast.walk(sample.slice)
            )
            in_part.add(later or (isinstance(sample, ast.Name) and sample.id in cut))
    reads = frozenset(name.removeprefix(f"{OWN}.") for name in members if name.startswith(f"{OWN}."))
    writes = any(
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Subscript)
        and any(isinstance(inner, ast.Call) and _written(inner.func) == f"{OWN}.step" for inner in ast.walk(node.value))
        for node in nodes
    )
    return Loop(frozenset(stepped), in_part == {True}, reads, writes)


def _written(node: ast.expr) -> str:
    """A name with dots, as in the text, which `ast.unparse` takes long for; "" for what is no name."""
    if isinstance(node, ast.Name):
        return node.id
    inner = _written(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if isinstance(node, ast.Attribute) and inner else ""


def _default(arguments: ast.arguments, name: str) -> float | None:
    """Default of an argument that may be given by position, where it is a number."""
    named = [arg.arg for arg in arguments.args]
    defaults = dict(zip(reversed(named), reversed(arguments.defaults), strict=False)).get(name)
    return (
        float(defaults.value)
        if isinstance(defaults, ast.Constant) and isinstance(defaults.value, (int, float))
        else None
    )


def _text_of(name: str) -> str | None:
    """Source of a class; None where diffusers has none of this name."""
    text = _classes().get(name.encode())
    if text is None:
        return None
    end = re.search(rb"\n(?:def |@|if |\w+ = )", text)
    return f"class {text[: end.start() if end else None].decode()}"


@cache
def _classes() -> dict[bytes, bytes]:
    """Name -> source from there on, of pipelines and their parts; not of what stands in for them without torch. As
    bytes, since 700 files are read for a dozen classes."""
    package = importlib.util.find_spec("diffusers")
    if package is None or package.origin is None:
        return {}
    sources: dict[bytes, bytes] = {}
    for part in ("loaders", "models", "pipelines", "schedulers"):
        for folder, _, files in os.walk(os.path.join(os.path.dirname(package.origin), part)):
            for file in (file for file in files if file.endswith(".py")):
                with open(os.path.join(folder, file), "rb") as stream:
                    _, *classes = (b"\n" + stream.read()).split(b"\nclass ")
                sources |= {re.split(rb"\W", text, maxsplit=1)[0]: text for text in classes}
    return sources


def problems(pipeline: str, denoisers: dict[str, str], *, lora: bool) -> Iterator[tuple[str, str]]:
    """(key, text) of what keeps a pipeline of this class from training. denoisers: classes by component."""
    source = source_of(pipeline)
    if source is None:  # a class of its own, which only loading shows
        return
    if "AudioPipelineOutput" in (_text_of(pipeline) or ""):
        text = (
            "makes sounds, and the rewards of pipelines are given pictures and videos; for sounds see docs/music_rl.md"
        )
        yield "model.path", f"{pipeline} {text}"
        return
    if "prompt" not in source.arguments:
        yield "model.path", f"{pipeline} draws without a prompt; give a pipeline that takes one"
        return
    for method in ("prepare_latents", "encode_prompt"):
        if method not in source.methods:
            yield "model.path", f"{pipeline} has no `{method}`: its loop cannot be resumed from a recorded state"
    if source.undecorated:
        yield "model.path", f"{pipeline}.__call__ is not decorated by torch.no_grad(): nothing to replay with"
    if not lora:
        return
    for network in denoisers.values():
        network_source = source_of(network)
        if network_source is not None and "PeftAdapterMixin" not in network_source.bases:
            yield "model.lora", f"diffusers has no adapters for a {network}; write lora: null to train all weights"


def loop_problems(pipeline: str, *, is_flow: bool, branches: bool) -> Iterator[tuple[str, str]]:
    """(key, text) of what keeps the loop of this class from being run step by step. is_flow: whether its scheduler
    keeps its class, or DDIM takes its place; branches: whether a state goes on in several ways."""
    source = source_of(pipeline)
    if pipeline in FAILS:
        yield "model.path", f"{pipeline} {FAILS[pipeline]}"
    if source is None or source.loop is None:
        return
    loop = source.loop
    if others := sorted(loop.stepped - {OWN}):
        yield "model.path", f"{pipeline} steps {', '.join(others)} too or instead, and only {OWN} is the policy"
    if loop.in_part:
        yield "model.path", f"{pipeline} denoises only part of its latents, so that no state can be resumed"
    if "config.sigma_max" in loop.reads:
        text = "adds noise of any size to its latents, where a flow goes from one to the other: no kernel does"
        yield "model.path", f"{pipeline} {text}"
    elif "sigmas" in loop.reads and not is_flow:
        yield "model.path", f"{pipeline} reads `sigmas` of its scheduler, which DDIM, taking its place, has not"
    if branches and "mask_image" in source.arguments:
        text = f"samples of a {pipeline} cannot branch: it blends the picture into its states between steps, of which"
        yield "trainer", f"{text} it knows one per prompt; draw independent samples"


def vae_problems(vae: str, settings: Mapping[str, Any], model: Model, sampling: Sampling) -> Iterator[tuple[str, str]]:
    """(key, text) of what a VAE of this class and configuration cannot decode."""
    if vae in SINGLY and not model.slice_vae:
        yield "model.slice_vae", f"{vae} decodes one video at a time only; write true"
    if vae != "AutoencoderKLAllegro":
        return
    if not model.tile_vae:
        yield "model.tile_vae", f"{vae} decodes in tiles only; write true"
    for name, overlap in TILES.items():
        side, tile = getattr(sampling, name), 24 if name == "num_frames" else int(settings.get("sample_size", 320))
        step = lcm(tile - overlap, 16)  # sides are multiples of 16
        fits = tile + max(0, round(((side or tile) - tile) / step)) * step
        if side not in (None, fits):
            text = f"its VAE decodes tiles of {tile} that overlap by {overlap}, and leaves the rest black"
            yield f"sampling.{name}", f"{text}; write {fits} for {side}"


def strength_problem(pipeline: str, arguments: Mapping[str, object]) -> str | None:
    """What is wrong with the `strength` among a call's arguments: that it has a meaning of its own here, or that the
    pipeline cuts its schedule although none is given."""
    source = source_of(pipeline)
    if source is None:
        return None
    strength = arguments.get("strength")
    if strength is None and source.strength is not None and source.strength < 1.0:
        return (
            f"a {pipeline} leaves out part of its schedule (strength {source.strength:g}) unless told; write 1, or "
            f"{source.strength:g} to have sampling.num_inference_steps left of a longer one"
        )
    if strength not in (None, 1, 1.0) and "strength" in source.arguments and source.strength is None:
        return f"a {pipeline} does not cut its schedule by it, so steps would be counted wrongly; write 1"
    return None

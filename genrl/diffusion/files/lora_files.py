"""LoRA files of every program, as peft's layers of a pipeline's networks: whose each key is, and at which strength.

A key names a network, a layer and a part. The network is written before the layer (`transformer.`, `unet.`), in a
wrapper's words (`base_model.model.`, `diffusion_model.`) or not at all; the layer with dots, or with underscores as
kohya's scripts have it; the part in the words of peft, kohya or old diffusers. All that counts is that the layer is one
of the network's own: what cannot be resolved so is left to diffusers' converters, which know the original names of a
few families.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from genrl.config.folders import file_problem, hub_file, read_json
from genrl.diffusion.config.model_rules import is_text_encoder

STANDARD = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
"""What diffusers and peft call their file."""
SETTINGS = "adapter_config.json"
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways of beginning a LoRA, of peft's, that take as much from the model as they put into the adapter."""
MORE_THAN_LORA = (
    *("modules_to_save", "trainable_token_indices", "target_parameters", "layer_replication"),
    *("alora_invocation_tokens", "use_qalora", "use_bdlora", "kasa_config", "arrow_config", "monteclora_config"),
)
"""Settings of peft's by which an adapter is more, or acts otherwise, than the products that are read here."""
HEADER = "lora_adapter_metadata"
"""Under which diffusers keeps peft's settings in the header of a file."""
WRAPPERS = ("base_model.model.", "model.diffusion_model.", "diffusion_model.", "module.", "_orig_mod.", "model.")
PARTS = {
    "lora_A": r"lora_A|lora_down|lora(?:_linear_layer)?\.down",
    "lora_B": r"lora_B|lora_up|lora(?:_linear_layer)?\.up",
    "lora_magnitude_vector": r"lora_magnitude_vector|dora_scale",
    "alpha": r"alpha",
}
"""Part of an adapter in peft's words -> in everybody's."""
KEY = re.compile(
    rf"(?P<layer>.+?)\.(?P<part>{'|'.join(PARTS.values())})(\.(?!weight$|bias$)\w+)?(\.(?P<kind>weight|bias))?"
)
OLD = re.compile(r"\.processor\.(to_[a-z]+)_lora\.(down|up)\.")
"""Layers within attention processors, as diffusers wrote them in 2023."""
UNDERSCORED = {
    "lora_unet_": None,
    "lora_transformer_": None,
    "lycoris_": None,
    "lora_te_": "text_encoder",
    "lora_te1_": "text_encoder",
    "lora_te2_": "text_encoder_2",
    "lora_te3_": "text_encoder_3",
}
"""kohya's prefixes -> component; None = the denoiser."""
LOKR = ".lokr_"


@dataclass(frozen=True)
class LoRAFile:
    """Tensors by key; settings: peft's, of an adapter_config.json beside the file; header: those in the file."""

    path: Path
    tensors: dict[str, Tensor]
    settings: dict[str, Any]
    header: dict[str, Any]


@dataclass
class Layers:
    """Adapter of one network: peft's names of tensors without the adapter's, alphas by layer; settings that came with
    it, empty where none did."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    alphas: dict[str, float] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """Layers that it adapts."""
        return {key.partition(".lora_")[0] for key in self.tensors}


def locate(source: str) -> Path:
    """The file of a LoRA: a file, the one of a folder, or of the hub. Raises ValueError where it is not there, or the
    folder has several and none has a standard name."""
    path = Path(source).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        names = sorted(file.name for file in path.glob("*.safetensors"))
        return path / _chosen(names, f"the folder {source}", f"give {source}/FILE")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w./-]+\.safetensors)?", source):
        text = "no such folder (a hub id is written org/name, or org/name:file.safetensors)"
        raise ValueError(f"the LoRA {source!r} is not there: {text}")
    name, file = hub_file(source)
    if file is None:
        file = _chosen(_listed(name), f"the hub's {name}", f"write {name}:FILE")
    local_file = Path(huggingface_hub.hf_hub_download(name, file))
    if Path(file).name == STANDARD[1]:
        huggingface_hub.hf_hub_download(name, str(Path(file).with_name(SETTINGS)))  # without it the strength is lost
    return local_file


def _listed(name: str) -> list[str]:
    """Files of a repository that may be the LoRA; offline those of standard names that are in the cache."""
    try:
        return [k for k in huggingface_hub.list_repo_files(name) if k.endswith(".safetensors") and "/" not in k]
    except Exception:  # of the network, in several families of errors
        cached = [k for k in STANDARD if isinstance(huggingface_hub.try_to_load_from_cache(name, k), str)]
        if not cached:
            raise
        return cached


def _chosen(names: list[str], where: str, advice: str) -> str:
    standard = [name for name in STANDARD if name in names]
    if len(names) == 1 or len(standard) == 1:
        return (standard or names)[0]
    if not names:
        raise ValueError(f"{where} holds no LoRA: there is no .safetensors file in it")
    raise ValueError(f"{where} has {len(names)} files ({', '.join(names[:6])}): {advice} to say which")


def read(path: Path) -> LoRAFile:
    """A file with its settings. Raises ValueError for one that is cut, no safetensors, or has numbers that are not
    finite."""
    if problem := file_problem(path):
        raise ValueError(f"{path.name} {problem}")
    try:
        with safe_open(path, framework="pt") as opened:
            metadata = dict(opened.metadata() or {})
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path.name} is no safetensors file: {error}") from error
    whole = [name for name, value in tensors.items() if not value.is_floating_point() and not name.endswith("alpha")]
    if whole:
        raise ValueError(f"{len(whole)} of its tensors hold whole numbers, whose scale is not known: {first(whole)}")
    tensors = {name: value.float() if value.itemsize == 1 else value for name, value in tensors.items()}  # of 8 bits
    broken = [name for name, value in tensors.items() if not value.isfinite().all()]
    if broken:
        raise ValueError(f"{len(broken)} of its tensors hold numbers that are not finite: {first(broken)}")
    try:
        header = json.loads(metadata.get(HEADER, "{}"))
    except ValueError as error:
        raise ValueError(f"{path.name}: {HEADER} in its header is not JSON: {error}") from error
    settings = read_json(path.parent / SETTINGS)
    if not settings and (path.parent / SETTINGS).is_file():
        raise ValueError(f"{SETTINGS} beside it, which has its strength, holds no JSON object")
    if settings and settings.get("peft_type", "LORA") != "LORA":
        raise ValueError(f"{SETTINGS} is of a {settings['peft_type']}, which diffusers does not load; give a LoRA")
    begun = str(settings.get("init_lora_weights", True)).lower()
    if begun.startswith(CHANGES_BASE):
        text = (
            f"{SETTINGS}: init_lora_weights: {begun} changed the weights of the model itself, which are not in the file"
        )
        raise ValueError(f"{text}; save it by peft's save_pretrained(..., path_initial_model_for_weight_conversion)")
    beside = path.name == STANDARD[1] or not (path.parent / STANDARD[1]).is_file()  # settings are of peft's file
    return LoRAFile(path, tensors, settings if beside else {}, header if isinstance(header, dict) else {})


def resolve(file: LoRAFile, networks: Mapping[str, nn.Module], denoiser: str) -> tuple[dict[str, Layers], list[str]]:
    """(adapters by component, keys that are none of these networks'). denoiser: the component that is meant where a
    key names none."""
    modules = {
        name: {key.replace(".base_layer", ""): part for key, part in network.named_modules() if key}
        for name, network in networks.items()
    }
    flat = {name: {key.replace(".", "_"): key for key in keys} for name, keys in modules.items()}
    layers: dict[str, Layers] = {}
    unknown: list[str] = []
    for key, value in file.tensors.items():
        match = KEY.fullmatch(OLD.sub(lambda m: f".{m[1]}{'.0' if m[1] == 'to_out' else ''}.lora.{m[2]}.", key))
        place = _place(match["layer"], modules, flat, denoiser) if match else None
        if match is None or place is None:
            unknown.append(key)
            continue
        component, layer = place
        part = next(name for name, pattern in PARTS.items() if re.fullmatch(pattern, match["part"]))
        adapter = layers.setdefault(component, Layers())
        if part == "alpha" and value.numel() != 1:
            raise ValueError(f"{key} holds {value.numel()} numbers; an alpha is one")
        if part == "alpha":
            adapter.alphas[layer] = float(value)
            continue
        shaped = _shaped(value, part, modules[component][layer])
        name = f"{layer}.{part}" + ("" if part == "lora_magnitude_vector" else f".{match['kind'] or 'weight'}")
        if name in adapter.tensors:
            raise ValueError(f"it has {name} of the {component} twice, once as {key}")
        adapter.tensors[name] = shaped
    for component, adapter in layers.items():
        _require_pairs(component, adapter, modules[component])
        header = {k.removeprefix(f"{component}."): v for k, v in file.header.items() if k.startswith(f"{component}.")}
        prefix = component.removesuffix("_2")
        header = header or {
            k.removeprefix(f"{prefix}."): v for k, v in file.header.items() if k.startswith(f"{prefix}.")
        }
        bare = file.header if component == denoiser and "r" in file.header else {}
        adapter.settings = header or bare or (file.settings if component == denoiser else {})
    return layers, unknown


def _place(
    layer: str, modules: Mapping[str, Mapping[str, nn.Module]], flat: Mapping[str, Mapping[str, str]], denoiser: str
) -> tuple[str, str] | None:
    """(component, layer) of a name."""
    for prefix, component in UNDERSCORED.items():
        name = component or denoiser
        if layer.startswith(prefix) and name in flat:
            suffix = layer.removeprefix(prefix)
            module = flat[name].get(suffix) or flat[name].get(suffix.removeprefix("text_model_"))
            return None if module is None else (name, module)
    while True:
        # Longest first: text_encoder is the beginning of text_encoder_2, too.
        for name in sorted(modules, key=len, reverse=True):
            spelt = name if name != denoiser else denoiser.removesuffix("_2")
            if layer.startswith(f"{spelt}."):
                suffix = layer.removeprefix(f"{spelt}.")
                for inner in (suffix, suffix.removeprefix("text_model.")):
                    if inner in modules[name]:
                        return name, inner
        if layer in modules[denoiser]:
            return denoiser, layer
        wrapper = next((prefix_wrapper for prefix_wrapper in WRAPPERS if layer.startswith(prefix_wrapper)), None)
        if wrapper is None:
            return None
        layer = layer.removeprefix(wrapper)


def _shaped(value: Tensor, part: str, module: nn.Module) -> Tensor:
    """Bring a matrix into the dimensions of the layer: some programs keep matrices of linear layers as convolutions of
    1 x 1, or those as matrices."""
    if part == "lora_magnitude_vector":
        return value.flatten() if value.dim() == 2 and value.shape[1] == 1 else value
    if isinstance(module, nn.Linear) and value.dim() == 4 and value.shape[2:] == (1, 1):
        return value.flatten(1)
    if isinstance(module, nn.Conv2d) and value.dim() == 2:
        return value[:, :, None, None]
    return value


def _require_pairs(component: str, adapter: Layers, modules: Mapping[str, nn.Module]) -> None:
    """Raise ValueError for a layer with half an adapter, or one of another size."""
    for layer in sorted(adapter.names | adapter.alphas.keys()):
        down, up = (adapter.tensors.get(f"{layer}.{part}.weight") for part in ("lora_A", "lora_B"))
        if down is None or up is None:
            lacks = "lora_A (down)" if down is None else "lora_B (up)"
            raise ValueError(f"the layer {layer} of the {component} has no {lacks}: the file is not whole")
        module = modules[layer]
        module = getattr(module, "base_layer", module)
        weight = getattr(module, "weight", None)
        sizes = (down.shape[1], up.shape[0])
        expected = (getattr(module, "in_features", None), getattr(module, "out_features", None))
        if expected == (None, None) and isinstance(weight, Tensor) and weight.dim() > 1:
            expected = (weight.shape[1] * getattr(module, "groups", 1), weight.shape[0])
        if down.shape[0] != up.shape[1] or None in expected or sizes != expected:
            raise ValueError(
                f"it is of another model: its layer {layer} goes from {sizes[0]} to {sizes[1]} by rank "
                f"{down.shape[0]} and {up.shape[1]}, that of the {component} from {expected[0]} to {expected[1]}"
            )
    dora = {key.partition(".lora_")[0] for key in adapter.tensors if key.endswith("lora_magnitude_vector")}
    if dora and dora != adapter.names:
        lacking = sorted(adapter.names - dora)
        raise ValueError(f"{len(lacking)} of its layers have no magnitude, as others have: {first(lacking)}")
    for layer in dora:
        length, rows = adapter.tensors[f"{layer}.lora_magnitude_vector"], adapter.tensors[f"{layer}.lora_B.weight"]
        if length.dim() != 1 or len(length) != len(rows):
            text = "its magnitudes are of the layer's inputs, and peft has those of its outputs"
            raise ValueError(f"{layer} is a DoRA of {list(length.shape)}: {text}")


def peft_settings(adapter: Layers, network: nn.Module, component: str) -> tuple[dict[str, Any], str]:
    """(settings for peft's LoraConfig, whence the strength comes). Raises ValueError where settings that came with the
    file are of other layers or ranks."""
    ranks = {layer: adapter.tensors[f"{layer}.lora_A.weight"].shape[0] for layer in adapter.names}
    dora = any(key.endswith("lora_magnitude_vector") for key in adapter.tensors)
    bias = any(key.endswith("lora_B.bias") for key in adapter.tensors)
    own_settings, alphas, rslora = adapter.settings, dict(adapter.alphas), False
    whence = "its own alphas"
    if own_settings:
        whence = "its settings"
        rslora = bool(own_settings.get("use_rslora"))
        _require_plain(own_settings, dora=dora, bias=bias)
        for layer, rank in ranks.items():
            rank_of_layer = _pattern(own_settings.get("rank_pattern"), layer, own_settings.get("r", rank))
            if rank != rank_of_layer:
                raise ValueError(f"its settings say rank {rank_of_layer!r} of {layer}, whose tensors have {rank}")
            alpha = float(_pattern(own_settings.get("alpha_pattern"), layer, own_settings.get("lora_alpha", rank)))
            if "lora_alpha" in own_settings and layer in alphas and alphas[layer] != alpha:
                raise ValueError(f"its settings say alpha {alpha:g} of {layer}, the tensor beside it {alphas[layer]:g}")
            alphas.setdefault(layer, alpha)
        _require_targets(own_settings, adapter, network, component)
    elif not alphas:
        whence = "no alpha in the file: taken as the rank"
    elif lacking := sorted(adapter.names - alphas.keys()):
        raise ValueError(f"{len(lacking)} of its layers have no alpha, as others have: {first(lacking)}")
    odd = [layer for layer, alpha in alphas.items() if not 0 < abs(alpha) < float("inf")]
    if odd:
        raise ValueError(f"the alpha of {first(odd)} is {alphas[odd[0]]:g}: it is finite and not 0")
    alphas = {layer: alphas.get(layer, float(rank)) for layer, rank in ranks.items()}
    rank = Counter(ranks.values()).most_common(1)[0][0]
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    settings = {
        "r": rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        # Anchored and escaped, else a layer's pattern would match others that end in its name.
        "rank_pattern": {f"^{re.escape(k)}": n for k, n in ranks.items() if n != rank},
        "alpha_pattern": {f"^{re.escape(k)}": n for k, n in alphas.items() if n != alpha},
        "target_modules": _targets(adapter, network),
        "use_dora": dora,
        "use_rslora": rslora,
        "lora_bias": bias,
    }
    return settings, f"rank {rank}, alpha {alpha:g} ({whence})"


def _require_plain(settings: Mapping[str, Any], *, dora: bool, bias: bool) -> None:
    """Raise ValueError for settings of which something is not in the file, or not done here."""
    if more := [key for key in MORE_THAN_LORA if settings.get(key)]:
        raise ValueError(f"its settings have {first(more)}, of which a pipeline's LoRA has nothing")
    for key, has in (("use_dora", dora), ("lora_bias", bias)):
        if settings.get(key) and not has:
            raise ValueError(f"its settings say {key}, and the file has no tensors of that")
    if odd := [key for key in ("rank_pattern", "alpha_pattern") if not isinstance(settings.get(key) or {}, dict)]:
        raise ValueError(f"{odd[0]} of its settings is no object")


def _pattern(patterns: Mapping[str, Any] | None, layer: str, default: Any) -> Any:
    """Value for a layer, as peft matches `rank_pattern` and `alpha_pattern`."""
    matches = (value for key, value in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", layer))
    return next(matches, default)


def _targets(adapter: Layers, network: nn.Module) -> list[str] | str:
    """Names of the layers for peft, which takes what ends in a name, too: then as one expression."""
    ends = {key[place + 1 :] for key, _ in network.named_modules() for place, dot in enumerate(key) if dot == "."}
    names = sorted(adapter.names)
    return names if adapter.names.isdisjoint(ends) else "|".join(map(re.escape, names))


def _require_targets(settings: Mapping[str, Any], adapter: Layers, network: nn.Module, component: str) -> None:
    """Raise ValueError where layers that the settings name are not in the file."""
    targets = settings.get("target_modules")
    if not targets or settings.get("layers_to_transform") is not None or settings.get("exclude_modules"):
        return
    linear = [k.replace(".base_layer", "") for k, m in network.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    linear = [key for key in linear if ".lora_" not in key]
    if isinstance(targets, str):
        meant = {key for key in linear if targets == "all-linear" or re.fullmatch(targets, key)}
    else:
        meant = {key for key in linear if any(key == t or key.endswith(f".{t}") for t in targets)}
    if lacking := sorted(meant - adapter.names):
        raise ValueError(
            f"it lacks {len(lacking)} of the {len(meant)} layers of the {component} that its settings name: "
            f"{first(lacking)}"
        )


def networks_of(pipe: Any, denoisers: list[str]) -> Iterator[tuple[str, nn.Module]]:
    """Components that a LoRA may adapt."""
    for name, part in pipe.components.items():
        if isinstance(part, nn.Module) and (name in denoisers or is_text_encoder(name)):
            yield name, part


def converted(file: LoRAFile, pipe: Any) -> LoRAFile:
    """The file by the names of diffusers, whose converters know the original ones of a few families. Raises ValueError
    where a converter does not know this one, or leaves something out: it splits and renames, and loses no number."""
    unet = getattr(pipe, "unet", None)
    more = {"unet_config": unet.config} if unet is not None else {}
    state = type(pipe).lora_state_dict(str(file.path.parent), weight_name=file.path.name, use_safetensors=True, **more)
    tensors, alphas = (state[0], state[1]) if isinstance(state, tuple) else (state, None)
    tensors = dict(tensors) | {key: torch.tensor(float(value)) for key, value in (alphas or {}).items()}
    magnitudes, others = (
        r"dora_scale|magnitude",
        r"(lora_A|lora_down|lora(_linear_layer)?\.down)\b|alpha$|dora|magnitude",
    )
    for what, pattern, inverse in (("DoRA magnitudes", magnitudes, False), ("weights", others, True)):
        before, here = (_amount(tensors_of, pattern, inverse) for tensors_of in (file.tensors, tensors))
        if abs(before - here) > 1e-3 * before:
            raise ValueError(f"diffusers' converter leaves out {what} of the file: {before} numbers become {here}")
    return LoRAFile(file.path, tensors, {}, {})


def _amount(tensors: Mapping[str, Tensor], pattern: str, inverse: bool) -> int:
    """Numbers other than 0 of the tensors whose key has this pattern, or has it not."""
    return sum(int(torch.count_nonzero(v)) for key, v in tensors.items() if bool(re.search(pattern, key)) != inverse)


def first(keys: list[str]) -> str:
    """The first of many keys, in one line."""
    return ", ".join(keys[:3]) + (", ..." if len(keys) > 3 else "")

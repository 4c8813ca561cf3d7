"""A trained model as transformers and PEFT save it, a model as a run left it, and one in shards (FSDP2) over several
processes, whose weights leave it as a checkpoint has them: names, shapes, adapters merged.

In the passes of an update each process holds a share of the weights, and a block's are whole while it computes. Of
gradients and optimiser state it holds a share at all times, where all weights are trained; adapters are whole. While
processes answer, estimate log-probabilities and evaluate, each makes as many passes as it needs, so each holds all
weights beside its share (`gathered`): the most memory that these phases take is not reduced.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.core_model_loading import revert_weight_conversion

from genrl.config.plugins import find
from genrl.runtime.folder import checkpoint
from genrl.runtime.folder.hub import own_files
from genrl.runtime.weights.sharding import Sharding, reshard_layers, shard, unsharded, whole
from genrl.runtime.weights.weights import put_back, result
from genrl.vlm.config.names import OUTPUTS
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.policies.codes import CODEC
from genrl.vlm.policies.contract import SequencePolicy, members
from genrl.vlm.policies.loading import loaded
from genrl.vlm.policies.policy import Body, Policy
from genrl.vlm.policies.processor import Prompt
from genrl_rewards.given import is_given

if TYPE_CHECKING:
    from peft import PeftModel


def hold(config: VLMConfig, *policies: Policy) -> None:
    """Hold policies in shards from here on, where the run asks for it.

    The decoder's layers are gathered one by one; all else, the output layer and the vision tower too, once for a pass:
    some have no pictures. Weights that are trained in half precision are float32 as shares, and rounded when gathered.
    Raises ValueError where this torch cannot.
    """
    if not config.distributed.fsdp:
        return
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ValueError(
            f"distributed.fsdp: torch {torch.__version__} cannot hold vision-language models in shards; take 2.13, or "
            "write false"
        )
    sharding = Sharding.over(config.distributed.fsdp, policies[0].device)
    for policy in policies:
        model, compute = policy.model.to("cpu"), None  # modules come to the device again one at a time
        if all(p.requires_grad for p in model.parameters()) and policy.dtype != torch.float32:
            compute = policy.dtype
            for parameter in model.parameters():
                parameter.data = parameter.data.float()
        layers: list[Any] = [
            layer for m in model.get_decoder().children() if isinstance(m, nn.ModuleList) for layer in m
        ]
        policy.sharded = body = cast(Any, Body(model))
        shard(body, layers, sharding, compute=compute)
        reshard_layers(body, after_forward=True)
        # A process whose passes have no pictures has no gradients of the vision tower, and must take part in their sum.
        body.set_reduce_scatter_unused_params(True)
        # by default the backward pass goes by the last passes, which may have been some process's own
        for layer, before in zip(layers, [body, *layers], strict=False):
            layer.set_modules_to_backward_prefetch([before])


def gathered(policy: Any) -> AbstractContextManager[None]:
    """Within the block this process has all weights, where the policy is in shards (`sharding.unsharded`)."""
    body: nn.Module | None = getattr(policy, "sharded", None)
    return nullcontext() if body is None else unsharded(body)


def idle_pass(policy: Policy, further: int = 0) -> Tensor:
    """The loss of a pass that teaches nothing, 0: for a process without answers while others make a pass with theirs.
    further: passes without gradient after it."""
    question = policy.encode(Prompt(("-",)))
    tokens = torch.tensor([policy.stop_ids[:1]])
    answer = [question], tokens, torch.ones_like(tokens)
    loss = 0.0 * policy.log_probs(*answer, group=torch.tensor([0])).log_prob.sum()
    with torch.no_grad():
        for _ in range(further):
            policy.log_probs(*answer, group=torch.tensor([0]))
    return loss


class Stream(NamedTuple):
    """Weights that are there one layer at a time. names: of all of them; tensors: once, in any order."""

    names: list[str]
    tensors: Iterable[tuple[str, Tensor]]


def stream_of(policy: Policy) -> Stream:
    """Every weight, and every buffer that is saved, by its name in a checkpoint. The policy stays as it is: merged are
    copies, and nothing is rounded twice; the others are the policy's own tensors. Weights that are tied stand under one
    of their names. Of a policy in shards each layer is gathered when its turn comes, so all processes go through it."""
    layers = _layers(policy)

    def names() -> Iterator[str]:
        for layer in layers:
            blank = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in layer}
            yield from revert_weight_conversion(policy.model, blank)

    return Stream(list(names()), _tensors(policy, layers))


def checkpoint_weights(policy: Policy) -> dict[str, Tensor]:
    """All of `stream_of`."""
    return dict(stream_of(policy).tensors)


Layer = list[tuple[str, Tensor]]


def _layers(policy: Policy) -> list[Layer]:
    """The policy's own tensors, base weights in place of adapted ones, those of a layer together: names and shapes in
    a checkpoint may be made of several of them. What is in no layer comes first."""
    saved = policy.model.state_dict().keys()
    layer: Layer = [(name, value) for name, value in policy.model.named_parameters() if ".lora_" not in name]
    layer += [(name, value) for name, value in policy.model.named_buffers() if name in saved]
    layers: dict[str, Layer] = {"": []}
    for name, value in layer:
        inside = re.match(r".*?\.\d+\.", name)
        layers.setdefault(inside[0] if inside else "", []).append((name.replace(".base_layer.", "."), value))
    return list(layers.values())


@torch.no_grad()
def _tensors(policy: Policy, layers: Iterable[Layer]) -> Iterator[tuple[str, Tensor]]:
    adapted = {f"{name}.weight": m for name, m in policy.model.named_modules() if hasattr(m, "get_delta_weight")}
    for layer in layers:
        tensors = {}
        for name, value in layer:
            dtype = policy.dtype if isinstance(value, DTensor) else value.dtype  # shares may be finer than the model
            tensor = whole(value.detach())
            if name in adapted:
                tensor = tensor + adapted[name].get_delta_weight("default")
            tensors[name] = tensor.to(dtype)
        yield from revert_weight_conversion(policy.model, tensors).items()


SEE = "see genrl/vlm/policies/contract.py"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")


def open_policy(config: VLMConfig, device: str | torch.device = "cpu", path: str | None = None) -> Policy:
    """The model that a run trains, as it is before training.

    Raises ValueError as the policy's `open` does, and for a class that is no policy, naming what it lacks.
    """
    kind: Any = find(config.vlm.output, OUTPUTS)
    opened = getattr(kind, "open", None)
    if not isinstance(kind, type) or opened is None:
        raise ValueError(
            f"vlm.output: {config.vlm.output} is no policy: a class with open(config, device, path), {SEE}"
        )
    policy: Any = opened(config, device, path or config.vlm.path)
    has_interface = isinstance(policy, Policy | SequencePolicy)
    if not has_interface:
        lacks = ", ".join(name for name in members() if not hasattr(policy, name))
        raise ValueError(f"vlm.output: {config.vlm.output} has no {lacks}, {SEE}")
    return policy  # type: ignore[no-any-return]  # used as a Policy where both can the same


def load_trained(config: VLMConfig, run: Path, step: int | None = None, device: str = "cpu") -> Policy:
    """The model of a run's checkpoint, the newest one or that after `step` iterations; its average, where there is one.

    Raises ValueError where there is none.
    """
    folder = run / "checkpoints"
    saved = checkpoint.latest(folder) if step is None else folder / f"step-{step:06d}"
    if saved is None or not saved.is_dir():
        have = ", ".join(path.name for path in sorted(folder.glob("step-*"))) or "none"
        raise ValueError(
            f"{run} has no checkpoint {'' if step is None else f'after {step} iterations'}; there are {have}"
        )
    policy = open_policy(config, device)
    trained = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
    weights = result(checkpoint.load(saved).tensors)
    if any(name.startswith("baseline.") for name in weights):  # MusicRL trains two models
        weights = {name.removeprefix("policy."): v for name, v in weights.items() if name.startswith("policy.")}
    put_back(trained, weights, saved)
    return policy


def _merged(policy: Policy, adapted: PeftModel, source: str) -> Any:
    """The model with its adapter merged in; on quantised weights, which would round it, into those of the source."""
    if getattr(policy, "quantized", False):  # other policies than `Policy` never are
        from peft import PeftModel

        with TemporaryDirectory() as place:
            adapted.save_pretrained(place)
            adapted = PeftModel.from_pretrained(loaded(source, policy.dtype).model, place)
    return adapted.merge_and_unload()


def save_model(policy: Policy, source: str, out: Path, *, full: bool = False) -> Path:
    """Write `out`: the whole model with its processor, or the adapter of a LoRA (full: merged into the model).

    source: what the model was loaded from; its tokenizer and processor files are copied as they are.
    """
    out.mkdir(parents=True, exist_ok=True)
    if is_given(source):
        source = policy.model.config.name_or_path or source
    if policy.peft is not None and not full:
        # PEFT notes where the model came from, which of a script's is nowhere; who loads the adapter looks there.
        policy.peft.peft_config["default"].base_model_name_or_path = source
        policy.peft.save_pretrained(str(out))
        return out
    model = policy.model if policy.peft is None else _merged(policy, policy.peft, source)
    model.save_pretrained(out)
    if Path(source).is_dir():
        for file in own_files(Path(source)):  # a link may lead to what is nobody else's business
            is_copied = file.name == CODEC or not file.name.endswith(WEIGHTS)
            if is_copied and not (out / file.name).exists():
                shutil.copy(file, out / file.name)
        return out
    policy.tokenizer.save_pretrained(out)
    if policy.processor is not None:
        parts = ("image_processor", "feature_extractor")  # the second is MusicGen's
        next(getattr(policy.processor, part) for part in parts if hasattr(policy.processor, part)).save_pretrained(out)
        if policy.processor.chat_template:
            (out / "chat_template.jinja").write_text(policy.processor.chat_template, encoding="utf-8")
    return out

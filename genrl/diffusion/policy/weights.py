"""What is trained, and its named snapshots: the reference, the old policy, the average for evaluation.

One mechanism serves them all: a snapshot is a list of tensors beside the trainable parameters, exchanged with them by
pointer for the length of a `with` block. With LoRA that is a second copy of the adapter, never of the base weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from diffusers.loaders import PeftAdapterMixin
from peft import LoraConfig as PeftLoraConfig
from torch import Tensor, nn

from genrl.config import LoRA
from genrl.config.schema import ATTENTION_LAYERS
from genrl.diffusion.policy.sharding import gathered, like, shard

ADAPTER = "default"
AVERAGE = "average"
REFERENCE = "reference"


class Weights:
    """The trainable parameters of one or more denoisers and their snapshots.

    denoisers: by component name; lora: the adapter to add in place, or None to train every parameter.
    Trainable parameters are float32 whatever the dtype of the frozen ones. Raises ValueError where no layer matches.
    """

    def __init__(
        self, denoisers: Mapping[str, nn.Module], lora: LoRA | None, *, seed: int = 0, sharded: bool = False
    ) -> None:
        self.denoisers = dict(denoisers)
        self.is_lora = lora is not None
        self.is_sharded = sharded
        self.by_copy = sharded
        """Whether snapshots are exchanged by copies: FSDP gathers from memory of its own, and CUDA graphs read where
        they were recorded; a change of pointer reaches neither."""
        for name, denoiser in self.denoisers.items():
            if lora is None:
                denoiser.requires_grad_(True)
            else:
                peft_config = _peft_config(name, denoiser, lora)
                # The adapter's initial values depend on the run's seed alone. peft draws them on the CPU, wherever the
                # model is; the generators of other devices are left alone.
                with torch.random.fork_rng(devices=[]):
                    torch.default_generator.manual_seed(seed)
                    denoiser.add_adapter(peft_config, adapter_name=ADAPTER)
            for parameter in denoiser.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
            if sharded:
                shard(denoiser)
        self.named: dict[str, nn.Parameter] = {
            f"{name}.{key}": parameter
            for name, denoiser in self.denoisers.items()
            for key, parameter in denoiser.named_parameters()
            if parameter.requires_grad
        }
        self.snapshots: dict[str, dict[str, Tensor]] = {}

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.named.values())

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters)

    def snapshot(self, name: str) -> None:
        """Keep a copy of the present values under `name` (an older one of that name is replaced)."""
        self.snapshots[name] = {key: p.detach().clone() for key, p in self.named.items()}

    @torch.no_grad()
    def take(self, name: str) -> None:
        """The present values become those of snapshot `name`, which stays."""
        self._fill(self.snapshots[name])

    @torch.no_grad()
    def blend(self, name: str, decay: float) -> None:
        """snapshot <- decay * snapshot + (1 - decay) * present values."""
        kept = list(self.snapshots[name].values())
        torch._foreach_lerp_(kept, [p.detach() for p in self.parameters], 1.0 - decay)

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Within the block the models run with snapshot `name`; by pointer, without copies, unless `by_copy`.

        To be left before the backward pass of a forward pass that was made outside of it.
        """
        kept = self.snapshots[name]
        if self.by_copy:
            with self._exchanged(kept):
                yield
            return
        present = {key: p.data for key, p in self.named.items()}
        for key, p in self.named.items():
            p.data = kept[key]
        try:
            yield
        finally:
            for key, p in self.named.items():
                kept[key] = p.data
                p.data = present[key]

    @contextmanager
    def _exchanged(self, kept: Mapping[str, Tensor]) -> Iterator[None]:
        present = {key: p.detach().clone() for key, p in self.named.items()}
        self._fill(kept)
        try:
            yield
        finally:
            self._fill(present)

    @torch.no_grad()
    def _fill(self, values: Mapping[str, Tensor]) -> None:
        for key, p in self.named.items():
            p.copy_(values[key])

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within the block the models are the ones training began from: LoRA switched off, or the snapshot
        `reference` of a full fine-tuning, which has to be taken before the first update or restored state."""
        if not self.is_lora:
            with self.use(REFERENCE):
                yield
            return
        with ExitStack() as stack:
            for denoiser in self.denoisers.values():
                denoiser.disable_adapters()
                stack.callback(denoiser.enable_adapters)
            yield

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Everything to be checkpointed, whole: the parameters under `weights`, each snapshot under its name.

        Without the reference, which a resumed run takes from the model it loads. Where the parameters are sharded, a
        collective that leaves the tensors with the main process alone (`sharding.gathered`).
        """
        return {"weights": gathered({key: p.detach() for key, p in self.named.items()})} | {
            f"snapshot-{name}": gathered(tensors) for name, tensors in self.snapshots.items() if name != REFERENCE
        }

    @torch.no_grad()
    def restore(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """The reverse of `state`. Raises ValueError, and changes nothing, where the parameters are not the same."""
        ours = {stem: named for stem, named in state.items() if stem == "weights" or stem.startswith("snapshot-")}
        shapes = {key: p.shape for key, p in self.named.items()}
        for named in ours.values():
            found = {key: tensor.shape for key, tensor in named.items()}
            if found != shapes:  # shapes too: copying would spread an adapter of rank 1 over one of any rank
                odd = sorted(key for key in found.keys() | shapes.keys() if found.get(key) != shapes.get(key))[:3]
                raise ValueError(f"the checkpoint is of another model or adapter: parameters differ, e.g. {odd}")
        for stem, named in ours.items():
            placed = {key: like(named[key], p) for key, p in self.named.items()}
            if stem == "weights":
                self._fill(placed)
            else:
                self.snapshots[stem.removeprefix("snapshot-")] = placed


def _peft_config(name: str, denoiser: nn.Module, lora: LoRA) -> PeftLoraConfig:
    if not isinstance(denoiser, PeftAdapterMixin):
        raise ValueError(
            f"model.lora: diffusers has no adapters for a {type(denoiser).__name__}; set model.lora=null to train all"
        )
    linears = {key for key, module in denoiser.named_modules() if isinstance(module, (nn.Linear, nn.Conv2d))}
    others = {key for key, _ in denoiser.named_modules()} - linears
    candidates = lora.targets or ATTENTION_LAYERS
    found = [t for t in candidates if _ending(t, linears)]
    missing = [t for t in candidates if t not in found] if lora.targets else []
    if not found or missing:
        last = sorted({key.rsplit(".", 1)[-1] for key in linears if not key.endswith(".0")})
        raise ValueError(
            f"model.lora.targets: no layer of the {name} ({type(denoiser).__name__}) is called "
            f"{', '.join(missing or candidates)}; its linear layers end in {', '.join(last)}"
        )
    # In some models a name is that of a linear layer here and of a list of layers there: spelt out.
    targets = [key for t in found for key in (_ending(t, linears) if _ending(t, others) else [t])]
    return PeftLoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, init_lora_weights="gaussian")


def _ending(target: str, keys: set[str]) -> list[str]:
    """The modules that peft takes for this target."""
    return sorted(key for key in keys if key == target or key.endswith(f".{target}"))

"""Making the optimiser that a configuration names, and seeing first that it can be made."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import json
from collections.abc import Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from genrl.config.plugins import Group, find
from genrl.config.sections import OPTIMIZERS, Optimizer
from genrl.runtime.weights import state

OWN_KEYS = ("lr", "weight_decay")


class Masters(torch.optim.Optimizer):
    """An optimiser whose small steps are not lost in rounding: of a parameter in half precision it keeps a float32
    copy, `master` in its state, steps that, and rounds it into the parameter. The rest of the state is float32, too."""

    applied: float | None = None
    """Of the last step: `<rounded, due> / <due, due>`, where due is what was to be added to the parameters, with what
    earlier steps left to the copies, and rounded what was. None without parameters in half precision."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make a step as the class beside this one does, but for what this one says."""
        half = [p for p in self._parameters() if p.grad is not None and p.dtype in (torch.bfloat16, torch.float16)]
        before = {p: p.data for p in half}
        for p, values in before.items():
            gradient, master = p.grad.float(), self.state[p].get("master")  # type: ignore[union-attr]
            if master is None or not torch.equal(master.to(values.dtype), values):  # or somebody else changed it
                master = values.float()
            # torch wants gradient and parameter of one dtype at all times: the gradient is off while the data changes.
            p.grad, p.data = None, master
            p.grad = gradient
        super().step(closure)
        rounded, due = [], []
        for p, values in before.items():
            self.state[p]["master"] = master = p.data
            change, rounded_change = master - values, master.to(values.dtype).sub_(values)
            rounded.append(torch.vdot(rounded_change.flatten().float(), change.flatten()))
            due.append(change.square().sum())
            p.grad, p.data = None, values.copy_(master)
        total_due = float(torch.stack(due).sum()) if half else 0.0
        self.applied = (float(torch.stack(rounded).sum()) / total_due if total_due else 1.0) if half else None

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore as `torch.optim.Optimizer` does, which would round what belongs to a parameter in half precision."""
        super().load_state_dict(state_dict)
        for index, p in enumerate(self._parameters()):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor) and value.dtype != p.dtype and name != "step":
                    self.state[p][name] = value.to(p.device, copy=True)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]


class AdamW(Masters, torch.optim.AdamW):
    """AdamW with float32 copies of parameters in half precision."""


def set_rate(group: dict[str, Any], rate: float) -> None:
    """The learning rate of a parameter group, which torchao's optimisers keep as a tensor."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def make_optimizer(groups: list[dict[str, Any]], settings: Optimizer, *, lr: float | None = None) -> Masters:
    """The optimiser of a configuration for groups of parameters, {"params", "name"}. lr: in place of the settings'.

    Raises ValueError where it cannot train them.
    """
    if settings.name == "prodigy" and len(groups) > 1:
        names = ", ".join(str(group.get("name")) for group in groups)
        raise ValueError(
            f"optimizer.name: prodigy finds one step size for all parameters, and {names} have rates of their own; "
            "write another optimiser"
        )
    arguments: dict[str, Any] = {"lr": settings.lr if lr is None else lr, **settings.args}
    kind = _class(settings.name)
    if _takes(kind, "weight_decay"):
        arguments["weight_decay"] = settings.weight_decay
    if (
        settings.name == "adamw"
        and "foreach" not in settings.args
        and all(p.is_cuda for group in groups for p in group["params"])
    ):
        # One kernel for all parameters; torch takes it for tensors of a GPU only where it is asked for.
        arguments = {"fused": True, **arguments}
    with contextlib.redirect_stdout(io.StringIO()):  # prodigy says that its decay is decoupled
        optimizer: Masters = kind(groups, **arguments)
    return optimizer


def check_optimizer(settings: Optimizer) -> None:
    """Raise ValueError, naming the key, where the optimiser cannot be imported, does not take what it is given, or
    keeps a state that cannot be saved: seen by a step on a small matrix."""
    if why := settings.missing_package():
        raise ValueError(f"optimizer.name: {why}")
    kind = _class(settings.name)
    for key in settings.args:
        if key in OWN_KEYS:
            raise ValueError(f"optimizer.args.{key}: has its own key; write optimizer.{key}")
        if not _takes(kind, key):
            available = [name for name in _parameters(kind) if name not in ("params", *OWN_KEYS)]
            near = get_close_matches(key, available, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}? " if near else ""
            takes = f"{hint}it takes: {', '.join(available) or 'none'}"
            raise ValueError(f"optimizer.args.{key}: {settings.name} has no argument {key!r}; {takes}")
    if settings.weight_decay != 0 and not _takes(kind, "weight_decay"):
        raise ValueError(f"optimizer.weight_decay: {settings.name} has none; write 0")
    parameter = nn.Parameter(torch.ones(4, 4))
    parameter.grad = torch.ones(4, 4)
    try:
        # torchao compiles its step, which would take longer than all other checks.
        with torch.compiler.set_stance("force_eager"):
            optimizer = make_optimizer([{"params": [parameter], "name": "policy"}], settings)
            optimizer.step()
        json.dumps(state.pack(optimizer.state_dict())[1])
    except Exception as error:  # noqa: BLE001  another package's code, with values that it may not expect
        raise ValueError(
            f"optimizer.args: {settings.name} fails with {settings.args or 'its defaults'}: "
            f"{type(error).__name__}: {error}"
        ) from error


@cache
def _class(name: str) -> Any:
    """The class that is named, with `Masters` before it."""
    if name == "adamw":
        return AdamW
    if name == "adamw_8bit":
        return type("AdamW8bit", (Masters, _eager_on_cpu()), {})
    built_in = {key: entry.source for key, entry in OPTIMIZERS.items()}
    if ":" in name and not name.rpartition(":")[0].endswith(".py"):
        built_in[name] = name
    try:
        kind = find(name, Group("optimiser", built_in, "genrl.optimizers"))
    except (ImportError, AttributeError) as error:
        raise ValueError(f"optimizer.name: {name} cannot be imported: {error}") from error
    if not (inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)):
        raise ValueError(f"optimizer.name: {name} is no torch.optim.Optimizer")
    return type(kind.__name__, (Masters, kind), {})


def _eager_on_cpu() -> Any:
    """torchao's AdamW8bit, which compiles a kernel for each shape of parameter: on a CPU that takes longer than it
    saves, and needs a compiler."""
    base: Any = importlib.import_module("torchao.optim").AdamW8bit

    class AdamW8bit(base):  # type: ignore[misc]
        def step(self, closure: None = None) -> None:
            on_cpu = all(p.device.type == "cpu" for group in self.param_groups for p in group["params"])
            with torch.compiler.set_stance("force_eager") if on_cpu else contextlib.nullcontext():
                super().step(closure)

    return AdamW8bit


def _parameters(kind: Any) -> list[str]:
    return [name for name in inspect.signature(kind.__init__).parameters if name != "self"]


def _takes(kind: Any, name: str) -> bool:
    parameters = inspect.signature(kind.__init__).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


# Muon for matrices, AdamW for everything else: one optimiser with the groups of a run.


class Muon(torch.optim.Optimizer):
    """`torch.optim.Muon` for parameters with two dimensions and `torch.optim.AdamW` for the others, as its authors do
    (Jordan et al. 2024).

    betas: of AdamW. adjust_lr_fn: by default steps are scaled to the size of AdamW's (Liu et al., arXiv 2502.16982,
    eq. 4), so that one learning rate serves both.
    """

    def __init__(
        self,
        params: Sequence[dict[str, Any]],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        # torch's own, of the Newton-Schulz iteration that makes a step orthogonal.
        ns_coefficients: Sequence[float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
    ) -> None:
        super().__init__(params, {"lr": lr})
        # torch's Muon refuses what is no matrix.
        self._muon = torch.optim.Muon(
            [{"params": list(filter(_is_matrix, group["params"]))} for group in self.param_groups],
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=(ns_coefficients[0], ns_coefficients[1], ns_coefficients[2]),
            eps=eps,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
        )
        others = [{"params": [p for p in group["params"] if not _is_matrix(p)]} for group in self.param_groups]
        self._adamw = torch.optim.AdamW(others, betas=betas, weight_decay=weight_decay)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of both."""
        parts: tuple[torch.optim.Optimizer, ...] = (self._muon, self._adamw)
        for part in parts:
            part.state = self.state  # loading a state puts another dictionary there
            for ours, group in zip(self.param_groups, part.param_groups, strict=True):
                group["lr"] = ours["lr"]
            part.step()


def _is_matrix(parameter: Tensor) -> bool:
    return parameter.ndim == 2

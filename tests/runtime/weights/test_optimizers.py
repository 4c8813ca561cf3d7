"""Every optimiser that can be named: made, stepped, saved and resumed to the bit; what does not fit is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from genrl.config.sections import OPTIMIZERS, Optimizer
from genrl.runtime.folder.checkpoint import load, save
from genrl.runtime.weights.optimizers import check_optimizer, make_optimizer, set_rate
from genrl.runtime.weights.sharding import load_optimizer_state
from genrl.runtime.weights.state import copied, pack, unpack

RATES = {"prodigy": 1.0}
NAMES = sorted(OPTIMIZERS)


def settings(name: str, **keys: Any) -> Optimizer:
    return Optimizer(**{"name": name, "lr": RATES.get(name, 1e-3)} | keys)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """A matrix of which adamw_8bit quantises the moments, a small one, a vector."""
    rng = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(*shape, generator=rng).to(dtype)) for shape in ((64, 128), (3, 5), (7,))]


def made(given: list[nn.Parameter], how: Optimizer) -> torch.optim.Optimizer:
    return make_optimizer([{"params": given, "name": "policy"}], how)


def go(given: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        rng = torch.Generator().manual_seed(1 + step)
        for p in given:
            p.grad = torch.randn(*p.shape, generator=rng).to(p.dtype)
        set_rate(optimizer.param_groups[0], float(optimizer.defaults["lr"]) * (1 + step) / 4)
        optimizer.step()


def bytes_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> int:
    tensors, _ = pack(dict(optimizer.state[parameter]))
    return sum(t.nbytes for name, t in tensors.items() if t.numel() > 1 and not name.endswith("qmap"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_left_and_resumed_equals_uninterrupted(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    """Through a checkpoint's files: 3 + 4 steps are 7 steps, in weights and in state."""
    how = settings(name, args={"d0": 0.01} if name == "prodigy" else {})
    whole = parameters(dtype)
    uninterrupted = made(whole, how)
    go(whole, uninterrupted, range(7))
    half = parameters(dtype)
    left = made(half, how)
    go(half, left, range(3))
    tensors, packed = pack(left.state_dict())
    weights = {str(number): p.detach() for number, p in enumerate(half)}
    loaded = load(save(tmp_path, 3, tensors={"o": tensors, "w": weights}, state={"o": packed}, keep=1))
    again = [nn.Parameter(loaded.tensors["w"][str(number)]) for number in range(len(half))]
    resumed = made(again, how)
    load_optimizer_state(resumed, unpack(loaded.tensors["o"], loaded.state["o"]))
    go(again, resumed, range(3, 7))
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(whole, parameters(dtype), strict=True))
    (ours, tree), (theirs, other) = pack(uninterrupted.state_dict()), pack(resumed.state_dict())
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert json.dumps(tree) == json.dumps(other)


@pytest.mark.parametrize("name", NAMES)
def test_steps_smaller_than_the_spacing_of_bfloat16_add_up(name: str) -> None:
    """What is rounded away of one step is added with later ones: the same course as in float32."""
    how = settings(name, lr=0.05 if name == "prodigy" else 1e-5, weight_decay=0.0)
    plain, half = [p.bfloat16().float() for p in parameters()], parameters(torch.bfloat16)
    whole = [nn.Parameter(p) for p in plain]
    one, two = made(whole, how), made(half, how)
    for step in range(20):
        rng = torch.Generator().manual_seed(step)
        for p, q in zip(whole, half, strict=True):
            q.grad = torch.randn(*p.shape, generator=rng).bfloat16()
            p.grad = q.grad.float()
        one.step()
        two.step()
    for p, q in zip(whole, half, strict=True):
        assert q.dtype == torch.bfloat16 and torch.equal(two.state[q]["master"], p)
        assert torch.equal(q, p.bfloat16())
        q.data.fill_(1.0)  # changed by hand, it goes on from there
        q.grad = torch.ones_like(q)
    two.step()
    assert all(bool((two.state[q]["master"] - 1.0).abs().max() < 0.1) for q in half)


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_as_the_table_says(name: str) -> None:
    known, how = OPTIMIZERS[name], settings(name)
    check_optimizer(how)
    given = parameters()
    optimizer = made(given, how)
    go(given, optimizer, range(1))
    measured = bytes_of(optimizer, given[0]) / given[0].numel()
    assert measured == pytest.approx(known.state_bytes, abs=0.1)


def test_eight_bits_are_of_large_tensors_only_and_a_copy_of_them_is_a_copy() -> None:
    """The copy is what undoes an iteration."""
    given = parameters()
    optimizer = made(given, settings("adamw_8bit"))
    go(given, optimizer, range(1))
    assert bytes_of(optimizer, given[0]) == 2 * 64 * 128 + 2 * 4 * 64 * 128 // 256
    assert bytes_of(optimizer, given[1]) == 2 * 4 * 15
    kept = copied(optimizer.state_dict())
    before = {key: t.clone() for key, t in pack(kept)[0].items()}
    go(given, optimizer, range(1, 3))
    assert all(torch.equal(t, before[key]) for key, t in pack(kept)[0].items())
    assert not torch.equal(pack(optimizer.state_dict())[0]["state/0/exp_avg/codes"], before["state/0/exp_avg/codes"])


def test_muon_leaves_vectors_to_adamw() -> None:
    given, alone = parameters(), parameters()
    optimizer = made(given, settings("muon"))
    plain = torch.optim.AdamW([alone[2]], lr=1e-3, weight_decay=1e-4)
    matrix = torch.optim.Muon([alone[0]], lr=1e-3, weight_decay=1e-4, adjust_lr_fn="match_rms_adamw")
    for p, q in zip(given, alone, strict=True):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    optimizer.step()
    plain.step()
    matrix.step()
    assert torch.equal(given[2], alone[2]) and torch.equal(given[0], alone[0])


def test_a_state_names_no_code_to_import() -> None:
    for code in ("antigravity:Anything", "os:system"):
        with pytest.raises(ValueError, match=code):
            unpack({}, {"$subclass": code, "parts": {}, "context": []})


class Plain(torch.optim.Optimizer):
    """One of somebody's own, without betas and decay."""

    def __init__(self, params: Any, lr: float, power: float = 1.0) -> None:
        assert power > 0
        super().__init__(params, {"lr": lr, "power": power})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad.abs() ** group["power"] * p.grad.sign())


class Unsaved(Plain):
    """Its state cannot be saved."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.state[self.param_groups[0]["params"][0]]["what"] = object()


HERE = f"{__name__}:"


class TestCheck:
    def test_a_class_of_ones_own(self, tmp_path: Path) -> None:
        how = settings(HERE + "Plain", weight_decay=0.0, args={"power": 2.0})
        check_optimizer(how)
        p = nn.Parameter(torch.tensor([1.0]))
        p.grad = torch.tensor([3.0])
        made([p], how).step()
        assert p.tolist() == pytest.approx([1 - 9e-3])
        file = tmp_path / "mine.py"
        file.write_text("import torch\nclass Mine(torch.optim.SGD):\n    pass\n")
        check_optimizer(settings(f"{file}:Mine"))

    def test_what_does_not_fit_is_refused(self) -> None:
        for name, keys, says in (
            (HERE + "Plain", {}, "optimizer.weight_decay: .* write 0"),
            (HERE + "Plain", {"weight_decay": 0.0, "args": {"powr": 1}}, "did you mean power"),
            (HERE + "Plain", {"weight_decay": 0.0, "args": {"power": 0}}, "fails with {'power': 0}: AssertionError"),
            (HERE + "Unsaved", {"weight_decay": 0.0}, "without pickle"),
            (HERE + "Absent", {}, "optimizer.name: .* cannot be imported"),
            (HERE + "bytes_of", {}, "is no torch.optim.Optimizer"),
            ("no_such_package.x:Y", {}, "no_such_package is not installed"),
            ("lion", {"args": {"use_tritn": True}}, "optimizer.args.use_tritn: .*did you mean use_triton"),
            ("adamw", {"args": {"lr": 1}}, "write optimizer.lr"),
            ("adafactor", {"args": {"betas": [0.9, 0.99]}}, "optimizer.args.betas: .* has no argument"),
            ("adamw", {"args": {"eps": "small"}}, "optimizer.args: adamw fails with {'eps': 'small'}"),
        ):
            with pytest.raises(ValueError, match=says):
                check_optimizer(settings(name, **keys))

    def test_prodigy_has_one_rate_and_a_rate_that_is_a_tensor_stays_one(self) -> None:
        groups: list[dict[str, Any]] = [{"params": parameters(), "name": name} for name in ("policy", "critic")]
        with pytest.raises(ValueError, match="policy, critic have rates of their own"):
            make_optimizer(groups, settings("prodigy"))
        group: dict[str, Any] = {"lr": torch.tensor(1.0)}
        set_rate(group, 0.5)
        assert isinstance(group["lr"], Tensor) and float(group["lr"]) == 0.5

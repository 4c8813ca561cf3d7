"""Adapters compute in the precision of what they adapt."""

import copy

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from genrl.runtime.weights.low_rank import in_input_precision, merged, summed


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 48), nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).view(-1, 3, 4, 4)).flatten(1)


def adapted(dtype: torch.dtype, **settings: object) -> nn.Module:
    """A network with one linear layer and one convolution, both with adapters in float32."""
    torch.manual_seed(0)
    net = inject_adapter_in_model(LoraConfig(r=4, target_modules=["first", "second"], **settings), Net().to(dtype))
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape)
    return net


def kept(net: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The output, and what the backward pass keeps beside the parameters."""
    own = {parameter.data_ptr() for parameter in net.parameters()}
    result: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            result.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = net(x)
    return out, result


def test_nothing_is_kept_in_float32_names_stay_and_copies_compute_the_same() -> None:
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    net = adapted(torch.bfloat16)
    assert any(one.dtype == torch.float32 for one in kept(net, x)[1])  # as peft has it
    in_input_precision(net)
    out, result = kept(net, x)
    assert out.dtype == torch.bfloat16 and all(one.dtype == torch.bfloat16 for one in result)
    names = list(adapted(torch.bfloat16).state_dict())
    for _ in range(2):
        in_input_precision(net)
        assert list(net.state_dict()) == names
        assert torch.equal(copy.deepcopy(net)(x), net(x))


def test_the_result_is_that_of_a_lora_loaded_in_half_precision() -> None:
    """To the bit what diffusers computes with it; gradients come in float32 and within bfloat16's rounding."""
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    net = adapted(torch.bfloat16)
    loaded, exact = copy.deepcopy(net).to(torch.bfloat16), copy.deepcopy(net).double()
    in_input_precision(net)
    assert torch.equal(net(x), loaded(x))
    net(x).float().sum().backward()
    exact(x.double()).sum().backward()
    for (name, mine), truth in zip(net.named_parameters(), exact.parameters(), strict=True):
        if "lora_" in name:
            assert mine.dtype == torch.float32 and mine.grad is not None and mine.grad.dtype == torch.float32
            assert truth.grad is not None
            off = (mine.grad.double() - truth.grad).norm() / truth.grad.norm()
            assert off < 0.02, (name, off)


@pytest.mark.parametrize(
    ("dtype", "autocast", "options"),
    [(torch.float32, False, {}), (torch.float32, True, {}), (torch.bfloat16, False, {"use_dora": True})],
    ids=["float32", "autocast", "dora"],
)
def test_what_stays_as_it_is(dtype: torch.dtype, autocast: bool, options: dict[str, bool]) -> None:
    x, net = torch.randn(32, 64, dtype=dtype), adapted(dtype, **options)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        before = net(x)
        in_input_precision(net)
        assert torch.equal(net(x), before)


@pytest.mark.parametrize("alpha", [8, 3], ids=["power_of_two", "rounded"])
def test_float32_layers_add_their_adapters_in_one_operation(alpha: int) -> None:
    """As peft computes, to the bit where the scale is a power of two; with two adapters, and with none."""
    by_peft, x = adapted(torch.float32, lora_alpha=alpha), torch.randn(32, 64)
    inject_adapter_in_model(
        LoraConfig(r=2, target_modules=["first"], lora_alpha=alpha // 2), by_peft, adapter_name="other"
    )
    torch.nn.init.normal_(by_peft.first.lora_B["other"].weight)
    net = copy.deepcopy(by_peft)
    in_input_precision(net)
    assert isinstance(net.first, summed())
    for adapters in (["default"], ["default", "other"]):
        results: list[list[Tensor]] = []
        for one in (by_peft, net):
            one.first.set_adapter(adapters)
            out = one(x)
            trained = [part[name].weight for name in adapters for part in (one.first.lora_A, one.first.lora_B)]
            results.append([out, *torch.autograd.grad(out.square().sum(), trained)])
        for peft, ours in zip(*results, strict=True):
            torch.testing.assert_close(ours, peft, rtol=0 if alpha == 8 else 1e-5, atol=0 if alpha == 8 else 1e-5)
    for one in (by_peft, net):
        one.first.enable_adapters(False)
    assert torch.equal(net(x), by_peft(x))


def test_merged_adapters_compute_the_same_and_leave_no_trace() -> None:
    net = adapted(torch.float32)
    x, before = torch.randn(5, 64), copy.deepcopy(net.state_dict())
    apart = net(x)
    with pytest.raises(RuntimeError, match="within"), merged([net]), torch.no_grad():
        torch.testing.assert_close(net(x), apart, rtol=1e-5, atol=1e-6)
        assert not torch.equal(next(net.parameters()), next(iter(before.values())))
        raise RuntimeError("within")
    assert net.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert torch.equal(net(x), apart)
    net, x = adapted(torch.bfloat16), x.bfloat16()  # only float32 is merged
    apart = net(x)
    with merged([net]):
        assert torch.equal(net(x), apart)

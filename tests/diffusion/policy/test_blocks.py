"""Our processors and block forwards beside diffusers' own, block by block, and whole pipelines whose ratio stays 1."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.attention import JointTransformerBlock
from diffusers.models.attention_processor import JointAttnProcessor2_0
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor, nn

from genrl.diffusion.config.sections import Kernels
from genrl.diffusion.policy.blocks import BLOCKS, Switches, install
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.train import use_kernels
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES
from tests.diffusion.tiny_parts import Family
from tests.run_folders import tiered

ALL = {"fused": True, "attention": "auto"}
pytestmark = pytest.mark.usefixtures("traced")

Recorded = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]


def block_calls(policy: Policy, family: Family) -> list[Recorded]:
    """Every block of the denoisers with the arguments of one of its calls in a rollout."""
    result: dict[nn.Module, Recorded] = {}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        result[module] = (module, args, kwargs)

    blocks = [m for d in policy.denoisers.values() for m in d.modules() if type(m) in BLOCKS or hasattr(m, "processor")]
    handles = [module.register_forward_pre_hook(record, with_kwargs=True) for module in blocks]
    policy.roll_out(family.batch())
    for handle in handles:
        handle.remove()
    assert set(result) == set(blocks)
    return list(result.values())


def values_and_gradients(call: Recorded) -> list[Tensor]:
    """Outputs, and the gradients of a projection of them to every floating input and parameter of the block."""
    module, args, kwargs = call

    def leaf(value: Any) -> Any:
        fresh = isinstance(value, Tensor) and value.is_floating_point()
        return value.detach().clone().requires_grad_() if fresh else value

    args, kwargs = tuple(map(leaf, args)), {name: leaf(value) for name, value in kwargs.items()}
    inputs = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.requires_grad]
    outputs = module(*args, **kwargs)
    outputs = [t for t in (outputs if isinstance(outputs, tuple) else (outputs,)) if t is not None]
    generator = torch.Generator().manual_seed(0)
    total = sum((t * torch.randn(t.shape, generator=generator)).sum() for t in outputs)
    wanted = [*inputs, *(p for p in module.parameters())]
    gradients = torch.autograd.grad(total, wanted, allow_unused=True)
    return [t.detach() for t in (*outputs, *(torch.zeros(()) if g is None else g for g in gradients))]


def assert_alike(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=3e-5 * max(1.0, float(other.abs().max())), rtol=1e-4)


@pytest.mark.parametrize("name", tiered(["sd3", "flux", "qwen_image", "wan_t2v"], ("sd3",)))
def test_every_block_is_diffusers_own_within_rounding(name: str) -> None:
    family = FAMILIES[name]()
    policy = Policy(family.pipe)
    policy.denoiser.requires_grad_(True)
    calls = block_calls(policy, family)
    before = [values_and_gradients(call) for call in calls]
    install([policy.denoiser], Switches(fused=True, attention="math"))
    for call, own in zip(calls, before, strict=True):
        processor = getattr(call[0], "processor", None)
        assert processor is None or type(processor).__module__ == "genrl.diffusion.policy.blocks"
        assert_alike(values_and_gradients(call), own)


def sd35() -> Recorded:
    """SD3.5 medium's first blocks have a second attention, among the image's tokens."""
    block = JointTransformerBlock(16, 2, 8, qk_norm="rms_norm", use_dual_attention=True)
    return block, (torch.randn(2, 6, 16), torch.randn(2, 3, 16), torch.randn(2, 16)), {}


def wan_of_tokens() -> Recorded:
    """Wan 2.2's small model has a time per token; its cross-attention is not normalised here."""
    block = WanTransformerBlock(24, 32, 2)
    angles = [t.repeat_interleave(2, -1)[None, :, None] for t in (torch.randn(5, 6).cos(), torch.randn(5, 6).sin())]
    return block, (torch.randn(2, 5, 24), torch.randn(2, 4, 24), torch.randn(2, 5, 6, 24), tuple(angles)), {}


def wan_of_pictures() -> Recorded:
    """Wan 2.1's picture-to-video attends to 512 text tokens and to the picture's before them."""
    block = WanTransformerBlock(24, 32, 2, cross_attn_norm=True, added_kv_proj_dim=24)
    return block, (torch.randn(2, 5, 24), torch.randn(2, 512 + 3, 24), torch.randn(2, 6, 24), None), {}


def qwen_edit() -> Recorded:
    """Qwen-Image-Edit's later models modulate the tokens of the picture to edit by time zero, and pad texts."""
    mask = torch.tensor([[True, True, True], [True, False, False]])
    call = {"encoder_hidden_states_mask": mask, "modulate_index": torch.tensor([[0, 0, 0, 1, 1]]).expand(2, -1)}
    call |= {"hidden_states": torch.randn(2, 5, 16), "encoder_hidden_states": torch.randn(2, 3, 16)}
    return QwenImageTransformerBlock(16, 2, 8, zero_cond_t=True), (), {**call, "temb": torch.randn(4, 16)}


@pytest.mark.parametrize("make", tiered([sd35, wan_of_tokens, wan_of_pictures, qwen_edit], [qwen_edit]))
def test_blocks_that_the_tiny_pipelines_do_not_have(make: Callable[[], Recorded]) -> None:
    torch.manual_seed(0)
    call = make()
    before = values_and_gradients(call)
    install([nn.ModuleList([call[0]])], Switches(fused=True, attention="math"))
    assert_alike(values_and_gradients(call), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [sd35, wan_of_tokens, qwen_edit])
def test_in_half_precision_blocks_are_as_near_to_float32(make: Callable[[], Recorded], dtype: torch.dtype) -> None:
    def values(dtype: torch.dtype, ours: bool) -> list[Tensor]:
        torch.manual_seed(0)
        block, args, kwargs = make()
        block.to(dtype)
        if ours:
            install([nn.ModuleList([block])], Switches(fused=True, attention="math"))
        kinds = {torch.float32: dtype}
        args = [t.to(kinds.get(t.dtype, t.dtype)) if isinstance(t, Tensor) else t for t in args]
        result = block(*args, **{name: t.to(kinds.get(t.dtype, t.dtype)) for name, t in kwargs.items()})
        return [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]

    for result, own, exact in zip(values(dtype, True), values(dtype, False), values(torch.float32, False), strict=True):
        assert result.dtype == own.dtype == dtype
        assert (result.float() - exact).abs().max() <= 2 * (own.float() - exact).abs().max()


RUNS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of the trainer, of the model
    "chain": ({}, {}),
    "autocast, sum": ({"log_prob_reduction": "sum"}, {"autocast": "bfloat16"}),
    "another kernel": ({"kernel": "flow_cps", "noise_level": 0.8}, {}),
}


@pytest.mark.parametrize("name", tiered(RUNS, ("chain",)))
def test_first_update_of_a_run_has_ratio_one(folder: Path, model: Path, name: str) -> None:
    of_trainer, of_model = RUNS[name]
    changes: dict[str, Any] = {"kernels": ALL, "model": of_model, "iterations": 1, "evaluation": {"every": 0}}
    (row,) = runs.rows(
        runs.train(runs.config(folder, model, trainer={"algorithm": "flow_grpo", **of_trainer}, **changes))
    )
    assert row["ratio/max_abs_dev"] == 0.0 and row["grad_norm"] > 0


def test_what_our_blocks_cannot_do_is_an_error() -> None:
    """A model of another family, a processor that is never called, a named back-end that cannot run."""
    policy = Policy(FAMILIES["sd15"]().pipe)
    for settings in ({"fused": True}, {"attention": "auto"}):
        with pytest.raises(ValueError, match="kernels.*Stable Diffusion 3 and 3.5, FLUX.1, Qwen-Image and Wan"):
            use_kernels(policy, Kernels.model_validate(settings))
    family = FAMILIES["sd3"]()
    policy = Policy(family.pipe)
    install(policy.denoisers.values(), Switches(attention="auto"))
    family.pipe.transformer.transformer_blocks[0].attn.set_processor(JointAttnProcessor2_0())  # behind our back
    with pytest.raises(RuntimeError, match="1 of 2 attention processors of SD3Transformer2DModel were set and not"):
        policy.roll_out(family.batch())
    family = FAMILIES["qwen_image"]()
    policy = Policy(family.pipe)
    with pytest.raises(ValueError, match=r"kernels.attention: cudnn: .*that can run here: auto, math"):
        use_kernels(policy, Kernels(attention="cudnn"))
    install(policy.denoisers.values(), Switches(attention="cudnn"))
    with pytest.raises(ValueError, match=r"attention back-end cudnn: .*that can run here: auto, math"):
        policy.roll_out(family.batch())

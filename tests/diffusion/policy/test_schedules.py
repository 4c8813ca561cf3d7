"""Every scheduler of diffusers: stepped along its schedule, or refused alike by the check and by the policy."""

import inspect
from typing import Any

import diffusers
import pytest
import torch

from genrl.diffusion.config.pipeline_classes import replaced_schedule, scheduler_refusal, settings_of
from genrl.diffusion.policy.decoding import spare_vae
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.scheduler import Request, Step, as_policy_head
from genrl.diffusion.policy.trajectory import Batch
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES
from tests.diffusion.tiny_parts import KEYS, PROMPTS

FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}


def _made() -> dict[str, Any]:
    """Name -> a scheduler of each class that can be made without arguments here."""
    made = {}
    for name in sorted(name for name in dir(diffusers) if name.endswith("Scheduler")):
        kind = getattr(diffusers, name)
        parameters = inspect.signature(kind).parameters.values()
        if not any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters):
            try:
                made[name] = kind()
            except ImportError:  # torchsde
                continue
    return made


MADE = _made()
ACCEPTED = [name for name in MADE if scheduler_refusal(name, {}) is None]
SPACINGS = [{"timestep_spacing": spacing} for spacing in ("leading", "trailing", "linspace")]
CASES = [(n, keys) for n in ACCEPTED for keys in (SPACINGS if "timestep_spacing" in settings_of(n) else [{}])]
CASES += [(n, FLOW) for n in MADE if "use_flow_sigmas" in settings_of(n) and not scheduler_refusal(n, FLOW)]


@pytest.mark.parametrize(("name", "settings"), CASES, ids=lambda value: value if isinstance(value, str) else str(value))
def test_every_step_ends_at_the_next_entry_of_the_schedule(name: str, settings: dict[str, Any]) -> None:
    """With the true noise as output a state stays the mix at its level, by the told levels and the parent's step."""
    scheduler = getattr(diffusers, name)(**settings)
    for steps in (3, 8, 20):
        head: Any = as_policy_head(scheduler)
        _follow(head, steps)


def _follow(head: Any, steps: int) -> None:
    clean, noise = torch.linspace(-1.0, 1.0, 4).reshape(1, 1, 2, 2), torch.tensor([[[[0.3, -1.2], [0.7, 0.1]]]])
    flow = head.parametrisation == "flow"

    def mixed(level: torch.Tensor) -> torch.Tensor:
        level = level.float()
        return (1.0 - level) * clean + level * noise if flow else level.sqrt() * clean + (1.0 - level).sqrt() * noise

    seen: list[tuple[float, float]] = []

    def record(step: Step) -> torch.Tensor:
        seen.append((float(step.sigma), float(step.sigma_next)))
        return mixed(step.sigma_next)

    for on_step in (record, None):
        head.request, head.latents_dtype = Request(on_step=on_step), torch.float32
        head.set_timesteps(steps)
        times = head.timesteps
        levels = head.full_sigmas if flow else torch.stack([*head.alphas_cumprod[times], head.final_alpha_cumprod])
        assert len(times) == steps
        assert bool((times.float().diff() < 0).all())
        state = head.hold(mixed(levels[0]))
        for index, t in enumerate(times):
            state = head.step(noise - clean if flow else noise, t, state, return_dict=False)[0]
            torch.testing.assert_close(state, mixed(levels[index + 1]), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(torch.tensor(seen), torch.stack([levels[:-1], levels[1:]], 1).float())


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("FlowMatchEulerDiscreteScheduler", {"shift": 0.0}),
        ("FlowMatchEulerDiscreteScheduler", {"shift": float("nan")}),
        ("DDIMScheduler", {"steps_offset": 999}),
    ],
)
@pytest.mark.filterwarnings("ignore")  # numpy's, of what cannot be cast
def test_levels_that_do_not_fall_from_noise_to_data_are_refused(name: str, settings: dict[str, Any]) -> None:
    head: Any = as_policy_head(getattr(diffusers, name)(**settings))
    head.request, head.latents_dtype = Request(), torch.float32
    with pytest.raises(ValueError, match=rf"the noise levels of {name} for 8 steps are .* they must fall"):
        head.set_timesteps(8)


@pytest.mark.parametrize("name", ["DPMSolverMultistepScheduler", "UniPCMultistepScheduler", "DEISMultistepScheduler"])
@pytest.mark.parametrize("steps", [3, 8, 20])
def test_linspace_has_the_levels_of_the_scheduler_in_whose_place_it_is(name: str, steps: int) -> None:
    scheduler = getattr(diffusers, name)(timestep_spacing="linspace")
    head: Any = as_policy_head(scheduler)
    head.set_timesteps(steps)
    scheduler.set_timesteps(steps)
    assert head.timesteps.tolist() == scheduler.timesteps.tolist()


@pytest.mark.parametrize("name", [name for name in MADE if name not in ACCEPTED])
def test_a_refused_scheduler_is_refused_in_the_same_words_when_it_is_loaded(name: str) -> None:
    with pytest.raises(ValueError, match=name) as refused:
        as_policy_head(MADE[name])
    assert str(refused.value) == scheduler_refusal(name, {})


def test_the_reason_is_the_true_one_and_levels_that_ddim_does_not_have_are_said() -> None:
    rows: list[tuple[str, dict[str, Any], str]] = [
        ("FlowMatchHeunDiscreteScheduler", {}, "calls the model twice a step"),
        ("FlowMatchLCMScheduler", {}, "a consistency model jumps"),
        ("FlowMatchEulerDiscreteScheduler", {"stochastic_sampling": True}, "no deterministic step"),
        ("DPMSolverMultistepScheduler", {"prediction_type": "flow_prediction"}, "set use_flow_sigmas to true"),
        ("EulerDiscreteScheduler", {"prediction_type": "flow_prediction"}, "it has no flow sigmas"),
        ("UniPCMultistepScheduler", {"use_flow_sigmas": True}, "set it to flow_prediction"),
        ("DDIMInverseScheduler", {}, "from the picture to the noise"),
        ("DPMSolverMultistepScheduler", FLOW | {"algorithm_type": "sde-dpmsolver++"}, "adds noise of its own"),
        ("HeliosScheduler", {}, "start anew in each of its stages"),
        ("EDMEulerScheduler", {}, "nor one with a beta schedule"),
        ("DDPMScheduler", {"prediction_type": "velocity"}, "prediction_type velocity"),
    ]
    for name, settings, says in rows:
        assert says in (scheduler_refusal(name, settings) or ""), name
    said = replaced_schedule("EulerDiscreteScheduler", {"use_karras_sigmas": True, "timestep_spacing": "trailing"})
    assert "use_karras_sigmas" in str(said)
    assert replaced_schedule("EulerDiscreteScheduler", {"use_karras_sigmas": False}) is None


BATCH = Batch([*PROMPTS], [*KEYS], {**runs.CALL, "num_inference_steps": 2})


def test_slices_and_tiles_and_what_a_pipeline_has_not_by_its_key() -> None:
    """Slices are the whole up to rounding; small pictures are one tile: the same."""
    policy = Policy(FAMILIES["sd3"]().pipe)
    with torch.no_grad():
        final = policy.roll_out(BATCH).final
        whole = policy.decode(BATCH, final)
        spare_vae(policy.pipe, tiled=True)
        assert torch.equal(policy.decode(BATCH, final), whole)
        policy.pipe.vae.tile_sample_min_size, policy.pipe.vae.tile_latent_min_size = 8, 4
        tiled = policy.decode(BATCH, final)
        assert tiled.shape == whole.shape and not torch.equal(tiled, whole)
        policy.pipe.vae.disable_tiling()
        spare_vae(policy.pipe, sliced=True)
        sizes: list[int] = []
        policy.pipe.vae.decoder.register_forward_pre_hook(lambda module, args: sizes.append(len(args[0])))
        torch.testing.assert_close(policy.decode(BATCH, final), whole, atol=1e-5, rtol=0)
    assert sizes == [1, 1]
    del policy.pipe.vae.use_slicing
    with pytest.raises(ValueError, match=r"model.slice_vae: AutoencoderKL does not decode in slices"):
        spare_vae(policy.pipe, sliced=True)

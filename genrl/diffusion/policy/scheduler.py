"""The scheduler as policy head: a pipeline's own schedule, exposed one segment at a time, with a step that we decide.

A diffusers pipeline asks its scheduler two things: `set_timesteps` (which noise levels) and `step` (what is the next
state). `as_policy_head` returns a subclass of the scheduler's own class that answers both for the policy:

- `set_timesteps` lets the parent compute its full schedule (shift, `mu`, `sigmas`, ... untouched) and then exposes only
  the requested segment `[start, stop)` of it, or a single arbitrary timestep;
- `step` hands a `Step` (state, model output, noise levels) to the callback of the running request, or, where there is
  none, is the parent's own step (evaluation).

States are kept here in float32 whatever the model's dtype: the pipeline sees them rounded, the mathematics does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_utils import SchedulerOutput
from torch import Tensor

from genrl.mdp.kernels import PredictionType

Parametrisation = Literal["flow", "diffusion"]
PREDICTIONS = ("epsilon", "v_prediction", "sample")


@dataclass(frozen=True)
class Step:
    """One denoising step as the policy sees it. B: batch; `...`: the dimensions of one state."""

    index: int
    """Position in the full schedule; -1 at an arbitrary noise level outside it."""
    num_steps: int
    """Length of the full schedule."""
    state: Tensor
    """x_i, float32 [B, ...]."""
    model_output: Tensor
    """float32 [B, ...]: the velocity `noise - data` of a flow, or the network's epsilon / v / sample prediction."""
    sigma: Tensor
    """Flow: noise level of the state, float32 []. Diffusion: cumulative alpha (alpha-bar) of the state."""
    sigma_next: Tensor
    """The same at the next state."""
    sigma_max: Tensor
    """Flow: second level of the schedule, the clamp of Flow-SDE. Diffusion: unused."""


OnStep = Callable[[Step], Tensor]


@dataclass
class Request:
    """What one call of the pipeline is to do."""

    start: int = 0
    """First step of the full schedule to run."""
    stop: int | None = None
    """One past the last step; None = to the end; equal to `start` = no step at all (decoding)."""
    at: Tensor | None = None
    """Instead of a segment: one noise level [], or one per sample [B] (diffusion: the timestep itself)."""
    on_step: OnStep | None = None
    """Returns the next state (float32 [B, ...]), or leaves the pipeline by raising. None = the parent's own step, which
    may keep a history and so runs whole schedules only."""


class PolicyHead:
    """Mixed in before a scheduler class by `as_policy_head`; never used alone."""

    config: Any
    """The scheduler's own."""
    timesteps: Tensor
    sigmas: Tensor
    alphas_cumprod: Tensor
    """Diffusion: cumulative alpha of every training timestep, float32 [N]."""
    final_alpha_cumprod: Tensor
    """Diffusion: that of the state after the last step, float32 []."""
    parametrisation: Parametrisation
    request: Request
    full_timesteps: Tensor
    full_sigmas: Tensor
    """Flow: noise levels of the whole schedule, float32 [T + 1], from noise (1) to data (0)."""

    latents_dtype: torch.dtype
    """That of the latents made by the pipeline's `prepare_latents`: in it, its loop is handed every state. (Not that of
    the model output: under autocast, and in video pipelines, a loop that starts in float32 would go on in bfloat16,
    and a step replayed from a recorded state would not see what the recorded step saw.)"""

    @property
    def _inverted(self) -> bool:
        """Whether the scheduler's own time runs from data to noise, with the velocity `data - noise` (Mochi)."""
        return bool(self.config.get("invert_sigmas", False))

    @property
    def prediction_type(self) -> PredictionType:
        """What the network of a model that is no flow predicts: `as_policy_head` lets no others in."""
        return cast(PredictionType, str(self.config.get("prediction_type", "epsilon")))

    @property
    def clip_range(self) -> float | None:
        """Diffusion: bound of the predicted clean sample, where the configuration asks for one (pixel models do)."""
        config = self.config
        return float(config.clip_sample_range) if config.get("clip_sample", False) else None

    @property
    def threshold(self) -> tuple[float, float] | None:
        """Diffusion: quantile and largest bound of dynamic thresholding, where the configuration asks for it."""
        config = self.config
        on = config.get("thresholding", False)
        return (float(config.dynamic_thresholding_ratio), float(config.sample_max_value)) if on else None

    def hold(self, state: Tensor) -> Tensor:
        """Keep `state` (float32) as the truth behind its copy rounded to the pipeline's dtype, which is returned."""
        self._state, self._given = state, state.to(self.latents_dtype)
        return self._given

    def _true_state(self, sample: Tensor) -> Tensor:
        # A pipeline that hands back what it was given gets the float32 state behind it; one that changed the state
        # between two steps (masks, re-noising) is taken at its word.
        given = self._given
        if given is not None and sample.shape == given.shape and torch.equal(sample.to(given.dtype), given):
            return self._state
        return sample.detach().float()

    def _expose_segment(self) -> None:
        self.full_timesteps = self.timesteps
        if self.parametrisation == "flow":
            sigmas = self.sigmas.float().cpu()
            self.full_sigmas = 1.0 - sigmas if self._inverted else sigmas
        request = self.request
        if request.at is not None:
            at = self._timestep_at(request.at).to(self.full_timesteps.device)
            self.timesteps = at.reshape(1, *at.shape)
            self._next_index = -1
            return
        stop = len(self.full_timesteps) if request.stop is None else request.stop
        if not 0 <= request.start <= stop <= len(self.full_timesteps):
            raise ValueError(f"no steps [{request.start}, {stop}) in a schedule of {len(self.full_timesteps)}")
        self.timesteps = self.full_timesteps[request.start : stop]
        if self.parametrisation == "flow" and (request.start, stop) != (0, len(self.full_timesteps)):
            self.sigmas = self.sigmas[request.start : stop + 1]  # some pipelines read sigmas[i] with their loop's i
        self._next_index = request.start

    def _timestep_at(self, sigma: Tensor) -> Tensor:
        """The model's time of a noise level, as its schedule pairs them: exact on the grid, linear between.

        Not 1000 sigma: some pipelines shift sigmas but not timesteps, others round them.
        """
        if self.parametrisation == "diffusion":
            return sigma
        end = float(self.config.num_train_timesteps) if self._inverted else 0.0
        sigmas = self.full_sigmas.double().flip(0)  # ascending from 0
        times = torch.cat([self.full_timesteps.cpu().double(), torch.tensor([end]).double()]).flip(0)
        wanted = sigma.detach().cpu().double().clamp(sigmas[0], sigmas[-1])
        right = torch.searchsorted(sigmas, wanted).clamp(1, len(sigmas) - 1)
        share = (wanted - sigmas[right - 1]) / (sigmas[right] - sigmas[right - 1])
        return (times[right - 1] + share * (times[right] - times[right - 1])).float()

    def _noise_levels(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        if self.parametrisation == "flow":
            levels = self.full_sigmas
            return levels[index], levels[index + 1], levels[1]
        t = self.full_timesteps[index]
        t_next = t - self.config.num_train_timesteps // len(self.full_timesteps)
        alphas = self.alphas_cumprod.to(t.device)
        final = self.final_alpha_cumprod.to(t.device)
        return alphas[t], alphas[t_next] if t_next >= 0 else final, alphas[t]

    def _step(self, model_output: Tensor, sample: Tensor) -> Tensor:
        index = self._next_index
        if index < 0:
            sigma = sigma_next = sigma_max = torch.full((), float("nan"))
        else:
            sigma, sigma_next, sigma_max = self._noise_levels(index)
            self._next_index += 1
        sign = -1.0 if self._inverted else 1.0
        step = Step(
            index=index,
            num_steps=len(self.full_timesteps),
            state=self._true_state(sample),
            model_output=sign * model_output.float(),
            sigma=sigma,
            sigma_next=sigma_next,
            sigma_max=sigma_max,
        )
        assert self.request.on_step is not None
        return self.hold(self.request.on_step(step))


def as_policy_head(scheduler: Any) -> PolicyHead:
    """A policy head of the class of `scheduler`, with its configuration.

    Flow-matching schedulers (Euler, and UniPC or DPM-Solver with flow sigmas) keep their class. For epsilon, v and
    sample prediction the head is a `DDIMScheduler` made from the same configuration, as in DDPO (arXiv 2305.13301):
    its stochastic step is the one with a density.

    Raises ValueError for a scheduler that is neither (it names the class).
    """
    config = dict(scheduler.config)
    parent: Any
    parametrisation: Parametrisation
    overrides: dict[str, Any]
    if isinstance(scheduler, FlowMatchEulerDiscreteScheduler) or config.get("use_flow_sigmas", False):
        parent, parametrisation, overrides = type(scheduler), "flow", {}
        if config.get("stochastic_sampling", False):
            raise ValueError(f"{parent.__name__} with stochastic_sampling has no deterministic step: set it to false")
    elif "beta_schedule" in config and config.get("prediction_type", "epsilon") in PREDICTIONS:
        # DDIMScheduler clips x_0 to [-1, 1] by default, which is wrong for latents: only where the model asks for it.
        parent, parametrisation = DDIMScheduler, "diffusion"
        overrides = {"clip_sample": config.get("clip_sample", False)}
    else:
        raise ValueError(
            f"the scheduler {type(scheduler).__name__} is neither a flow-matching scheduler nor one of an epsilon, v "
            "or sample prediction with a beta schedule: there is no Gaussian transition for it"
        )

    def set_timesteps(self: Any, *args: Any, **kwargs: Any) -> None:
        parent.set_timesteps(self, *args, **kwargs)
        self._expose_segment()

    def step(self: Any, model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.request.on_step is None:
            return parent.step(self, model_output, timestep, sample, *args, **kwargs)
        state = self._step(model_output, sample)
        return SchedulerOutput(prev_sample=state) if kwargs.get("return_dict", True) else (state,)

    members: dict[str, Any] = {
        # Pipelines inspect these signatures to decide which arguments to pass.
        "set_timesteps": functools.wraps(parent.set_timesteps)(set_timesteps),
        "step": functools.wraps(parent.step)(step),
        "parametrisation": parametrisation,
        "_state": None,
        "_given": None,
    }
    head_class: Any = type(f"Policy{parent.__name__}", (PolicyHead, parent), members)
    head: PolicyHead = head_class.from_config(config, **overrides)
    if parametrisation == "diffusion":  # some schedulers change the alphas after making them from the betas
        head.alphas_cumprod = scheduler.alphas_cumprod.clone()
        final = getattr(scheduler, "final_alpha_cumprod", head.final_alpha_cumprod)
        head.final_alpha_cumprod = torch.as_tensor(final).clone()
    head.request = Request()
    return head

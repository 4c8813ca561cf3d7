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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from diffusers import DDIMScheduler
from diffusers.schedulers.scheduling_utils import SchedulerOutput
from torch import Tensor

from genrl.diffusion.config.pipeline_classes import is_flow_scheduler, scheduler_refusal
from genrl.diffusion.policy.interfaces import require_flow_step
from genrl.mdp.kernels import PredictionType

Parametrisation = Literal["flow", "diffusion"]


ROUNDING = 1e-5
STEPPED_WITH = ("return_dict", "generator", "eta", "s_churn", "s_tmin", "s_tmax", "s_noise", "variance_noise")
"""Arguments of a scheduler's `step` that say how it draws noise, which the kernel does here."""


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
    """One past the last step; None = to the end."""
    empty: bool = False
    """Instead of a segment: no step at all (decoding)."""
    at: Tensor | None = None
    """Instead of a segment: one noise level [], or one per sample [B] (diffusion: the timestep itself)."""
    on_step: OnStep | None = None
    """Returns the next state (float32 [B, ...]), or leaves the pipeline by raising. None = the parent's own step, which
    may keep a history and so runs whole schedules only."""
    on_end: Callable[[Tensor], None] | None = None
    """Told the state (float32 [B, ...]) that the pipeline goes on with after the last step of the segment."""


def leading(latents: Tensor, shape: torch.Size) -> Tensor:
    """The first of `latents` in each dimension, of this shape: themselves, or a view."""
    return latents if latents.shape == shape else latents[tuple(slice(size) for size in shape)]


def leads(shape: torch.Size, latents: torch.Size) -> bool:
    """Whether states of this shape may come first in such latents, in the last dimension (channels)."""
    return len(shape) == len(latents) and shape[:-1] == latents[:-1] and shape[-1] <= latents[-1]


class _Unlooped(Tensor):
    """Timesteps that a pipeline may look at, with none of them to loop over.

    Pipelines that start from a picture noise it to the first timestep, and refuse a schedule that has none.
    """

    # What is made of it is a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(())


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
    """Of the schedule that is run, on the CPU: what the pipeline leaves of `uncut` (strength below 1)."""
    full_sigmas: Tensor
    """Flow: its noise levels, float32 [T + 1], from noise (1, without a cut) to data (0)."""
    uncut: tuple[Tensor, Tensor | None]
    """Timesteps and, of a flow, sigmas as the parent made them, on the CPU."""

    next_index: int
    """Step that the pipeline makes next."""
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
        self._state, self._given = state, state.to(self.latents_dtype, copy=True)  # some pipelines write into it
        self._written = self._given._version
        return self._given

    def true_state(self, sample: Tensor) -> Tensor:
        """What stands behind `sample`, float32: a pipeline that hands back what it was given gets the state that this
        was rounded from; one that changed the state between two steps (masks, re-noising) is taken at its word."""
        handed_out = self._given
        # The very tensor, not written into: known without waiting for the device.
        if sample is handed_out and sample._version == self._written:
            return self._state
        same_shape = handed_out is not None and sample.shape == handed_out.shape
        if same_shape and torch.equal(sample.to(handed_out.dtype), handed_out):
            return self._state
        # A copy, as a pipeline that changes its latents may do so in place.
        return sample.to(torch.float32, copy=True)

    def denoised(self, latents: Tensor) -> Tensor:
        """State that the last step led to, of all that a pipeline's loop goes on with: `true_state` of its leading
        part."""
        return self.true_state(leading(latents, self._given.shape) if self._given is not None else latents)

    def expose(self, timesteps: Tensor) -> Tensor:
        """What the pipeline is to loop over of its schedule `timesteps`, which is the end of the uncut one."""
        request, (uncut, sigmas) = self.request, self.uncut
        self.full_timesteps, length = timesteps, len(timesteps)
        if sigmas is not None:
            levels = sigmas[len(uncut) - length :].float()
            self.full_sigmas = 1.0 - levels if self._inverted else levels
        if request.at is not None:
            at = self._timestep_at(request.at)
            # An arbitrary level is no step of the schedule, and has no next one.
            self.next_index = -1
            return at.reshape(1, *at.shape)
        if request.empty:
            self.next_index = length
            return timesteps[length:]
        stop = length if request.stop is None else request.stop
        if not 0 <= request.start <= stop <= length:
            raise ValueError(f"no steps [{request.start}, {stop}) in a schedule of {length}")
        self.next_index = request.start
        # One more where the call is left after the last step: to the pipeline that one is not the last of all.
        return timesteps[request.start : stop if request.on_end is None else stop + 1]

    def _expose_segment(self, device: torch.device | str) -> None:
        """Show the pipeline, on its device, what it is to loop over of the schedule that was made on the CPU."""
        flow, self._device = self.parametrisation == "flow", device
        self.uncut = self.timesteps, self.sigmas if flow else None
        self._require_levels()
        self.timesteps = self.expose(self.timesteps).to(device)
        exposed, self._base = len(self.timesteps), 0
        if flow and self.request.at is None and exposed != len(self.full_timesteps):
            self._base = self.next_index  # some pipelines read sigmas[i] with their loop's i
            self.sigmas = self.sigmas[self._base : self._base + exposed + 1]
        if flow:
            self.sigmas = self._shown(self.sigmas)

    def _require_levels(self) -> None:
        """Raise ValueError where the schedule does not fall from noise to data, as by a shift of 0 or betas above 1."""
        timesteps, sigmas = self.uncut
        if sigmas is None:
            alphas, places = self.alphas_cumprod.cpu(), timesteps.cpu().long()
            inside = bool(((places >= 0) & (places < len(alphas))).all())
            levels = 1.0 - alphas[places] if inside else torch.full((1,), float("nan"))
        else:
            levels = 1.0 - sigmas.float().cpu() if self._inverted else sigmas.float().cpu()
        ends = levels.isfinite().all() & (levels >= -ROUNDING).all() & (levels <= 1.0 + ROUNDING).all()
        if not bool(ends & (levels.diff() <= 0).all()):
            shown = ", ".join(f"{level:.3g}" for level in levels[:3].tolist())
            name = type(self).__name__.removeprefix("Policy")
            raise ValueError(
                f"the noise levels of {name} for {len(timesteps)} steps are {shown}, ...; they must fall from 1 to 0: "
                "look at its settings (model.scheduler: shift, betas, steps_offset)"
            )

    def _shown(self, sigmas: Tensor) -> Tensor:
        """Where the parent's own step looks for them: solvers read theirs on the CPU."""
        return sigmas if "solver_order" in self.config else sigmas.to(self._device)

    def recut(self, cut: Callable[[int, Tensor], Tensor]) -> Tensor:
        """What the pipeline is to loop over, where it cuts its schedule: `cut` is given the number of steps and the
        timesteps of the uncut one, which the scheduler shows from here on."""
        timesteps, sigmas = self.uncut
        self.timesteps = timesteps.to(self._device)
        if sigmas is not None:
            self.sigmas = self._shown(sigmas)
        left_out = len(timesteps) - len(cut(len(timesteps), self.timesteps))
        self._base = -left_out
        left = self.expose(timesteps[left_out:]).to(self._device)
        return left if len(left) else self.timesteps[-1:].as_subclass(_Unlooped)

    def _timestep_at(self, sigma: Tensor) -> Tensor:
        """The model's time of a noise level, as its schedule pairs them: exact on the grid, linear between.

        Not 1000 sigma: some pipelines shift sigmas but not timesteps, others round them.
        """
        if self.parametrisation == "diffusion":
            return sigma
        end = float(self.config.num_train_timesteps) if self._inverted else 0.0
        timesteps, levels = self.uncut
        assert levels is not None
        levels = levels.float()
        sigmas = (1.0 - levels if self._inverted else levels).double().flip(0)  # ascending from 0
        times = torch.cat([timesteps.double(), torch.tensor([end]).double()]).flip(0)
        # In float64: between two close levels of a shifted schedule float32 would lose the place.
        level = sigma.detach().cpu().double().clamp(sigmas[0], sigmas[-1])
        right = torch.searchsorted(sigmas, level).clamp(1, len(sigmas) - 1)
        share = (level - sigmas[right - 1]) / (sigmas[right] - sigmas[right - 1])
        return (times[right - 1] + share * (times[right] - times[right - 1])).float()

    def _noise_levels(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        if self.parametrisation == "flow":
            levels = self.full_sigmas
            return levels[index], levels[index + 1], levels[1]
        # The next entry of the schedule, not `t - 1000 // n` as in DDIM's own step: they differ where the spacing is
        # linspace, and at numbers of steps that do not divide, and the model was told a level that no state has.
        times = self.full_timesteps
        alphas = self.alphas_cumprod
        level = alphas[times[index]]
        if index + 1 < len(times):
            return level, alphas[times[index + 1]], level
        return level, self.final_alpha_cumprod, level

    def scale_model_input(self, sample: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The parent's own; a flow has none, and what asks a scheduler by its exact class may call it all the same."""
        scale = getattr(super(), "scale_model_input", None)
        return sample if scale is None else scale(sample, *args, **kwargs)

    def note(self, state: Tensor) -> None:
        """Remember what the parent's own step led to."""
        self._state = self._given = state
        self._written = state._version
        self.next_index += 1

    def _step(self, model_output: Tensor, sample: Tensor) -> Tensor:
        index = self.next_index
        if index < 0:
            sigma = sigma_next = sigma_max = torch.full((), float("nan"))
        else:
            sigma, sigma_next, sigma_max = self._noise_levels(index)
            self.next_index += 1
            self._step_index = index + 1 - self._base  # as the parent's own step counts, by which masks are noised
        sign = -1.0 if self._inverted else 1.0
        state = self.true_state(sample)
        step = Step(
            index=index,
            num_steps=len(self.full_timesteps),
            # What is held has a graph where gradients run through the chain; what the pipeline changed has none.
            state=state if state is self._state else state.detach(),
            # Means and densities are of float32, whatever the model computes in.
            model_output=sign * model_output.float(),
            sigma=sigma,
            sigma_next=sigma_next,
            sigma_max=sigma_max,
        )
        assert self.request.on_step is not None
        return self.hold(self.request.on_step(step))


def _linspaced(timesteps: Tensor, own: Any) -> Tensor:
    """Timesteps of the scheduler in whose place DDIM is, where each is one of the training's: multistep solvers have
    the noise levels from the last one to the first at equal distances, without a step at t = 0 that changes nothing."""
    own.set_timesteps(len(timesteps))
    theirs: Tensor = own.timesteps
    # Interpolated times (Karras) are none of the training's and index no alpha-bar: then DDIM's own grid stays.
    usable = len(theirs) == len(timesteps) and not theirs.is_floating_point() and bool((theirs.diff() < 0).all())
    return theirs.to(timesteps) if usable else timesteps


@contextmanager
def _towards_next(head: Any) -> Iterator[None]:
    """Have DDIM's own step go to the next level of the schedule: one step from anywhere ends at the final alpha."""
    if head.parametrisation == "flow" or not 0 <= head.next_index < len(head.full_timesteps):
        yield
        return
    steps, final = head.num_inference_steps, head.final_alpha_cumprod
    _, head.final_alpha_cumprod, _ = head._noise_levels(head.next_index)
    head.num_inference_steps = 1
    try:
        yield
    finally:
        head.num_inference_steps, head.final_alpha_cumprod = steps, final


def as_policy_head(scheduler: Any) -> PolicyHead:
    """A policy head of the class of `scheduler`, with its configuration.

    Flow-matching schedulers (Euler, and UniPC or DPM-Solver with flow sigmas) keep their class. For epsilon, v and
    sample prediction the head is a `DDIMScheduler` made from the same configuration, as in DDPO (arXiv 2305.13301):
    its stochastic step is the one with a density.

    Raises ValueError as `scheduler_refusal` and `require_flow_step` have it.
    """
    config = dict(scheduler.config)
    parent, parametrisation = _parent_of(scheduler, config)
    # DDIMScheduler clips x_0 to [-1, 1] by default, which is wrong for latents: only where the model asks for it.
    overrides = {"clip_sample": config.get("clip_sample", False)} if parametrisation == "diffusion" else {}
    # It is asked for its own grid later, by which it changes itself.
    original = deepcopy(scheduler)
    evenly = parametrisation == "diffusion" and not config.keys().isdisjoint({"solver_order", "predictor_order"})

    def set_timesteps(
        self: Any, num_inference_steps: int | None = None, device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        # On the CPU, where the levels are read: to read them from a device would wait for it, in every call.
        parent.set_timesteps(self, num_inference_steps, "cpu", *args, **kwargs)
        if evenly and self.config.timestep_spacing == "linspace":
            self.timesteps = _linspaced(self.timesteps, original)
        self._expose_segment(device or "cpu")

    def step(self: Any, model_output: Tensor, timestep: Any, sample: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self.request.on_step is None:
            with _towards_next(self):
                output = parent.step(self, model_output, timestep, sample, *args, **kwargs)
            self.note(output[0] if isinstance(output, tuple) else output.prev_sample)
            return output
        if odd := [name for name, value in kwargs.items() if value is not None and name not in STEPPED_WITH]:
            raise ValueError(
                f"the pipeline steps its scheduler with {', '.join(odd)}, which the step of no kernel has: it may mean "
                "another sign or other levels, and would train on something else"
            )
        state = self._step(model_output, sample)
        return SchedulerOutput(prev_sample=state) if kwargs.get("return_dict", True) else (state,)

    members: dict[str, Any] = {
        # Pipelines inspect these signatures to decide which arguments to pass.
        "set_timesteps": functools.wraps(parent.set_timesteps)(set_timesteps),
        "step": functools.wraps(parent.step)(step),
        "parametrisation": parametrisation,
        "_state": None,
        "_given": None,
        "_written": 0,
        "_device": "cpu",
        "_base": 0,
    }
    head_class: Any = type(f"Policy{parent.__name__}", (PolicyHead, parent), members)
    head: PolicyHead = head_class.from_config(config, **overrides)
    if parametrisation == "diffusion":  # some schedulers change the alphas after making them from the betas
        head.alphas_cumprod = scheduler.alphas_cumprod.clone()
        final = getattr(scheduler, "final_alpha_cumprod", head.final_alpha_cumprod)
        head.final_alpha_cumprod = torch.as_tensor(final).clone()
    head.request = Request()
    return head


def _parent_of(scheduler: Any, config: Mapping[str, Any]) -> tuple[Any, Parametrisation]:
    """The class that a head derives from, and what its model predicts. Raises ValueError as `as_policy_head`."""
    bases = [base for base in type(scheduler).__mro__ if base.__module__.startswith("diffusers.")]
    kind = bases[0].__name__ if bases else type(scheduler).__name__  # of a class of one's own: what it derives from
    if refusal := scheduler_refusal(kind, config):
        raise ValueError(refusal)
    if is_flow_scheduler({"_class_name": kind, **config}):
        require_flow_step(scheduler)
        return type(scheduler), "flow"
    return DDIMScheduler, "diffusion"

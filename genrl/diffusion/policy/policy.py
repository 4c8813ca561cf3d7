"""Any diffusers pipeline as a stochastic policy (DESIGN 1.1): no line written for a model.

The pipeline is the environment, its scheduler (`scheduler.py`) the policy head. Four calls are made of one pipeline:

- `roll_out`: sample a segment of the denoising chain and record states and log-probabilities;
- `replay`: the log-probability of a recorded step under the current parameters, with gradients, by running the very
  code that sampled up to `scheduler.step` and leaving there;
- `velocity`: the model output at any (state, noise level), guidance and conditioning included;
- `decode`: pictures of final states.

Three wrappers on the instance make it work: `prepare_latents` (the state to resume from takes the place of the
latents it made), `encode_prompt` (memoised: each distinct prompt is encoded once) and the scheduler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from genrl.diffusion.policy.blocks import Switches
from genrl.diffusion.policy.encoding import memoise_encode_prompt
from genrl.diffusion.policy.interfaces import Decoder, Pipeline
from genrl.diffusion.policy.scheduler import PolicyHead, Request, Step, as_policy_head
from genrl.diffusion.policy.trajectory import ODE, Batch, Children, Kernel, Replayed, Trajectory, of_rows, step_noise
from genrl.kernels.backend import Backend, TooManyGraphs
from genrl.kernels.sde_step import sde_step
from genrl.mdp.gaussian import Reduction, log_prob, sample
from genrl.mdp.kernels import PredictionType, Transition
from genrl.mdp.noise import derive_seed
from genrl.runtime.sharding import is_sharded

DENOISERS = ("transformer", "unet", "transformer_2")


def _per_prompt(arguments: Mapping[str, Any], length: int) -> dict[str, Any]:
    """One negative prompt for all: some pipelines refuse a string beside a list of prompts."""
    return {
        name: [value] * length if name.startswith("negative_prompt") and isinstance(value, str) else value
        for name, value in arguments.items()
    }


def _decode_in_own_precision(pipe: Pipeline) -> None:
    """Take the decoder out of autocast, which is meant for the denoiser: in bfloat16 pictures lose shades."""
    decoder = pipe.components.get("vae")
    if not isinstance(decoder, nn.Module) or not isinstance(decoder, Decoder):
        return
    original = decoder.decode

    @functools.wraps(original)
    def decode(latents: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(latents.device.type, enabled=False):
            return original(latents.to(decoder.dtype), *args, **kwargs)

    decoder.decode = decode


class _Leave(Exception):
    """Leaves the pipeline from within `scheduler.step`; the rest of the call is not needed."""


class Policy:
    """A diffusers pipeline that can be rolled out, replayed and trained.

    The pipeline is changed in place: its scheduler becomes a policy head, `prepare_latents` and `encode_prompt` are
    wrapped on the instance, everything is put into eval mode without gradients (`weights.py` makes parameters
    trainable again).

    Raises ValueError where the pipeline does not fit, with the reason.
    """

    _latents_shape: torch.Size

    def __init__(
        self,
        pipe: Pipeline,
        *,
        autocast: torch.dtype | None = None,
        reduction: Reduction = "mean",
        offload_text_encoders: bool = False,
    ) -> None:
        name = type(pipe).__name__
        if isinstance(pipe.scheduler, PolicyHead):
            raise ValueError(f"this {name} is a policy already: use that Policy again, or load the pipeline anew")
        self.denoisers: dict[str, nn.Module] = {
            n: c for n in DENOISERS if isinstance(c := pipe.components.get(n), nn.Module)
        }
        if not self.denoisers:
            raise ValueError(f"{name} has no denoiser: none of its components is called {', '.join(DENOISERS)}")
        for method in ("prepare_latents", "encode_prompt"):
            if not callable(getattr(pipe, method, None)):
                raise ValueError(f"{name} has no `{method}`: its loop cannot be resumed from a recorded state")
        if not hasattr(type(pipe).__call__, "__wrapped__"):
            raise ValueError(f"{name}.__call__ is not decorated by torch.no_grad(): no undecorated call to replay with")
        self.pipe = pipe
        self.autocast = autocast
        self.reduction = reduction
        self.original_scheduler = pipe.scheduler
        self.head = as_policy_head(pipe.scheduler)
        pipe.scheduler = self.head
        pipe.set_progress_bar_config(disable=True)
        for component in pipe.components.values():
            if isinstance(component, nn.Module):
                component.eval().requires_grad_(False)
        memoise_encode_prompt(pipe, offload=offload_text_encoders)
        if autocast is not None:
            _decode_in_own_precision(pipe)
        self.fused_step: Backend | None = None
        """Back-end of the fused stochastic step and log-probability (`genrl.kernels.sde_step`); None: apart."""
        self.switches = Switches()
        self.singly = False
        """Whether samples of unequal noise levels are called one by one where they cannot be together: the groups of
        equal levels have any size, and a compiled denoiser has a graph per size."""
        self._injected: Tensor | None = None
        self._broadcasts_timesteps: dict[tuple[tuple[str, Any], ...], bool] = {}
        self._wrap_prepare_latents()
        self.model_calls = 0
        """Denoiser evaluations so far, counted per sample: a batch of 8 with doubled guidance counts 16."""
        for denoiser in self.denoisers.values():
            denoiser.register_forward_pre_hook(self._count, with_kwargs=True)

    @property
    def denoiser(self) -> nn.Module:
        """The (first) network that is trained."""
        return next(iter(self.denoisers.values()))

    @property
    def prediction_type(self) -> PredictionType:
        """What the network of a model that is no flow predicts: `as_policy_head` lets no others in."""
        return cast(PredictionType, str(self.head.config.get("prediction_type", "epsilon")))

    @property
    def embeds_guidance(self) -> bool:
        """Whether guidance is an input of the network (distilled models, as FLUX.1-dev), not a second prediction."""
        return any(getattr(one.config, "guidance_embeds", None) is True for one in self.denoisers.values())

    @property
    def device(self) -> torch.device:
        return next(self.denoiser.parameters()).device

    def roll_out(
        self,
        batch: Batch,
        kernel: Kernel = ODE,
        stochastic: Container[int] = (),
        *,
        start: int = 0,
        stop: int | None = None,
        state: Tensor | None = None,
        children: Children | None = None,
        predict: bool = False,
        keep: Collection[int] = (),
    ) -> Trajectory:
        """Run steps [start, stop) of the schedule, from `state` (x_start, float32 [B, ...]) or from fresh noise.

        Steps in `stochastic` are drawn from the kernel and recorded; all others are Euler (DDIM, eta 0) steps. A
        step whose transition has no variance is never recorded: the last one of flow_cps and flow_ddim. That of the
        SDE kernels has one, and is deterministic only because trainers leave it out of `stochastic`. With `children`
        the last step branches: each is drawn from its row's transition, and the call is left there. With `predict` the
        trajectory holds the clean sample that the last step's model output stands for. keep: recorded steps whose
        graphs are kept (`Trajectory.graphs`): gradients go into their model calls, not through states.
        """
        states: dict[int, Tensor] = {}
        next_states: dict[int, Tensor] = {}
        log_probs: dict[int, Tensor] = {}
        initial: Tensor | None = None
        final: Tensor | None = state
        predicted: Tensor | None = None
        graphs: dict[int, Replayed] = {}
        seen = 0

        def on_step(step: Step) -> Tensor:
            nonlocal initial, final, predicted, seen
            initial = step.state if seen == 0 else initial
            seen += 1
            i = step.index
            self._check_shape(step)
            transition = self._transition(step, kernel if i in stochastic else ODE)
            final = transition.mean.detach()
            if predict:
                predicted = self._predicted_clean(step)
            branching = children if stop is not None and i == stop - 1 else None
            if i in stochastic and bool((transition.std > 0).all()):
                rows = None if branching is None else branching.parent_row
                drawn = transition if rows is None else of_rows(transition, rows)
                noise = step_noise(step.state.shape[1:], i, batch.keys, branching)
                if self.fused_step is None:
                    final = sample(drawn.mean.detach(), drawn.std, noise)
                    recorded = self._replayed(step, drawn, final, rows)
                else:
                    final, recorded = self._fused(self.fused_step, step, kernel, rows, noise=noise)
                log_probs[i] = recorded.log_prob.detach()
                if i in keep:
                    graphs[i] = recorded
                states[i], next_states[i] = step.state, final
                if branching is None:
                    states[i + 1] = final
            elif branching is not None:
                raise ValueError(f"step {i} branches, but its transition has no variance: its children would be equal")
            if branching is not None:
                raise _Leave  # the loop goes on with as many rows as it began with
            if keep:  # of the next model call, which the pipeline makes from here
                torch.set_grad_enabled(i + 1 in keep)
            return final

        with torch.set_grad_enabled(start in keep):
            self._call(batch, Request(start, stop, on_step=on_step), state=state, grad=bool(keep))
        length = len(self.head.full_timesteps)
        end = length if stop is None else stop
        if seen != end - start or initial is None or final is None:
            raise ValueError(
                f"{type(self.pipe).__name__} made {seen} denoising steps where {end - start} of its {length} were "
                "asked for: it does not run one step per timestep, or cuts the schedule itself, and cannot be replayed"
            )
        sigmas = self.head.full_sigmas if self.head.parametrisation == "flow" else self.head.full_timesteps
        return Trajectory(
            batch, kernel, states, next_states, log_probs, final, sigmas, end, initial, children, predicted, graphs
        )

    def replay(self, trajectory: Trajectory, index: int, batch: Batch | None = None) -> Replayed:
        """Step `index` of a trajectory under the current parameters; on-policy, `log_prob` equals the recorded one.

        `batch` replaces the trajectory's own where the step is to be judged under other conditions (no guidance).
        Gradients are kept where they are enabled. Raises KeyError for a step that was not recorded.
        """
        next_state, rows = trajectory.next_states[index], trajectory.rows(index)
        step = self._leave_at(batch or trajectory.batch, Request(index, index + 1), trajectory.states[index])
        if self.fused_step is not None:
            return self._fused(self.fused_step, step, trajectory.kernel, rows, taken=next_state)[1]
        transition = self._transition(step, trajectory.kernel)
        return self._replayed(step, transition if rows is None else of_rows(transition, rows), next_state, rows)

    def _replayed(self, step: Step, transition: Transition, next_state: Tensor, rows: Tensor | None) -> Replayed:
        output = step.model_output if rows is None else step.model_output[rows.to(step.model_output.device)]
        logp = log_prob(next_state, transition.mean, transition.std, self.reduction)
        return Replayed(logp, transition.mean, transition.std, output, step)

    def _fused(
        self, backend: Backend, step: Step, kernel: Kernel, rows: Tensor | None, *, noise: Tensor | None = None,
        taken: Tensor | None = None,
    ) -> tuple[Tensor, Replayed]:  # fmt: skip
        """A stochastic step and its log-probability by `genrl.kernels.sde_step`: (next state, as `replay` gives it).

        A flow's transition is linear in state and velocity, so its coefficients are the means at (1, 0) and (0, 1).
        """
        x, output = step.state, step.model_output
        if rows is not None:
            x, output = x[rows.to(x.device)], output[rows.to(output.device)]
        unit = torch.ones(len(x), 1, dtype=torch.float64)
        on_state, on_velocity = (
            self._transition(replace(step, state=state, model_output=velocity), kernel)
            for state, velocity in ((unit, 0.0 * unit), (0.0 * unit, unit))
        )
        coefficients = (t.flatten() for t in (on_state.mean, on_velocity.mean, on_state.std))
        found = sde_step(x, output, *coefficients, noise=noise, taken=taken, reduction=self.reduction, backend=backend)
        std = on_state.std.to(found.mean).view(-1, *[1] * (x.dim() - 1))
        return found.next, Replayed(found.log_prob, found.mean, std, output, step)

    def velocity(self, batch: Batch, state: Tensor, sigma: Tensor) -> Tensor:
        """The model output at any state, float32 [B, ...]. Gradients are kept where they are enabled.

        state: float32 [B, ...]; sigma: noise level in [0, 1], [] or one per sample [B] (diffusion parametrisation:
        the timestep itself). Where the pipeline does not broadcast one timestep per sample (guidance by doubling the
        batch, for one), samples are called in groups of equal sigma; one by one with `singly`, and where the denoiser
        is sharded, since every process has to make as many calls.
        """
        if sigma.numel() == 1:  # one sample says nothing about whether the pipeline takes one timestep per sample
            sigma = sigma.reshape(())
        if sigma.ndim == 0 or self._takes_timesteps(batch, state, sigma):
            return self._leave_at(batch, Request(at=sigma), state).model_output
        if self.singly or self._is_sharded:
            groups = list(torch.arange(len(batch), device=sigma.device).split(1))
        else:
            groups = [(sigma == level).nonzero().flatten() for level in sigma.unique()]
        outputs = [
            self._leave_at(batch.take(rows.tolist()), Request(at=sigma[rows[0]]), state[rows]).model_output
            for rows in groups
        ]
        return torch.cat(outputs)[torch.cat(groups).argsort()]

    def advance(self, batch: Batch, state: Tensor, index: int, *, clean: bool = False) -> Tensor:
        """Deterministic step `index` of the schedule (Euler; DDIM, eta 0) from `state`, float32 [B, ...]: x_{i+1}, or
        with `clean` the clean sample that its model output stands for. Equal to what `roll_out` gives. Gradients are
        kept where they are enabled, also those to `state`, so that steps can be chained.
        """
        step = self._leave_at(batch, Request(index, index + 1), state)
        return self._predicted_clean(step) if clean else self._transition(step, ODE).mean

    def decode(self, batch: Batch, final: Tensor, *, grad: bool = False) -> Tensor:
        """Pictures of final states: float32 in [0, 1], [B, 3, H, W], or [B, F, 3, H, W] for video.

        With `grad` the decoder is differentiated through.
        """
        length = batch.sampling["num_inference_steps"]
        images = self._call(batch, Request(length, length), state=final, output_type="pt", grad=grad)
        if not isinstance(images, Tensor):
            images = torch.stack(list(images))
        return images.float()

    def generate(self, batch: Batch) -> Tensor:
        """Final states by the pipeline's own deterministic solver, float32 [B, ...]: evaluation."""
        final: Tensor = self._call(batch, Request(), state=None)
        return final.float()

    def state_shape(self, batch: Batch) -> torch.Size:
        """Shape of the states of a batch, [B, ...]. No model call."""
        length = batch.sampling["num_inference_steps"]
        self._call(batch, Request(length, length), state=None)
        return self._latents_shape

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Within the block model calls are not counted: the counter is of training, and the same after a resume."""
        calls = self.model_calls
        try:
            yield
        finally:
            self.model_calls = calls

    @property
    def _is_sharded(self) -> bool:
        return any(is_sharded(denoiser) for denoiser in self.denoisers.values())

    def _check_shape(self, step: Step) -> None:
        if step.state.shape != self._latents_shape:
            raise ValueError(
                f"{type(self.pipe).__name__} hands states of shape {tuple(step.state.shape)} to its scheduler and "
                f"latents of shape {tuple(self._latents_shape)} to its loop: not all of them are denoised, or "
                "they are packed in between; no state can be resumed"
            )

    def _transition(self, step: Step, kernel: Kernel) -> Transition:
        return kernel.transition(
            step, self.head.parametrisation, self.prediction_type, self.head.clip_range, self.head.threshold
        )

    def _predicted_clean(self, step: Step) -> Tensor:
        """x_0 as this step's model output has it: the deterministic step to where there is no noise."""
        noiseless = torch.full_like(step.sigma_next, 0.0 if self.head.parametrisation == "flow" else 1.0)
        return self._transition(replace(step, sigma_next=noiseless), ODE).mean

    def _takes_timesteps(self, batch: Batch, state: Tensor, sigma: Tensor) -> bool:
        """Whether the pipeline takes one timestep per sample under these settings: found once for each, by trying."""
        plain = (str, int, float, bool, type(None))
        settings = tuple(sorted((k, v) for k, v in batch.sampling.items() if isinstance(v, plain)))
        if settings not in self._broadcasts_timesteps:
            try:
                with torch.no_grad(), self.uncounted():  # a resumed run tries again
                    self._leave_at(batch, Request(at=sigma), state)
                self._broadcasts_timesteps[settings] = True
            except (torch.OutOfMemoryError, TooManyGraphs):
                raise
            except (RuntimeError, TypeError, ValueError):
                self._broadcasts_timesteps[settings] = False
        return self._broadcasts_timesteps[settings]

    def _leave_at(self, batch: Batch, request: Request, state: Tensor) -> Step:
        seen: list[Step] = []

        def on_step(step: Step) -> Tensor:
            seen.append(step)
            raise _Leave

        request.on_step = on_step
        self._call(batch, request, state=state, grad=torch.is_grad_enabled())
        return seen[0]

    def _call(
        self,
        batch: Batch,
        request: Request,
        *,
        state: Tensor | None,
        output_type: str = "latent",
        grad: bool = False,
    ) -> Any:
        """One pipeline call. Returns its pictures, or None where the call was left from within a step."""
        call: Callable[..., Any] = type(self.pipe).__call__
        if grad:
            call = call.__wrapped__  # type: ignore[attr-defined]
        generators = [
            torch.Generator().manual_seed(derive_seed(*key, "initial")) for key in batch.initial_keys or batch.keys
        ]
        self.head.request, self._injected = request, state
        try:
            with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
                output = call(
                    self.pipe,
                    prompt=list(batch.prompts),  # some pipelines overwrite the list
                    generator=generators,
                    output_type=output_type,
                    return_dict=False,
                    **_per_prompt(batch.sampling, len(batch)),
                    **batch.inputs,
                )
            return output[0]
        except _Leave:
            return None
        finally:
            self.head.request, self._injected = Request(), None

    def _wrap_prepare_latents(self) -> None:
        original = self.pipe.prepare_latents

        @functools.wraps(original)
        def prepare_latents(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            latents = made[0] if isinstance(made, tuple) else made
            self._latents_shape, self.head.latents_dtype = latents.shape, latents.dtype
            if self._injected is None:
                return made
            if latents.shape != self._injected.shape:
                raise ValueError(
                    f"{type(self.pipe).__name__}.prepare_latents makes latents of shape {tuple(latents.shape)}, its "
                    f"loop runs on states of shape {tuple(self._injected.shape)}: no state can be resumed"
                )
            given = self.head.hold(self._injected.to(latents.device))
            return (given, *made[1:]) if isinstance(made, tuple) else given

        self.pipe.prepare_latents = prepare_latents

    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = args[0] if args else kwargs.get("hidden_states", kwargs.get("sample", kwargs.get("x")))
        self.model_calls += len(states) if states is not None else 1

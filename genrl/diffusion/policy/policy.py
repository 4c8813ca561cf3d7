"""Any diffusers pipeline as a stochastic policy: no line written for a model.

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

import inspect
from collections.abc import Collection, Container, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from genrl.diffusion.config.model_rules import DENOISERS
from genrl.diffusion.config.pipeline_classes import source_of
from genrl.diffusion.policy.blocks import Switches
from genrl.diffusion.policy.calls import Actions, PipelineCalls, Recording, predicted_clean
from genrl.diffusion.policy.compiling import TooManyGraphs
from genrl.diffusion.policy.encoding import memoise_encode_prompt
from genrl.diffusion.policy.encoding_store import Store
from genrl.diffusion.policy.interfaces import Pipeline
from genrl.diffusion.policy.scheduler import PolicyHead, Request, Step, as_policy_head
from genrl.diffusion.policy.trajectory import ODE, Batch, Children, Kernel, Replayed, StepRecord, Trajectory
from genrl.mdp.kernels import Reduction


class Policy:
    """A diffusers pipeline that can be rolled out, replayed and trained.

    The pipeline is changed in place: its scheduler becomes a policy head, `prepare_latents` and `encode_prompt` are
    wrapped on the instance, everything is put into eval mode without gradients (`adapters.py` makes parameters
    trainable again).

    Raises ValueError where the pipeline does not fit, with the reason.
    """

    def __init__(
        self,
        pipe: Pipeline,
        *,
        autocast: torch.dtype | None = None,
        reduction: Reduction = "mean",
        text_encoders: Literal["encode_then_free", "between"] | None = None,
        encodings: Store | None = None,
        trains_encoders: bool = False,
    ) -> None:
        name = type(pipe).__name__
        if isinstance(pipe.scheduler, PolicyHead):
            raise ValueError(f"this {name} is a policy already: use that Policy again, or load the pipeline anew")
        self.denoisers: dict[str, nn.Module] = {
            n: c for n in DENOISERS if isinstance(c := pipe.components.get(n), nn.Module)
        }
        if not self.denoisers:
            raise ValueError(f"{name} has no denoiser: none of its components is called {', '.join(DENOISERS)}")
        # The two seams that every pipeline has by convention of diffusers: without them a step cannot be repeated
        # alone.
        for method in ("prepare_latents", "encode_prompt"):
            if not callable(getattr(pipe, method, None)):
                raise ValueError(f"{name} has no `{method}`: its loop cannot be resumed from a recorded state")
        # Gradients need the call below the decorator; a pipeline without one was written for another version of
        # diffusers.
        if not hasattr(type(pipe).__call__, "__wrapped__"):
            raise ValueError(f"{name}.__call__ is not decorated by torch.no_grad(): no undecorated call to replay with")
        self.pipe = pipe
        self.autocast = autocast
        self.original_scheduler = pipe.scheduler
        self.head = as_policy_head(pipe.scheduler)
        # The pipeline reads nothing else of its scheduler than it did before, so that its loop needs no change.
        pipe.scheduler = self.head
        pipe.set_progress_bar_config(disable=True)
        for component in pipe.components.values():
            if isinstance(component, nn.Module):
                # What is trained is chosen later; with dropout, training would replay something else.
                component.eval().requires_grad_(False)
        self.memo = memoise_encode_prompt(
            pipe,
            offload=text_encoders == "between",
            ahead=text_encoders == "encode_then_free",
            trained=trains_encoders,
            store=encodings,
        )
        self.calls = PipelineCalls(pipe, self.head, self.denoiser, autocast)
        self.actions = Actions(self.head, reduction)
        source = source_of(name)
        self._writes = source is not None and source.loop is not None and source.loop.writes
        self.switches = Switches()
        self.singly = False
        """Whether samples of unequal noise levels are called one by one where they cannot be together: the groups of
        equal levels have any size, a compiled denoiser has a graph per size, and processes that make their calls
        together must make as many."""
        self._broadcasts_timesteps: dict[tuple[tuple[str, Any], ...], bool] = {}
        self.model_calls = 0
        """Denoiser evaluations so far, counted per sample: a batch of 8 with doubled guidance counts 16."""
        self.hooks = [d.register_forward_pre_hook(self._count, with_kwargs=True) for d in self.denoisers.values()]
        self.untouched: Untouched | None = None
        """How the pipeline was before it became a policy, where that was noted."""

    def release(self) -> Pipeline:
        """The pipeline for use without this policy, which ends: with its own scheduler and methods, as trained."""
        for hook in self.hooks:
            hook.remove()
        if self.untouched is not None:
            self.untouched.put_back(self.pipe)
        return self.pipe

    @property
    def denoiser(self) -> nn.Module:
        """The (first) network that is trained."""
        return next(iter(self.denoisers.values()))

    @property
    def embeds_guidance(self) -> bool:
        """Whether guidance is an input of the network (distilled models, as FLUX.1-dev), not a second prediction."""
        return any(getattr(denoiser.config, "guidance_embeds", None) is True for denoiser in self.denoisers.values())

    @property
    def device(self) -> torch.device:
        return self.calls.device

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
        if children is not None and self.calls.blends:
            raise ValueError(
                f"samples of a {type(self.pipe).__name__} cannot branch: it blends the picture into its states between "
                "steps, of which it knows one per prompt"
            )
        recording = Recording(self.actions, batch, kernel, stochastic, stop, children, predict, keep)

        def on_step(step: Step) -> Tensor:
            self.calls.check_shape(step)
            return recording.on_step(step)

        # For the first model call, which comes before any `on_step`; that sets it for each next one.
        with torch.set_grad_enabled(start in keep):
            request = Request(start, stop, on_step=on_step, on_end=recording.on_end)
            self.calls(batch, request, state=state, grad=bool(keep))
        length = len(self.head.full_timesteps)
        end = length if stop is None else stop
        # A loop that skips or adds steps would train on others than were meant, without a sign of it in any figure.
        if recording.seen != end - start or end == start:
            raise ValueError(
                f"{type(self.pipe).__name__} made {recording.seen} denoising steps where {end - start} of its {length} "
                "were asked for: it does not run one step per timestep, or cuts the schedule itself, and cannot be "
                "replayed"
            )
        # Some pipelines round the number, or make it of another argument.
        asked_for, scheduled = batch.sampling.get("num_inference_steps"), len(self.head.uncut[0])
        if asked_for not in (None, scheduled):
            raise ValueError(
                f"{type(self.pipe).__name__} made a schedule of {scheduled} steps where {asked_for} were asked for: "
                "what is sampled and trained would not be the steps that were meant"
            )
        sigmas = self.head.full_sigmas if self.head.parametrisation == "flow" else self.head.full_timesteps
        return recording.trajectory(sigmas, end)

    def replay(self, record: StepRecord) -> Replayed:
        """A recorded step under the current parameters; on-policy, `log_prob` equals the recorded one. Gradients are
        kept where they are enabled."""
        # The pipeline itself runs up to its scheduler and is left there: what trains is what sampled, to the bit.
        step = self.calls.leave_at(record.batch, Request(record.index, record.index + 1), record.state)
        return self.actions.evaluate(step, record.kernel, record.rows, record.next_state)

    def velocity(self, batch: Batch, state: Tensor, sigma: Tensor) -> Tensor:
        """The model output at any state, float32 [B, ...]. Gradients are kept where they are enabled.

        state: float32 [B, ...]; sigma: noise level in [0, 1], [] or one per sample [B] (diffusion parametrisation:
        the timestep itself). Where the pipeline does not broadcast one timestep per sample (guidance by doubling the
        batch, for one), samples are called in groups of equal sigma; one by one with `singly`.
        """
        if sigma.numel() == 1:  # one sample says nothing about whether the pipeline takes one timestep per sample
            sigma = sigma.reshape(())
        if sigma.ndim == 0 or self._takes_timesteps(batch, state, sigma):
            return self.calls.leave_at(batch, Request(at=sigma), state).model_output
        if self.singly:
            groups = list(torch.arange(len(batch), device=sigma.device).split(1))
        else:
            groups = [(sigma == level).nonzero().flatten() for level in sigma.unique()]
        outputs = [
            self.calls.leave_at(batch.take(rows.tolist()), Request(at=sigma[rows[0]]), state[rows]).model_output
            for rows in groups
        ]
        # Back in the order of the samples.
        return torch.cat(outputs)[torch.cat(groups).argsort()]

    def advance(self, batch: Batch, state: Tensor, index: int, *, clean: bool = False) -> Tensor:
        """Deterministic step `index` of the schedule (Euler; DDIM, eta 0) from `state`, float32 [B, ...]: x_{i+1}, or
        with `clean` the clean sample that its model output stands for. Equal to what `roll_out` gives. Gradients are
        kept where they are enabled, also those to `state`, so that steps can be chained.
        """
        if clean:
            return predicted_clean(self.head, self.calls.leave_at(batch, Request(index, index + 1), state))
        reached: list[Tensor] = []

        def on_step(step: Step) -> Tensor:
            reached.append(ODE.transition(step, self.head).mean)
            return reached[0]

        request = Request(index, index + 1, on_step=on_step, on_end=reached.append)
        self.calls(batch, request, state=state, grad=torch.is_grad_enabled())
        return reached[-1]

    def decode(self, batch: Batch, final: Tensor, *, grad: bool = False) -> Tensor:
        """Pictures of final states: float32 in [0, 1], [B, 3, H, W], or [B, F, 3, H, W] for video.

        With `grad` the decoder is differentiated through.
        """
        images = self.calls(batch, Request(empty=True), state=final, output_type="pt", grad=grad)
        # Some video pipelines return a list.
        if not isinstance(images, Tensor):
            images = torch.stack(list(images))
        return images.float()

    def generate(self, batch: Batch) -> Tensor:
        """Final states by the pipeline's own deterministic solver, float32 [B, ...]: evaluation."""
        reached: list[Tensor] = []
        # A loop that tells its ends gives the float32 state; of another one there is only what it returns, rounded.
        latents: Tensor = self.calls(batch, Request(on_end=reached.append))
        return reached[-1] if reached else latents.float()

    def state_shape(self, batch: Batch) -> torch.Size:
        """Shape of the states of a batch, [B, ...]. No model call."""
        return self.calls.state_shape(batch)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Within the block model calls are not counted: the counter is of training, and the same after a resume."""
        calls = self.model_calls
        try:
            yield
        finally:
            self.model_calls = calls

    def _takes_timesteps(self, batch: Batch, state: Tensor, sigma: Tensor) -> bool:
        """Whether the pipeline takes one timestep per sample under these settings: found once for each, by trying."""
        # Others are not hashable, and do not decide how a timestep is broadcast.
        plain = (str, int, float, bool, type(None))
        settings = tuple(sorted((k, v) for k, v in batch.sampling.items() if isinstance(v, plain)))
        if settings not in self._broadcasts_timesteps:
            try:
                with torch.no_grad(), self.uncounted():  # a resumed run tries again
                    self.calls.leave_at(batch, Request(at=sigma), state)
                self._broadcasts_timesteps[settings] = True
            except (torch.OutOfMemoryError, TooManyGraphs):  # RuntimeErrors too, which say nothing of timesteps
                raise
            # A pipeline says no in its own way: by shapes that do not match, or by `if t > ...` on several values.
            except (RuntimeError, TypeError, ValueError):
                self._broadcasts_timesteps[settings] = False
        return self._broadcasts_timesteps[settings]

    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # The first argument of a denoiser: hidden_states of transformers, sample of U-Nets, x of Z-Image.
        states = args[0] if args else kwargs.get("hidden_states", kwargs.get("sample", kwargs.get("x")))
        self.model_calls += len(states) if states is not None else 1
        if self._writes and torch.is_grad_enabled():  # into what the graph holds (Kandinsky 5)
            return args, kwargs | {"hidden_states": kwargs["hidden_states"].clone()}
        return None


class Untouched:
    """What `Policy` and its loading change on a pipeline beside its networks: class, scheduler, wrapped methods.

    Adapters and weights stay as they are trained.
    """

    def __init__(self, pipe: Pipeline) -> None:
        self.kind, self.attributes = type(pipe), dict(vars(pipe))

    def put_back(self, pipe: Pipeline) -> None:
        """Undo the changes, in place."""
        pipe.__class__ = self.kind
        held = vars(pipe)
        held.clear()
        held.update(self.attributes)


def guided(batch: Batch, scale: float | None) -> Batch:
    """Conditions as they are, under this guidance; None = theirs."""
    return batch if scale is None else replace(batch, sampling={**batch.sampling, "guidance_scale": scale})


def without_guidance(policy: Policy, batch: Batch) -> Batch:
    """Conditions as they are, for a policy that is trained without guidance.

    Guidance that is an input of the network stays: it is no extrapolation that could be left out, and another value
    would be another condition than that of sampling. Beside it such pipelines extrapolate by `true_cfg_scale` where
    they are given a negative prompt, some by default (Qwen-Image: 4); that is left out.
    """
    batch = batch if policy.embeds_guidance else guided(batch, 1.0)
    if not guides_by_negative(policy, batch):
        return batch
    return replace(batch, sampling={**batch.sampling, "true_cfg_scale": 1.0})


def guides_by_negative(policy: Policy, batch: Batch) -> bool:
    """Whether the pipeline extrapolates from a negative prompt that it is given, by `true_cfg_scale`."""
    taken = inspect.signature(type(policy.pipe).__call__).parameters
    if "true_cfg_scale" not in taken or batch.sampling.get("negative_prompt") is None:
        return False
    return bool(batch.sampling.get("true_cfg_scale", taken["true_cfg_scale"].default) > 1)


def without_prompts(batch: Batch) -> Batch:
    """What guidance extrapolates from: no text, or the negative prompt that the pipeline is given."""
    return replace(batch, prompts=[batch.sampling.get("negative_prompt") or ""] * len(batch))

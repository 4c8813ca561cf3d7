"""`genrl train` for a pipeline: what of the frame is its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator

import genrl_rewards
from genrl.data import prompts as prompt_files
from genrl.data.sizes import short_bucket, sized
from genrl.diffusion.before import MEMORY_HINT, Tell, batches, encode_ahead, place, require_apart, text_encoders
from genrl.diffusion.config.combinations import processes_problem
from genrl.diffusion.config.model_rules import detaches_unconditional, experts_problem, is_text_encoder
from genrl.diffusion.config.pipeline_classes import strength_problem
from genrl.diffusion.config.schema import Config
from genrl.diffusion.config.sections import Kernels, Offload
from genrl.diffusion.evaluate import evaluation_arguments
from genrl.diffusion.files.export import probe_of
from genrl.diffusion.policy.adapters import adapted_parts, trainable
from genrl.diffusion.policy.blocks import install
from genrl.diffusion.policy.compiling import divide
from genrl.diffusion.policy.decoding import spare_vae
from genrl.diffusion.policy.encoding import keep_execution_device
from genrl.diffusion.policy.encoding_store import open_store
from genrl.diffusion.policy.interfaces import Checkpointing
from genrl.diffusion.policy.loading import check_call_arguments, load_pipeline
from genrl.diffusion.policy.policy import Policy, Untouched
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.policy.unconditional import Unconditional
from genrl.diffusion.rollout.ray_rewards import RewardPool
from genrl.diffusion.rollout.ray_rollouts import Ahead, RayRollouts
from genrl.diffusion.rollout.rollout import batch_arguments, batch_inputs, call_arguments, check_inputs
from genrl.diffusion.rollout.scoring import Scorers, check_rows, open_scorers
from genrl.diffusion.run import DiffusionRun
from genrl.kernels.machine import attention_problem, compile_problem, usable
from genrl.runtime.loop import frame
from genrl.runtime.loop.process import Process
from genrl.runtime.loop.ray_cluster import cluster, room_for
from genrl.runtime.loop.replay import Reopened
from genrl.runtime.weights.sharding import Sharding
from genrl.runtime.weights.weights import REFERENCE, Weights

Rows = tuple[list[prompt_files.Prompt], list[prompt_files.Prompt]]


def train(config: Config, resume: Path | None = None) -> Path:
    """Train a pipeline (`frame.train`)."""
    return frame.train(config, resume)


def check_processes(config: Config, num_processes: int) -> None:
    """ValueError where the configuration does not fit the number of processes."""
    if problem := processes_problem(config, num_processes):
        raise ValueError(problem)


def prepare(config: Config, accelerator: Accelerator) -> None:
    """A pipeline is loaded once the folder is claimed: it may take long, and progress is shown."""


def open_run(config: Config, process: Process, prepared: None, stack: ExitStack) -> DiffusionRun:
    """Load prompts, rewards and the pipeline, and make its parameters trainable."""
    device, stop = process.accelerator.device, process.stop
    prompts, eval_prompts = read_prompts(config)
    closing = Event()

    def stopped() -> bool:
        return stop.requested or closing.is_set()

    places = open_cluster(config, process, stack)
    pool = None
    if places is not None and places.rewards:
        pool = RewardPool(config, places.rewards, places.options, stopped)
        stack.callback(pool.close)
    # Rewards come before the pipeline: what is wrong with them is told before the part that takes minutes.
    scorers = open_scorers(config, str(device), stopped, pool)
    stack.callback(scorers.close)
    check_rewards(config, scorers, prompts, eval_prompts)
    process.progress.phase("loading")
    # The actors load their pipelines while this process loads its own: they are waited for at the end.
    far = RayRollouts(config, places.rollouts, places.options) if places is not None else None
    if far is not None:
        stack.callback(far.close)
    policy = open_policy(config, device, (prompts, eval_prompts), tell=partial(_tell, process))
    check_call_arguments(policy.pipe, {name for row in (*prompts, *eval_prompts) for name in row.size})
    summary = use_kernels(policy, config.kernels)
    if summary:
        process.progress.say(summary)
    # How many denoisers a pipeline has is known once it is loaded; all else was refused by `check`.
    if problem := experts_problem(config, len(policy.denoisers)):
        raise ValueError(f"{config.sharded_by}: {problem}")
    weights = trainable_weights(config, policy, sharding_of(config, device))
    if process.context > 1:
        divide(policy.denoisers, process.replicas, device)
    ahead = None
    if far is not None and config.sampling.staleness:
        ahead = Ahead(far, scorers, policy.device, closing)
        stack.callback(ahead.close)
    detach_where_asked(config, policy, prompts[0])
    _keep_apart(config, policy, prompts)
    run = DiffusionRun(config, process, policy, weights, prompts, eval_prompts, scorers, far, ahead)
    if far is not None:
        far.ready()
    return run


class Places(NamedTuple):
    """What this process has of a Ray cluster."""

    rollouts: int
    """Actors that draw."""
    rewards: int
    """Actors that score."""
    options: dict[str, Any]
    """Ray's, for each of them."""


def open_cluster(config: Config, process: Process, stack: ExitStack) -> Places | None:
    """Connect to the cluster of the configuration; None without one."""
    engine, accelerator = config.engine, process.accelerator
    if engine is None:
        return None
    stack.enter_context(cluster(accelerator))
    processes = accelerator.num_processes
    rollouts, scoring = engine.rollout_workers // processes, engine.reward_workers // processes
    options = stack.enter_context(room_for(rollouts + scoring, accelerator.device.type))
    return Places(rollouts, scoring, options)


def read_prompts(config: Config) -> Rows:
    """Prompts to train on and held-out ones, checked for the pictures that the pipeline is given with them."""
    sampling = config.sampling
    prompts = _read(config, config.prompts.train)
    arguments = sampling.prompts_together, sampling.buckets, sampling.picture_column
    if sampling.buckets and (problem := short_bucket(prompts, *arguments)):
        raise ValueError(f"sampling.buckets: {problem}")
    held_out = []
    if config.prompts.eval:
        held_out = _read(config, config.prompts.eval, config.evaluation.num_prompts)
        held_out = [row for row in held_out for _ in range(config.evaluation.group_size)]
    return prompts, held_out


def _read(config: Config, source: str, count: int | None = None) -> list[prompt_files.Prompt]:
    """The first rows of a source, with the sizes of their samples."""
    rows = prompt_files.load(source, config.prompts.column, pictures=config.trainer.trains_on != "pictures")[:count]
    return sized(rows, config.sampling.buckets, config.sampling.picture_column, source)


def check_rewards(
    config: Config, scorers: Scorers, prompts: list[prompt_files.Prompt], eval_prompts: list[prompt_files.Prompt]
) -> None:
    """ValueError for rewards that the method cannot use, or that need columns which the prompts lack or cannot read."""
    config.trainer.check_data(config, scorers, prompts)
    for label, scorer in scorers.rewards.items():
        # Under another method it stays as it was loaded, its head perhaps at random, and no figure would say so.
        if config.trainer.rewards_are != "trained" and genrl_rewards.is_trainable(scorer):
            raise ValueError(
                f"reward {label!r} is trained beside the model, which this algorithm does not do (adv_grpo does)"
            )
    for rows, source in ((prompts, config.prompts.train), (eval_prompts, config.prompts.eval)):
        check_rows(scorers.rewards, rows, str(source))
        check_inputs(config.sampling.inputs, rows, str(source))


def open_policy(
    config: Config,
    device: torch.device | str,
    rows: Rows | None = None,
    *,
    tell: Tell = lambda done, count: None,
) -> Policy:
    """The pipeline on the device, as a policy.

    rows: prompts to train on and held-out ones, where they are read already. tell: of (prompts encoded, of so many),
    where they are encoded before the denoiser is placed.
    """
    offload, home = config.model.offload, torch.device(device)
    policy = _unplaced(config, home)
    pipe = policy.pipe
    model = config.model
    spare_vae(pipe, sliced=model.slice_vae, tiled=model.tile_vae)
    if offload.text_encoders == "encode_then_free":
        encode_ahead(policy, config.model, batches(config, policy, *(rows or read_prompts(config))), tell)
    if not _all_placed(config):  # nothing is placed that is to leave again
        idle = text_encoders(pipe) if offload.text_encoders else []
        # A denoiser that is sharded may not fit on one device whole: each process moves its own share.
        idle += policy.denoisers if config.shards else ()
        place(pipe, home, stay=idle)
    return policy


def _unplaced(config: Config, home: torch.device) -> Policy:
    """The pipeline as a policy, on the device only where it is to stay there as it is; without its text encoders where
    all prompts are encoded ahead."""
    ahead = config.model.offload.text_encoders == "encode_then_free"
    pipe = load_pipeline(config.model, text_encoders=False) if ahead else load_pipeline(config.model)
    untouched = Untouched(pipe)
    check_call_arguments(pipe, call_arguments(config.sampling) | config.sampling.inputs)
    cut = strength_problem(type(pipe).__name__, config.sampling.pipeline_args)
    if cut is not None:
        raise ValueError(f"sampling.pipeline_args.strength: {cut}")
    check_call_arguments(pipe, evaluation_arguments(config), "evaluation")
    if _all_placed(config):
        pipe = pipe.to(home)
    keep_execution_device(pipe, home)
    policy = Policy(
        pipe,
        autocast=getattr(torch, config.model.autocast) if config.model.autocast else None,
        reduction=config.trainer.reduction,
        text_encoders=config.model.offload.text_encoders,
        encodings=open_store(config, home),
        trains_encoders=config.model.lora is not None and config.model.lora.text_encoders,
    )
    policy.untouched = untouched
    return policy


def encode(config: Config, device: torch.device | str, tell: Tell) -> tuple[int, int, int]:
    """Fill the folder of encodings (`genrl encode`). Returns how many prompts there are (a prompt once for each way of
    calling the pipeline), how many of them were not there yet, and the bytes written.

    Raises ValueError where the configuration names no folder.
    """
    if config.model.encodings is None:
        raise ValueError("model.encodings: no folder is named; write for example model.encodings=encodings")
    ahead = config.model.model_copy(update={"offload": Offload(text_encoders="encode_then_free")})
    policy = _unplaced(config.model_copy(update={"model": ahead}), torch.device(device))
    pending = batches(config, policy, *read_prompts(config))
    missing = encode_ahead(policy, config.model, pending, tell)
    assert policy.memo.store is not None
    return len(pending), missing, policy.memo.store.written


def _tell(process: Process, done: int, count: int) -> None:
    """Tell how many prompts are encoded before training."""
    if done in (1, count) or done % 100 == 0:
        process.progress.say(f"encoded {done} of {count} prompts")


def reopen(config: Config, device: str, iteration: int) -> Reopened:
    """The pipeline as a run trains it, but not compiled: modules are looked into."""
    offload = config.model.offload.model_copy(update={"denoiser": None})
    model = config.model.model_copy(update={"offload": offload})
    apart = config.distributed.model_copy(update={"fsdp": False})
    config = config.model_copy(update={"model": model, "distributed": apart})  # one process holds it whole
    policy = open_policy(config, device)
    use_kernels(policy, config.kernels)
    weights = trainable_weights(config, policy)
    detach_where_asked(config, policy, _read(config, config.prompts.train, 1)[0])
    return Reopened(policy, weights, policy.denoisers, Batch.from_dump)


def detach_where_asked(config: Config, policy: Policy, prompt: prompt_files.Prompt) -> None:
    """No gradient through guidance's unconditional prediction, where the method asks for that."""
    if detaches_unconditional(config.trainer):
        Unconditional(policy, probe_of(config, prompt))


def _keep_apart(config: Config, policy: Policy, prompts: Sequence[prompt_files.Prompt]) -> None:
    """Two prompts with pictures of their own, beside each other, before the first iteration."""
    sampling = config.sampling
    if not sampling.inputs or sampling.batch_size == 1:
        return
    column = next(iter(sampling.inputs.values()))
    first = prompts[0]
    two = next((p for p in prompts if p.columns[column] != first.columns[column] and p.size == first.size), None)
    if two is not None:
        keys = [("apart", config.seed, k) for k in range(2)]
        inputs = batch_inputs(sampling.inputs, [first, two])
        with torch.compiler.set_stance("force_eager"):  # not for two calls
            require_apart(
                policy, Batch([first.text, two.text], list(keys), batch_arguments(sampling, [first]), inputs=inputs)
            )


def _all_placed(config: Config) -> bool:
    """Whether the whole pipeline stays on the device."""
    return config.model.offload == Offload() and not config.shards


def sharding_of(config: Config, device: torch.device) -> Sharding | None:
    """How the denoisers are held in shards, in a run that asks for it."""
    if not config.shards:
        return None
    return Sharding.over(config.distributed.fsdp, device, offload=config.model.offload.denoiser == "blocks")


def trainable_weights(config: Config, policy: Policy, sharding: Sharding | None = None) -> Weights:
    """The denoisers made trainable as configured, and the reference kept where it is a snapshot."""
    weights = trainable(
        policy.denoisers,
        config.model.lora,
        seed=config.seed,
        sharding=sharding,
        pipe=policy.pipe,
        refers_to_base=config.trainer.reference == "base",
    )
    encoders = [name for name in adapted_parts(policy.pipe) if is_text_encoder(name)]
    if encoders and policy.memo.store is not None:
        raise ValueError(
            f"model.encodings: a LoRA of model.lora.frozen adapts the {encoders[0]}, and the folder keeps what plain "
            "encoders make of prompts; write null"
        )
    policy.singly = weights.in_step
    # Full fine-tuning has no adapter to switch off: the starting weights are copied while they are still those.
    if weights.refers_to_snapshot and config.trainer.reference is not None:
        weights.snapshot(REFERENCE)
    if config.model.gradient_checkpointing:
        for denoiser in policy.denoisers.values():
            if not isinstance(denoiser, Checkpointing):
                raise ValueError(f"model.gradient_checkpointing: a {type(denoiser).__name__} has none; write false")
            denoiser.enable_gradient_checkpointing()
    return weights


def use_kernels(policy: Policy, kernels: Kernels) -> str:
    """Set the fused parts and attention back-ends that a configuration asks for; returns what runs, in a line, empty
    where it asks for none.

    Raises ValueError where the model does not fit, or what is named cannot run on its device in its precision.
    """
    if not (kernels.fused or kernels.attention):
        return ""
    # Kernels are judged by an empty tensor of the device and precision that the model computes in.
    computes_in: Any = policy.denoiser.dtype  # not that of the first parameter, which may stay in float32 (Wan)
    like = torch.empty(0, dtype=policy.autocast or computes_in, device=policy.device)
    running = ["fused by torch.compile"] if kernels.fused else []
    if kernels.fused and (problem := compile_problem(like.device)):
        raise ValueError(f"kernels.fused: {problem}; write kernels.fused: false")
    if (name := kernels.attention) is not None:
        if problem := attention_problem(name, like.device, like.dtype, masked=False):
            raise ValueError(f"kernels.attention: {name}: {problem}; that can run here: {', '.join(usable(like))}")
        running.append(f"attention {name}")
    switches = policy.switches
    switches.fused, switches.attention = kernels.fused, kernels.attention
    return f"kernels: {', '.join(running)}; {install(policy.denoisers.values(), switches)}"


KIND = frame.Kind("images", check_processes, prepare, open_run, reopen, MEMORY_HINT)

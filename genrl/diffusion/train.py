"""`genrl train`: from a configuration to a trained model in a run folder."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

import rewards
from genrl.config import Config, Kernels
from genrl.data import preferences
from genrl.data import prompts as prompt_files
from genrl.diffusion.evaluate import evaluation_arguments
from genrl.diffusion.fit import settle, shrink
from genrl.diffusion.methods import direct
from genrl.diffusion.methods.adv_grpo import train as adv_grpo
from genrl.diffusion.methods.adv_grpo.settings import AdvGRPO
from genrl.diffusion.methods.awm import train as awm
from genrl.diffusion.methods.awm.settings import AWM
from genrl.diffusion.methods.crd import train as crd
from genrl.diffusion.methods.crd.settings import CRD
from genrl.diffusion.methods.d3po import train as d3po
from genrl.diffusion.methods.d3po.settings import D3PO
from genrl.diffusion.methods.dgpo import train as dgpo
from genrl.diffusion.methods.dgpo.settings import DGPO
from genrl.diffusion.methods.diff_instruct import train as diff_instruct
from genrl.diffusion.methods.diff_instruct.settings import DiffInstruct
from genrl.diffusion.methods.diffusion_nft import train as diffusion_nft
from genrl.diffusion.methods.diffusion_nft.settings import DiffusionNFT
from genrl.diffusion.methods.dpo import train as dpo
from genrl.diffusion.methods.dpo.settings import DPO
from genrl.diffusion.methods.dpo_offline import train as dpo_offline
from genrl.diffusion.methods.dpo_offline.settings import OfflineDPO
from genrl.diffusion.methods.draft import train as draft
from genrl.diffusion.methods.draft.settings import Draft
from genrl.diffusion.methods.flow_grpo import train as flow_grpo
from genrl.diffusion.methods.flow_grpo.settings import FlowGRPO
from genrl.diffusion.methods.prdp import train as prdp
from genrl.diffusion.methods.prdp.settings import PRDP
from genrl.diffusion.methods.prompt_rl import train as prompt_rl
from genrl.diffusion.methods.prompt_rl.settings import PromptRL
from genrl.diffusion.methods.spo import train as spo
from genrl.diffusion.methods.spo.settings import SPO
from genrl.diffusion.methods.talk2move import train as talk2move
from genrl.diffusion.methods.talk2move.settings import Talk2Move
from genrl.diffusion.monitor import ended_at
from genrl.diffusion.policy.blocks import install
from genrl.diffusion.policy.compiling import compile_denoisers
from genrl.diffusion.policy.decoding import spare_vae
from genrl.diffusion.policy.export import check_lora_loader, save_lora, write_card
from genrl.diffusion.policy.loading import check_call_arguments, load_pipeline
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.weights import AVERAGE, Weights
from genrl.diffusion.rollout.rollout import call_arguments, check_inputs
from genrl.diffusion.rollout.scoring import open_scorers
from genrl.diffusion.session import Abandoned, NoRoom, Session
from genrl.kernels.backend import choose
from genrl.kernels.joint_attention import attention_problem, usable
from genrl.runtime import run as run_folder
from genrl.runtime.loop import adamw, begin, claim, logger_of, make_accelerator
from genrl.runtime.metrics import check_trackers
from genrl.runtime.pictures import before_after, save_png
from genrl.runtime.progress import Progress
from genrl.runtime.report import write_report
from genrl.runtime.run import Run
from genrl.runtime.signals import Stop, Watchdog

logger = logging.getLogger(__name__)

FUSED = {"qk_norm_rope": "qk_norm_rope", "adaln": "adaln", "step": "sde_step"}
"""Kernels by the names of a configuration."""


def train(config: Config, resume: Path | None = None) -> Path:
    """Train as `config` says, into its run folder, or go on in the folder `resume`; returns the folder.

    Every process of a distributed run calls this. Raises ConfigError or ValueError for what is wrong before work
    starts, SystemExit (130, 143) where the process was asked to end and has saved.
    """
    check_trackers(config.trackers)
    accelerator = make_accelerator(config.distributed.timeout_s)
    check_processes(config, accelerator.num_processes)
    set_seed(config.seed)  # the global generators too: loading may draw from them
    with ExitStack() as stack:
        claimed = claim(stack, config.output, resume, accelerator)
        stop, watchdog, progress = begin(stack, claimed, config, accelerator)
        session = open_session(config, accelerator, claimed.run, progress, watchdog, stop, claimed.start)
        stack.callback(session.log.finish)
        stack.callback(session.scorers.close)
        if claimed.found:
            session.restore(claimed.found)
        stack.enter_context(watchdog)  # from here on there is progress to watch; loading has none to tell
        settle(session)
        if config.kernels.compile:
            graphs = config.kernels.compile == "cuda_graphs"
            session.policy.singly, session.weights.by_copy = True, graphs
            compile_denoisers(session.policy.denoisers.values(), cuda_graphs=graphs, say=progress.say)
        while True:
            try:
                run_algorithm(session)
                break
            except Abandoned:
                session.take_back()
                logger.info("the running iteration is done again on resume")
                break
            except torch.OutOfMemoryError as error:
                error.add_note(
                    f"micro-batches of {session.config.sampling.batch_size} samples do not fit: lower "
                    "sampling.batch_size, or see sampling.fit_batch, model.gradient_checkpointing and model.dtype"
                )
                raise
            except NoRoom:
                pass  # until here the error holds what did not fit
            session.take_back()
            shrink(session)
        finish(session)
    if stop.requested:
        raise SystemExit(stop.exit_code)
    return claimed.run.folder


def run_algorithm(session: Session) -> None:
    """Train by the configured algorithm, from the session's iteration on."""
    match session.config.trainer:
        case Talk2Move() as settings:
            talk2move.train(session, settings)
        case PromptRL() as settings:
            prompt_rl.train(session, settings)
        case AdvGRPO() as settings:
            adv_grpo.train(session, settings)
        case FlowGRPO() as settings:
            flow_grpo.train(session, settings)
        case DiffusionNFT() as settings:
            diffusion_nft.train(session, settings)
        case SPO() as settings:
            spo.train(session, settings)
        case PRDP() as settings:
            prdp.train(session, settings)
        case AWM() as settings:
            awm.train(session, settings)
        case DGPO() as settings:
            dgpo.train(session, settings)
        case CRD() as settings:
            crd.train(session, settings)
        case DPO() as settings:
            dpo.train(session, settings)
        case OfflineDPO() as settings:
            dpo_offline.train(session, settings)
        case D3PO() as settings:
            d3po.train(session, settings)
        case Draft() as settings:
            draft.train(session, settings)
        case DiffInstruct() as settings:
            diff_instruct.train(session, settings)


def check_processes(config: Config, num_processes: int) -> None:
    """ValueError where the configuration does not fit the number of processes. Only sharding asks for anything: its
    forward passes are collectives, so every process must have as many micro-batches in every update."""
    if not config.distributed.fsdp:
        return
    if num_processes == 1:
        raise ValueError(
            "distributed.fsdp: there is one process, nothing to shard over; use --nproc or set it to false"
        )
    per_update = config.sampling.micro_batches / config.trainer.updates
    if per_update % num_processes:
        raise ValueError(
            f"distributed.fsdp: {config.sampling.micro_batches} micro-batches in "
            f"{config.trainer.updates} updates cannot be shared out evenly to {num_processes} "
            "processes; change sampling.batch_size or sampling.prompts_per_iteration"
        )


def open_session(
    config: Config,
    accelerator: Accelerator,
    run: Run,
    progress: Progress,
    watchdog: Watchdog,
    stop: Stop,
    start: int = 0,
) -> Session:
    """Load prompts, rewards and the pipeline, and make its parameters trainable."""
    prompts = prompt_files.load(config.prompts.train, config.prompts.column)
    if isinstance(config.trainer, OfflineDPO):
        preferences.check_set(config.prompts.train, prompts)  # raises, before the model is loaded
    eval_prompts = []
    if config.prompts.eval:
        eval_prompts = prompt_files.load(config.prompts.eval, config.prompts.column)[: config.evaluation.num_prompts]
        eval_prompts = [row for row in eval_prompts for _ in range(config.evaluation.group_size)]
    scorers = open_scorers(config, str(accelerator.device), stopped=lambda: stop.requested)
    if isinstance(config.trainer, AdvGRPO):  # raise, before the model is loaded
        adv_grpo.trainable_of(scorers)
        adv_grpo.references_of(config.trainer, prompts, config.prompts.train).check(row.text for row in prompts)
    if isinstance(config.trainer, Draft | DiffInstruct):
        direct.check_gradients(config, scorers)
    for label, scorer in scorers.rewards.items():
        if not isinstance(config.trainer, AdvGRPO) and rewards.is_trainable(scorer):
            raise ValueError(f"reward {label!r} is trained beside the model, which only algorithm adv_grpo does")
        for rows in (prompts, eval_prompts):
            if rows:
                common = set.intersection(*(set(row.columns) for row in rows))
                rewards.check_columns(scorer, sorted(common), name=label)

    for rows, source in ((prompts, config.prompts.train), (eval_prompts, config.prompts.eval)):
        check_inputs(config.sampling.inputs, rows, str(source))

    progress.phase("loading")
    pipe = load_pipeline(config.model)
    check_call_arguments(pipe, call_arguments(config.sampling) | config.sampling.inputs)
    check_call_arguments(pipe, evaluation_arguments(config.evaluation), "evaluation")
    policy = Policy(
        pipe.to(accelerator.device),
        autocast=getattr(torch, config.model.autocast) if config.model.autocast else None,
        reduction=config.trainer.log_prob_reduction if isinstance(config.trainer, FlowGRPO) else "mean",
        offload_text_encoders=config.model.offload_text_encoders,
    )
    spare_vae(pipe, offload=config.model.offload_vae, sliced=config.model.slice_vae)
    said = use_kernels(policy, config.kernels)
    if said:
        progress.say(said)
    if config.model.lora is not None:
        check_lora_loader(policy)
    weights = Weights(policy.denoisers, config.model.lora, seed=config.seed, sharded=config.distributed.fsdp)
    if config.model.gradient_checkpointing:
        for denoiser in policy.denoisers.values():
            denoiser.enable_gradient_checkpointing()
    if not weights.is_lora and config.uses_reference:
        weights.snapshot("reference")
    if config.ema is not None:
        weights.snapshot(AVERAGE)
    return Session(
        config=config,
        accelerator=accelerator,
        policy=policy,
        weights=weights,
        optimizer=adamw(weights.parameters, config.optimizer),
        prompts=prompts,
        eval_prompts=eval_prompts,
        scorers=scorers,
        run=run,
        log=logger_of(run, config, accelerator, start),
        progress=progress,
        watchdog=watchdog,
        stop=stop,
    )


def use_kernels(policy: Policy, kernels: Kernels) -> str:
    """Set the fused kernels and attention back-ends that a configuration asks for; returns what runs, in a line, empty
    where it asks for none.

    Raises ValueError where the model does not fit, or what is named cannot run on its device in its precision.
    """
    if not (kernels.fused or kernels.attention or kernels.evaluation_attention):
        return ""
    like = torch.empty(0, dtype=policy.autocast or next(policy.denoiser.parameters()).dtype, device=policy.device)
    running = [f"{name} by {choose(FUSED[name], like, kernels.backend)}" for name in kernels.fused]
    for key, name in (("attention", kernels.attention), ("evaluation_attention", kernels.evaluation_attention)):
        problem = None if name is None else attention_problem(name, like.device, like.dtype, masked=False)
        if problem is not None:
            raise ValueError(f"kernels.{key}: {name}: {problem}; that can run here: {', '.join(usable(like))}")
        running += [] if name is None else [f"{key} {name}"]
    switches = policy.switches
    switches.qk_norm_rope, switches.adaln = "qk_norm_rope" in kernels.fused, "adaln" in kernels.fused
    switches.backend, switches.attention = kernels.backend, kernels.attention
    if kernels.attention is None and kernels.evaluation_attention is not None:
        switches.attention = "auto"  # diffusers' processors cannot be told to use another one
    if "step" in kernels.fused:
        policy.fused_step = kernels.backend
    return f"kernels: {', '.join(running)}; {install(policy.denoisers.values(), switches)}"


def finish(session: Session) -> None:
    """The end of a run, complete or not: last checkpoint, LoRA, before/after picture, report, and where they are."""
    session.save()
    if not session.is_main:
        return
    run, config, say = session.run, session.config, session.progress.say
    rows = [row for row in run_folder.read_metrics(run.metrics) if row.get("eval/total_mean") is not None]
    complete, best = session.is_complete, ended_at(session)
    if best is not None and config.evaluation.monitor.action == "roll_back":  # the weights are those of then
        rows = [row for row in rows if row["step"] <= best]
    if session.weights.is_lora and complete:
        with session.averaged():
            save_lora(session.policy, run.lora, session.probe)
        write_card(run.lora, config, rows, list(dict.fromkeys(prompt.text for prompt in session.eval_prompts))[:5])
    if len(rows) > 1:
        before, after = rows[0]["eval/total_mean"], rows[-1]["eval/total_mean"]
        say(f"held-out reward: {before:.3f} before, {after:.3f} after {rows[-1]['step']} iterations")
    picture = before_after(run.samples)
    if picture is not None:
        say(f"before and after: {save_png(picture, run.samples / 'before_after.png')}")
    say(f"curves and pictures: {write_report(run.folder)}")
    if session.weights.is_lora and complete:
        say(f"LoRA, for pipe.load_lora_weights: {run.lora}")
    elif not complete:
        say(f"stopped after {session.iteration} of {config.iterations} iterations; go on: genrl resume {run.folder}")
    else:
        say(f"to write the pipeline: genrl export {run.folder} --out FOLDER")

"""Flow-GRPO with a reward that is trained beside the model (Adv-GRPO, arXiv 2511.20256)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from genrl.config.errors import Finding
from genrl.config.method import MetricDoc
from genrl.config.run_config import FileFinding
from genrl.config.section import Count, Positive, Section, Text, Whole
from genrl.data.preferences import read_references
from genrl.data.prompts import PromptError, is_data_set
from genrl.diffusion.config.schema import Calls, Guided, Refusable
from genrl.diffusion.steps.settings import Windowed

if TYPE_CHECKING:
    from genrl.data.prompts import Prompt, PromptRows
    from genrl.diffusion.config.schema import Config
    from genrl.diffusion.rollout.scoring import Scorers

METRICS = {
    "adversary/loss": MetricDoc(
        "mean loss of the trainable reward on samples and references of this iteration, before its update",
        "Hinge: 1.3 is a reward that says nothing (patches of weight 0.3), 0 one that is never wrong. Preference: "
        "log 2 and 0. Near 0 from the beginning: it tells them by what the model cannot change (a decoder's traces).",
    ),
    "adversary/accuracy": MetricDoc(
        "mean of the shares of references above 0 and of samples below (preference: pairs whose reference is above)",
        "0.5 is chance, or samples that cannot be told from references.",
        "share 0..1",
    ),
    "adversary/reference_mean": MetricDoc(
        "mean score of the references, as the samples are scored", "Beside `reward/<name>_mean`.", "the reward's own"
    ),
    "adversary/margin": MetricDoc(
        "mean score of the references - mean score of the samples",
        "What the model has still to gain. The trainable reward moves: its own curve cannot be compared over time, "
        "a frozen reward of weight 0 can. Below 0: the schedule `lag` trains the reward.",
        "the reward's own",
    ),
    "adversary/updates": MetricDoc("optimiser steps of the reward in this iteration", "As scheduled.", "steps"),
    "adversary/grad_norm": MetricDoc(
        "L2 norm of the gradient of the reward's loss, before clipping; only where the reward is trained",
        "As `grad_norm`.",
    ),
}


class Adversary(Section):
    """How the trainable reward of an Adv-GRPO run is trained."""

    references: Text
    """Pictures that samples are to be like, for every prompt: a folder (each picture beside a .txt with its prompt), a
    .jsonl file or a data set id:split with the columns prompt and image."""
    schedule: Literal["alternate", "lag", "together"] = "alternate"
    """Which iterations train it, and which the model: in turns (see every); it, while it scores samples above
    references, else the model (the paper's for PickScore); or both on the same samples."""
    every: Count = 10
    """For alternate: one in so many iterations trains the model, all others the reward (Adv-GRPO: 10); 1: the reward is
    trained in the warm-up alone and frozen from there on, a baseline."""
    warmup: Whole = 0
    """First iterations that train the reward alone; with together at least 1."""
    steps: Count = 1
    """Optimiser steps of the reward in an iteration that trains it, each on all its samples (Adv-GRPO: 1)."""
    lr: Positive = 1e-4
    """Learning rate of its Adam, constant (Adv-GRPO: 1e-4 for DINO heads, 5e-6 for PickScore's last layer); betas are
    theirs, 0.5 and 0.999."""


class AdvGRPO(Windowed):
    """Flow-GRPO with a reward that is trained beside the model (arXiv 2511.20256)."""

    refuses: ClassVar[Mapping[Refusable, str]] = {
        "distributed.context": "trains a judge beside the model, which each process computes whole",
        "sampling.buckets": "judges the samples beside references of one size",
    }
    title: ClassVar[str] = "Adv-GRPO"
    metrics: ClassVar[Mapping[str, MetricDoc]] = METRICS
    rewards_are = "trained"

    algorithm: Literal["adv_grpo"] = "adv_grpo"
    """Which trainer."""
    adversary: Adversary
    """How the one trainable reward among `rewards` is trained."""

    def trains_model(self, iteration: int) -> bool:
        """Whether this iteration (0-based) trains the model; with the schedule lag, whether it may."""
        adversary = self.adversary
        if iteration < adversary.warmup:
            return False
        return adversary.schedule != "alternate" or (iteration + 1) % adversary.every == 0

    def optimizer_steps(self, iterations: int) -> int:
        return super().optimizer_steps(sum(map(self.trains_model, range(iterations))))

    def calls(self, config: Config, guided: Guided) -> Calls:
        """As Flow-GRPO, in the iterations that train the model."""
        calls = super().calls(config, guided)
        share = sum(map(self.trains_model, range(config.iterations))) / config.iterations
        return calls._replace(train=calls.train * share, backward=calls.backward * share)

    def problems(self, config: Config) -> Iterator[Finding]:
        yield from super().problems(config)
        adversary = self.adversary
        if adversary.schedule != "alternate" and adversary.every != type(adversary).model_fields["every"].default:
            text = f"is of schedule: alternate, and {adversary.schedule} needs none; remove it, or change the schedule"
            yield ("trainer.adversary.every", "trainer.adversary.schedule"), text
        if adversary.schedule == "alternate" and adversary.every == 1 and adversary.warmup == 0:
            text = "the reward would never be trained; use a warm-up, or train the model in every 2nd iteration or less"
            yield ("trainer.adversary.every", "trainer.adversary.warmup"), text
        if config.optimizer_steps == 0:
            keys = ("trainer.adversary.every", "trainer.adversary.warmup", "iterations")
            text = f"none of {config.iterations} iterations trains the model"
            if adversary.warmup >= config.iterations:
                yield keys[1:], f"{text}; use a warm-up of {config.iterations - 1} or less"
            else:
                yield keys, f"{text}: the first would be the {adversary.every}th; use more, or a smaller every"
        if config.sampling.num_frames is not None and config.sampling.num_frames > 1:
            text = "references are pictures, and these are videos; use 1, or another algorithm"
            yield ("sampling.num_frames", "trainer.algorithm"), text

    def check_data(self, config: Config, scorers: Scorers, prompts: list[Prompt]) -> None:
        from genrl.diffusion.methods.adv_grpo.train import check

        check(config, scorers, prompts)

    def file_problems(self, config: Config, train: PromptRows | None, notes: list[str]) -> Iterator[FileFinding]:
        """A reference picture for every prompt."""
        source = self.adversary.references
        if is_data_set(source):
            notes.append(f"trainer.adversary.references: {source} is a data set; it is read when training starts")
            return
        try:
            read_references(source).require(train.rows if train else (), config.prompts.train)
        except PromptError as error:
            yield ("trainer", "adversary", "references"), str(error)

"""Noise of the policy gradient per model call, of chains and of trees by the step at which they split.

    python -m benchmarks.gradient_noise train runs/gradient_noise   # what is not done yet
    python -m benchmarks.gradient_noise report runs/gradient_noise  # gradient_noise.json, the tables, the figure

The weights are those before training and stay as they are. All structures draw 8 pictures of a prompt by the same
policy (8 steps of Flow-SDE, every step but the last noisy) and estimate the same gradient, that of the expected reward:
an edge e with m_e of the G leaves below it weighs `m_e / G (mean reward below e - baseline)`, the baseline being the
mean of leaves that are not below it, of the whole group or of its nearest relatives (those below the closest node above
that has others). So both are unbiased at and after the first split, and structures can be compared there by noise
alone; edges that all leaves share have no such leaves, and weigh 0.

With gradients g_n of N prompts: signal S = (|sum g|^2 - sum |g|^2) / (N (N - 1)), noise = mean |g|^2 - S. S is common
to all structures and is taken of their mean weighted by inverse noise; calls until noise equals signal: noise / S times
the calls of one gradient, in forward-equivalents (a training call counts as three). Of a single step the noise is that
of its part of the gradient, at the cost of training this step alone. Intervals are of 95 %, by resampling prompts.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import genrl_rewards
from benchmarks.claims.figures import panels
from benchmarks.claims.stored import TRAINING_CALL
from benchmarks.common import parser, save
from genrl.config import load
from genrl.data import prompts as prompt_files
from genrl.data.prompts import Prompt
from genrl.diffusion.config.schema import Config
from genrl.diffusion.methods.dynamic_tree_rpo.settings import DynamicTreeRPO
from genrl.diffusion.policy.loading import load_pipeline
from genrl.diffusion.policy.policy import Policy
from genrl.diffusion.policy.trajectory import Batch, Kernel
from genrl.diffusion.rollout.forest import Samples, roll_out
from genrl.diffusion.rollout.rollout import call_arguments
from genrl.diffusion.steps.plans import to_table
from genrl.diffusion.train import trainable_weights
from genrl.mdp.plan import SamplingPlan, make_plan
from genrl.mdp.tree import Tree, grow
from genrl.objectives.credit import leaves_below
from genrl.runtime.folder.run import write_atomic

BASE = "configs/flow_grpo.yaml"
STEPS, LEAVES, NOISE = 8, 8, 0.7
NOISY = range(STEPS - 1)
REWARDS = ("shapes", "jpeg")
BASELINES = ("group", "relatives")
SPLITS: dict[str, dict[int, int]] = {
    "chains": {},
    **{f"split at {step}": {step: LEAVES} for step in NOISY},
    "in two at 0, 1, 2": dict.fromkeys((0, 1, 2), 2),
    "in two at 0, 2, 4": dict.fromkeys((0, 2, 4), 2),
}
"""Name -> step -> ways."""
SCORES_ONLY = ("split at 1", "split at 3", "split at 5")
FIGURE = Path("docs/img/gradient_noise.svg")
RESAMPLED = 1000
TOGETHER = 4
"""Prompts that are measured, by all structures, before the next ones."""


def plan_of(name: str) -> SamplingPlan:
    """How the pictures of a prompt are drawn."""
    splits = SPLITS[name]
    roots = LEAVES // int(np.prod(list(splits.values()), initial=1))
    return make_plan(STEPS, noise=dict.fromkeys(NOISY, NOISE), splits=splits, roots=roots)


def credit(tree: Tree, leaf_rewards: Tensor, baseline: str) -> Tensor:
    """`m_e / G (mean reward below e - mean of others)` of every edge, by step and slot, float64 [T, G]; 0 where there
    are no others. leaf_rewards: [G]."""
    below = leaves_below(tree.parent)
    total, count = below.double() @ leaf_rewards, below.sum(1).double()
    above_total, above_count = torch.full_like(total, float(leaf_rewards.sum())), torch.full_like(total, LEAVES)
    if baseline == "relatives":
        for node, parent in enumerate(tree.parent.tolist()):  # parents come before their children
            if parent >= 0 and count[parent] > count[node]:
                above_total[node], above_count[node] = total[parent], count[parent]
            elif parent >= 0:
                above_total[node], above_count[node] = above_total[parent], above_count[parent]
    others = above_count - count
    value = count / LEAVES * (total / count - (above_total - total) / others.clamp(min=1))
    return to_table((value * (others > 0))[None], tree)


class Measured(NamedTuple):
    """Of one prompt: scores of its leaves by reward, [G]; by (reward, baseline) the gradient of every step, [T, D]."""

    scores: dict[str, Tensor]
    gradients: dict[tuple[str, str], Tensor]


class World:
    """The model before training, its prompts, and the rewards."""

    def __init__(self) -> None:
        config = load(BASE, [f"sampling.num_inference_steps={STEPS}"])
        assert isinstance(config, Config)
        self.policy = Policy(load_pipeline(config.model))
        trainable_weights(config, self.policy)
        named = self.policy.denoiser.named_parameters()
        # The other factors of LoRA have no gradient while these are 0.
        self.parameters = [p for name, p in named if p.requires_grad and "lora_B" in name]
        self.prompts = prompt_files.load(str(config.prompts.train))
        self.arguments = call_arguments(config.sampling)
        self.scorers = {name: genrl_rewards.load(name, {}) for name in REWARDS}

    def draw(self, name: str, plan: SamplingPlan, prompt: Prompt, keep: Collection[int]) -> Samples:
        """The pictures of a prompt, by Flow-SDE with the levels of the plan. keep: steps whose graphs are kept."""
        tree = grow(plan)
        slots = [int(tree.first_leaf[node]) for node in tree.level(0)]
        keys = [(name, prompt.text, slot) for slot in slots]
        batch = Batch([prompt.text] * len(slots), keys, self.arguments | {"num_inference_steps": plan.steps})
        levels = {step: level for step, level in enumerate(plan.noise_levels) if level is not None}
        return roll_out(self.policy, batch, slots, plan, Kernel("flow_sde", NOISE, levels), plan.leaves, keep=keep)

    def measure(self, name: str, number: int) -> Measured:
        """One gradient, from the prompt of this number."""
        plan, prompt = plan_of(name), self.prompts[number]
        keep = () if name in SCORES_ONLY else NOISY
        samples, tree = self.draw(name, plan, prompt, keep), grow(plan)
        scores = self.score(samples, prompt)
        baselines = BASELINES if len(plan.splits) > 1 else BASELINES[:1]
        tables = {(r, b): credit(tree, s, b) for r, s in scores.items() for b in baselines}
        return Measured(scores, self.gradients(samples, tables) if keep else {})

    @torch.no_grad()
    def score(self, samples: Samples, prompt: Prompt) -> dict[str, Tensor]:
        images = self.policy.decode(samples.batch, samples.final)
        scores = {}
        for name, scorer in self.scorers.items():
            columns = {column: [prompt.columns[column]] * len(images) for column in genrl_rewards.needs(scorer).columns}
            group = [0] * len(images)
            scored = genrl_rewards.score(
                scorer, images=images, prompts=samples.batch.prompts, columns=columns, group=group
            )
            scores[name] = torch.tensor(scored.values, dtype=torch.float64)
        return scores

    def gradients(self, samples: Samples, tables: dict[tuple[str, str], Tensor]) -> dict[tuple[str, str], Tensor]:
        size = sum(p.numel() for p in self.parameters)
        gradients = {key: torch.zeros(STEPS, size) for key in tables}
        for piece in samples.pieces:
            for step, slots in piece.slots.items():
                used = {key: table[step, slots].float() for key, table in tables.items()}
                used = {key: credits for key, credits in used.items() if bool((credits != 0).any())}
                if not used:
                    continue
                log_prob = piece.trajectory.graphs[step].log_prob
                for key, credits in used.items():
                    parts = torch.autograd.grad(log_prob, self.parameters, credits, retain_graph=True)
                    gradients[key][step] += torch.cat([part.flatten() for part in parts])
        return gradients


def train(folder: Path, prompts: int) -> None:
    """Measure all structures on so many prompts, some at a time; what is there already is kept."""
    world = World()
    folder.mkdir(parents=True, exist_ok=True)
    for first in range(0, prompts, TOGETHER):
        for name in SPLITS:
            if (path := folder / f"{name}-{first}.pt").exists():
                continue
            started = time.process_time()
            measured = [world.measure(name, number) for number in range(first, first + TOGETHER)]
            scores = {reward: torch.stack([one.scores[reward] for one in measured]) for reward in REWARDS}
            gradients = {key: torch.stack([one.gradients[key] for one in measured]) for key in measured[0].gradients}
            torch.save({"scores": scores, "gradients": gradients}, path)
            print(f"{path.stem}: {time.process_time() - started:.0f} s of the processor", flush=True)


def windows(folder: Path, prompts: int) -> None:
    """Scores of the trees of configs/diffusion/tree_rpo.yaml, with its window at each of its places, once."""
    if (folder / "windows.pt").exists():
        return
    world, config = World(), load("configs/diffusion/tree_rpo.yaml")
    assert isinstance(config, Config) and isinstance(config.trainer, DynamicTreeRPO)
    by_window = {}
    for one in config.trainer.rounds(config):
        name = f"window at {one.trained[0]}"
        each = [world.score(world.draw(name, one.plan, prompt, ()), prompt) for prompt in world.prompts[:prompts]]
        by_window[name] = {reward: torch.stack([scores[reward] for scores in each]) for reward in REWARDS}
        print(name, {reward: float(scores.var(1).mean()) for reward, scores in by_window[name].items()}, flush=True)
    torch.save(by_window, folder / "windows.pt")


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What was measured of a structure on all prompts."""
    return {kind: {key: torch.cat([part[kind][key] for part in parts]) for key in parts[0][kind]} for kind in parts[0]}


# -- what is said of it ----------------------------------------------------------------------------------------------


def cost(name: str, steps: list[int]) -> float:
    """Forward-equivalents of one gradient of these steps; shared ones without credit are not trained."""
    plan = plan_of(name.removesuffix(", relatives"))
    trained = [step for step in steps if not plan.splits or plan.nodes[step + 1] > 1]
    return plan.calls + TRAINING_CALL * plan.training_calls(trained)


def statistics(grams: np.ndarray, rows: np.ndarray) -> tuple[float, float]:
    """(S, noise) of the gradients of these prompts [N], of which some may be drawn twice; grams: [N, N]. Pairs of a
    prompt with itself say nothing of S."""
    gram = grams[np.ix_(rows, rows)]
    other = rows[:, None] != rows
    signal = float(gram[other].mean())
    return signal, float(np.diag(gram).mean()) - signal


def interval(values: list[float]) -> list[float]:
    """Of 95 %."""
    return [float(value) for value in np.percentile(values, [2.5, 97.5])]


def compared(gradients: dict[str, Tensor], steps: list[int], against: str) -> dict[str, Any]:
    """Of every structure the noise of these steps' gradient, that times its calls against the same of `against`, with
    its interval (below 1: better), and calls until noise equals signal.

    gradients: name -> [N, T, D], chains among them.
    """
    chosen = {name: gradient[:, steps].flatten(1).double() for name, gradient in gradients.items()}
    grams = {name: (gradient @ gradient.T).numpy() for name, gradient in chosen.items()}
    count = len(grams[against])
    every = np.arange(count)
    weights = {name: 1 / np.diag(gram).mean() for name, gram in grams.items()}
    pooled = sum(weights[name] * gradient for name, gradient in chosen.items()) / sum(weights.values())
    pooled = (pooled @ pooled.T).numpy()
    random = np.random.default_rng(0)
    resamples = [random.integers(count, size=count) for _ in range(RESAMPLED)]

    def of(rows: np.ndarray) -> tuple[float, dict[str, float]]:
        return statistics(pooled, rows)[0], {name: statistics(gram, rows)[1] for name, gram in grams.items()}

    signal, noise = of(every)
    resampled = [of(rows) for rows in resamples]
    calls = {name: cost(name, steps) for name in grams}
    structures = {}
    for name in grams:
        ratio = calls[name] / calls[against]
        structures[name] = {
            "calls": calls[name],
            "noise": noise[name],
            "relative": ratio * noise[name] / noise[against],
            "relative_95": interval([ratio * one[name] / one[against] for _, one in resampled]),
            "calls_until_noise_is_signal": noise[name] / signal * calls[name],
        }
    return {"signal": signal, "signal_95": interval([one for one, _ in resampled]), "structures": structures}


def mean_variance(scores: Tensor) -> dict[str, Any]:
    """Variance of the scores of leaves, mean over prompts, with its interval. scores: [N, G]."""
    random, each = np.random.default_rng(0), scores.var(1).numpy()
    means = [float(each[random.integers(len(each), size=len(each))].mean()) for _ in range(RESAMPLED)]
    return {"variance": float(each.mean()), "variance_95": interval(means)}


def variances(scores: dict[str, Tensor]) -> dict[str, Any]:
    """Variance of the reward below a node, by the step at which all leaves split (chains: of a prompt). scores: name ->
    [N, G]."""
    return {name: mean_variance(scores[name]) for name in ("chains", *(f"split at {step}" for step in NOISY))}


def advantage_noise(within: dict[str, Any]) -> list[dict[str, float]]:
    """By step k: what the advantage of its transition varies by (W_k - W_{k+1}, W the variance below a node), the
    variance of one sample's estimate of it about that (chains: what the other steps make vary; a tree that splits at k:
    what comes after), and that variance times the calls of a sample."""
    W = [within[f"split at {step}"]["variance"] for step in NOISY] + [0.0]
    whole = within["chains"]["variance"]
    rows = []
    for k in NOISY:
        signal = W[k] - W[k + 1]
        calls = {"chains_calls": float(STEPS), "tree_calls": plan_of(f"split at {k}").calls / LEAVES}
        rows.append({"step": k, "signal": signal, "chains": whole - signal, "tree": W[k + 1], **calls})
    return rows


def report(folder: Path) -> dict[str, Any]:
    """Every figure of the page."""
    done = [k for k in range(0, 1000, TOGETHER) if all((folder / f"{name}-{k}.pt").exists() for name in SPLITS)]
    stored = {name: joined([torch.load(folder / f"{name}-{k}.pt", weights_only=True) for k in done]) for name in SPLITS}
    result: dict[str, Any] = {"prompts": len(stored["chains"]["scores"]["jpeg"])}
    placed = torch.load(folder / "windows.pt", weights_only=True)
    result["windows"] = {
        reward: {name: mean_variance(scores[reward]) for name, scores in placed.items()} for reward in REWARDS
    }
    for reward in REWARDS:
        within = variances({name: one["scores"][reward] for name, one in stored.items()})
        gradients = {
            name if baseline == "group" else f"{name}, {baseline}": one["gradients"][reward, baseline]
            for name, one in stored.items()
            for baseline in BASELINES
            if (reward, baseline) in one["gradients"]
        }
        result[reward] = {"within": within, "advantage": advantage_noise(within), "steps": {}, "suffixes": {}}
        for step in (0, 2, 4, 6):
            both = {name: gradients[name] for name in ("chains", f"split at {step}")}
            several = {name: g for name, g in gradients.items() if name.startswith("in two") and step < 4}
            result[reward]["steps"][step] = compared(both | several, [step], "chains")
            result[reward]["suffixes"][step] = compared(both, [*range(step, STEPS - 1)], "chains")
        whole = {name: g for name, g in gradients.items() if not name.startswith("split at") or name[-1] == "0"}
        result[reward]["whole"] = compared(whole, [*NOISY], "chains")
    return result


def _ratio(row: dict[str, Any]) -> str:
    low, high = row["relative_95"]
    return f"{row['relative']:.2f} ({low:.2f} to {high:.2f})"


def tables(results: dict[str, Any]) -> str:
    """Markdown: variance of the reward and of advantage estimates by step, then noise of gradients per call."""
    lines = [
        "| reward | split at step | variance of the reward below the node | of it made by this step's noise "
        "| variance of one advantage estimate: chains, tree | times its calls: chains, tree |",
        "| --- " * 6 + "|",
    ]
    for reward in REWARDS:
        within = results[reward]["within"]
        for row in results[reward]["advantage"]:
            one = within[f"split at {row['step']}"]
            low, high = one["variance_95"]
            chains, tree = row["chains"] * row["chains_calls"], row["tree"] * row["tree_calls"]
            lines.append(
                f"| {reward} | {row['step']} | {one['variance']:.4f} ({low:.4f} to {high:.4f}) | {row['signal']:.4f} "
                f"| {row['chains']:.4f}, {row['tree']:.4f} | {chains:.3f}, {tree:.3f} |"
            )
    lines += [
        "",
        "| reward | gradient of | structure | forward-equivalents of one gradient | noise x calls, chains = 1 (95 %) "
        "| thousand forward-equivalents until noise = signal |",
        "| --- " * 6 + "|",
    ]
    for reward in REWARDS:
        parts = [(f"step {step}", one) for step, one in results[reward]["steps"].items()]
        parts += [(f"steps {step} to {STEPS - 2}", one) for step, one in results[reward]["suffixes"].items() if step]
        parts += [("all steps", results[reward]["whole"])]
        for part, one in parts:
            known = one["signal_95"][0] > 0
            for name, row in one["structures"].items():
                until = f"{row['calls_until_noise_is_signal'] / 1000:.0f}" if known else "signal not above 0"
                lines.append(f"| {reward} | {part} | {name} | {row['calls']:.0f} | {_ratio(row)} | {until} |")
    return "\n".join(lines)


def figure(results: dict[str, Any]) -> str:
    """Noise x calls of a tree over that of chains by the step of its split, with the limits of its interval."""
    shown = []
    for kind, title in (("steps", "this step's gradient"), ("suffixes", "gradient of it and later steps")):
        for reward in REWARDS:
            rows = {int(step): one["structures"][f"split at {step}"] for step, one in results[reward][kind].items()}
            lines = [[(step, row["relative"]) for step, row in rows.items()]]
            lines += [[(step, row["relative_95"][end]) for step, row in rows.items()] for end in (0, 1)]
            shown.append((f"{reward}: {title}", lines))
    label = "noise x calls of a tree over that of chains, by the step of its split"
    return panels(shown, 330, 190, 2, label, ("noise x calls", "lower limit", "upper limit"))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("command", choices=("train", "report"))
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--prompts", type=int, default=24, help="gradients of each structure (train)")
    given = arguments.parse_args()
    if given.command == "train":
        train(given.folder, given.prompts)
        windows(given.folder, given.prompts)
        return
    results = report(given.folder)
    save(given.out, "gradient_noise", results)
    print(tables(results))
    write_atomic(FIGURE, figure(results))


if __name__ == "__main__":
    main()

"""Model calls per picture: what the policy's counter says, beside the closed form, for every way to roll out and train.

    python -m benchmarks.model_calls [--only mix_grpo spo]

A call is one evaluation of one sample by the denoiser (guidance by two predictions is two), counted by a hook on the
network itself. Every row is a configuration of this repository with few prompts, run for two iterations; the formula
is `genrl.diffusion.config.estimate.plan`, which `genrl check` and `genrl plan` print without running anything: of a
window that is drawn at random, at the places where it was drawn. `at most` marks methods that leave out what the scores
do not decide (pairs of equal reward, pruned leaves). Ends with an error where a count is not its formula. Writes
model_calls.json.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.common import parser, save
from genrl.config import load
from genrl.diffusion import train as trainer
from genrl.diffusion.config.estimate import Plan, plan, read_components
from genrl.diffusion.config.files import model_folder
from genrl.diffusion.config.schema import Config
from genrl.diffusion.steps.layout import RANDOM
from genrl.diffusion.steps.plans import Steps
from genrl.diffusion.steps.settings import Windowed
from genrl.runtime.folder.run import Run, read_metrics

ITERATIONS = 2
COMMON = (
    f"iterations={ITERATIONS}",
    *("evaluation.every=0", "checkpoint.every=1000000", "trackers=[]", "sampling.prompts_per_iteration=2"),
)
FLOW, GUIDED = "configs/flow_grpo.yaml", "sampling.guidance_scale=4.5"
ROWS: dict[str, tuple[str, ...]] = {
    "chain, all steps": (FLOW, "trainer.window=null"),
    "chain, guidance, KL": (FLOW, "trainer.window=null", GUIDED, "trainer.kl_weight=0.01"),
    "window of 3": (FLOW,),
    "window, guidance": (FLOW, GUIDED),
    "window, guidance, none in training": (FLOW, GUIDED, "trainer.guidance_in_training=false"),
    "window, graphs kept": (FLOW, "trainer.keep_graph=true"),
    "window, two epochs": (FLOW, "trainer.inner_epochs=2"),
}
"""Name -> file and changes; the files of `NAMES` come after them."""
NAMES = (
    *("flow_grpo_fast", "mix_grpo", "mix_grpo_flash", "tree_grpo", "tree_rpo", "branch_grpo", "b2_diffurl"),
    *("dance_grpo", "grpo_guard", "ddpo", "prdp", "spo", "d3po", "dpo", "dpo_offline", "diffusion_nft", "awm"),
    *("dgpo", "crd", "draft", "diff_instruct", "adv_grpo", "paco_grpo", "prompt_rl", "talk2move"),
)
ROWS |= {name: (f"configs/diffusion/{name}.yaml",) for name in NAMES}
ROWS["adv_grpo"] += ("evaluation.monitor=null",)
AT_MOST = {"branch_grpo", "b2_diffurl", "spo", "d3po", "dpo", "dpo_offline"}


def expected(config: Config) -> tuple[float, float]:
    """Sampling and training calls of an iteration, the mean over the run, by closed form."""
    folder = model_folder(config)
    components = read_components(folder, config.model.variant) if folder else ()
    plans: list[Plan] = [plan(config, components)]
    settings = config.trainer
    if isinstance(settings, Windowed) and settings.window is not None and settings.window.schedule in RANDOM:
        plans = []
        for iteration in range(config.iterations):
            place = Steps.of(config, settings, iteration).window
            assert place is not None
            window = settings.window.model_copy(update={"low": place.start, "high": place.stop})
            there = config.model_copy(update={"trainer": settings.model_copy(update={"window": window})})
            plans.append(plan(there, components))
    return mean(one.sample_calls for one in plans), mean(one.train_calls for one in plans)


def small(name: str, *changes: str) -> Config:
    """The configuration of a row for two prompts, each group in a micro-batch of its own."""
    path, *own = ROWS[name]
    published = load(path)
    assert isinstance(published, Config)
    config = load(path, [*COMMON, f"sampling.batch_size={published.sampling.group_size}", *own, *changes])
    assert isinstance(config, Config)
    return config


def measure(name: str) -> dict[str, Any]:
    """Calls per picture of one row, counted and by formula. Raises AssertionError where they differ."""
    with tempfile.TemporaryDirectory() as folder:
        config = small(name, f"output={folder}/run")
        trainer.train(config)
        rows = [row for row in read_metrics(Run(Path(config.output)).metrics) if "model_calls/sample" in row]
    counted = [mean(row[f"model_calls/{phase}"] for row in rows) for phase in ("sample", "train")]
    formula, pictures = expected(config), config.sampling.images_per_iteration
    for phase, count, most in zip(("sampling", "training"), counted, formula, strict=True):
        right = count <= most if name in AT_MOST and phase == "training" else abs(count - most) < 1e-6 * max(most, 1)
        assert right, f"{name}: {count} model calls in {phase}, {most} by the formula"
    return {
        "pictures": pictures,
        "at_most": name in AT_MOST,
        "sampling": {"counted": counted[0] / pictures, "formula": formula[0] / pictures},
        "training": {"counted": counted[1] / pictures, "formula": formula[1] / pictures},
    }


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW")
    given = arguments.parse_args()
    results, lines = {}, []
    for name in given.only:
        row = results[name] = measure(name)
        word = "at most " if row["at_most"] else ""
        sampling, training = row["sampling"], row["training"]
        lines.append(
            f"| {name} | {sampling['counted']:.2f} | {sampling['formula']:.2f} | {training['counted']:.2f} "
            f"| {word}{training['formula']:.2f} |"
        )
    print("| | sampling, counted | by formula | training, counted | by formula |\n| --- | --- | --- | --- | --- |")
    print("\n".join(lines))
    save(given.out, "model_calls", results)


if __name__ == "__main__":
    main()

"""docs/methods.md: all measured methods at equal cost, read from the runs that other benchmarks have made.

    python -m benchmarks.equal_cost > docs/methods.md

It trains nothing. The curves are those of benchmarks/methods.json, vla_methods.json and vlm_methods.json; where a curve
has no evaluation at the cost in question, the value is linear between its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import mean, stdev

from benchmarks import methods, vla_methods, vlm_methods
from benchmarks.vlm_runs import stored

Curve = Sequence[tuple[float, float]]

SHAPES = {
    "dance_grpo": "As Flow-GRPO, with DanceGRPO's kernel and one initial noise for a group.",
    "flow_grpo": "You want a policy gradient on the steps of the sampler, or [trees](trees.md) and windows.",
    "grpo_guard": "As Flow-GRPO, where clipping hardly ever acts or steps of little noise dominate.",
    "diffusion_nft": "Start here. Any solver may sample, and log-probabilities of steps are not needed.",
    "awm": "As DiffusionNFT, with a clipped policy gradient.",
    "dgpo": "As DiffusionNFT, with the preference of a whole group.",
    "crd": "As DiffusionNFT, with a squared error instead of clipping.",
    "dpo": "Scores are only good for an order: best and worst sample of a group.",
    "dpo_offline": "You have pairs of pictures with a winner, and no reward. Making the pairs is not counted.",
}
JPEG = {
    "ddpo": "The model predicts noise (SD 1.5, SDXL).",
    "prdp": "As DDPO, by regression on differences of rewards.",
    "d3po": "As DDPO, with pairs instead of scores.",
    "b2_diffurl": "As DDPO, from pairs of leaves of one chain, first on its last steps.",
    "spo": "The reward can judge predicted clean samples, so that every step gets its own pairs.",
}
APART = {
    "draft": "The reward can be differentiated, and its gradient is to be followed directly.",
    "diff_instruct": "The result is to sample in one step; the reward can be differentiated.",
    "adv_grpo": "You have reference pictures, and the scorer is to be trained too.",
    "paco_grpo": "Pictures of a set are to be consistent with each other.",
    "prompt_rl": "A language model rewrites the prompts and is trained as well.",
    "talk2move": "Editing: objects are moved, scaled or turned by instruction.",
}
POLICIES = {
    "flow_noise": "A flow policy; a head of the policy learns the noise.",
    "flow_sde": "A flow policy; the noise is fixed and one step of a chunk is sampled.",
    "grpo": "As Flow-SDE, without a critic: groups of episodes begin alike.",
    "reinflow": "A flow policy; a network beside it learns the noise of all steps.",
    "dppo": "A diffusion policy.",
}
SHAPES_COST, JPEG_COST, POLICY_COST, TOKEN_COST = 80.0, 15.0, 500.0, 400.0

HEAD = """
# All methods compared

Find the method for your model and reward. The linked pages give equations, settings and measurements of each.

Each table compares methods **at equal cost**: the same model, the same held-out prompts and the same number of model
calls (policies: environment steps; language models: generated tokens). Start and end are means over seeds, with the
sample standard deviation. The values are read from the curves of finished runs, linear between two evaluations.
Learning rates and schedules are those of each configuration, so a run planned for this cost could end elsewhere.

All runs are on [embedded models](../assets/README.md). They are tiny, and larger ones may rank methods differently.
Final values, second scorers and each seed are in [Results](results.md).
"""


def at(curve: Curve, cost: float) -> float | None:
    """The value of a curve of (cost, value) at this cost, linear between neighbours; None where it ends before."""
    for (x, y), (x_next, y_next) in pairwise(curve):
        if x <= cost <= x_next:
            return y + (y_next - y) * (cost - x) / (x_next - x)
    return None


def rows(shown: Mapping[str, tuple[str, Sequence[Curve], str]], cost: float, unit: str, value: str) -> str:
    """A table, best first. shown: by name, how the method is written, its curves (one per seed), when to use it.

    Raises ValueError for a method with a curve that ends before this cost."""
    found = []
    for name, (written, curves, use) in shown.items():
        values = [y for y in (at(curve, cost) for curve in curves) if y is not None]
        if not values or len(values) < len(curves):
            raise ValueError(
                f"{name}: {len(curves)} runs, of which {len(values)} reach {cost:g} {unit}; lower the cost"
            )
        spread = f" ± {stdev(values):.3f}" if len(values) > 1 else ""
        start = mean(curve[0][1] for curve in curves)
        found.append(
            (mean(values), f"| {written} | {start:.3f} | **{mean(values):.3f}**{spread} | {len(values)} | {use} |")
        )
    head = f"| method | {value}, start | after {cost:g} {unit} | seeds | use it when |\n| --- | --- | --- | --- | --- |"
    return "\n".join([head, *(line for _, line in sorted(found, key=lambda pair: -pair[0]))])


def of_pipelines(uses: Mapping[str, str]) -> dict[str, tuple[str, list[Curve], str]]:
    """The curves of the trained reward over thousands of forward-equivalents."""
    runs = methods.stored()
    return {
        name: (link(methods.METHODS[name]), [run["curves"]["total"] for run in runs[name]], use)
        for name, use in uses.items()
    }


def link(method: methods.Method) -> str:
    return f"[{method.title}]({method.page})"


def of_policies() -> dict[str, tuple[str, list[Curve], str]]:
    """Success over thousands of environment steps."""
    runs = vla_methods.stored()
    return {
        name: (
            f"[{vla_methods.METHODS[name]}](vla.md)",
            [[(steps / 1000, rate) for steps, rate in run["curve"]] for run in runs[name]],
            use,
        )
        for name, use in POLICIES.items()
    }


def of_answers() -> dict[str, tuple[str, list[Curve], str]]:
    """Share of right answers over thousands of generated tokens."""
    kept = stored(vlm_methods.RESULTS)
    found = {}
    for name, written in vlm_methods.METHODS.items():
        if name == "q_hawkeye":  # a model and a task of its own
            continue
        runs = [kept[key] for key in sorted(kept) if key.rpartition("-")[0] == name]
        if runs:  # others were not run yet
            found[name] = (written, [run["curves"]["accuracy"] for run in runs], f"`configs/vlm/{name}.yaml`")
    return found


def apart() -> str:
    """Methods with a model or reward of their own: when to use them, without a comparison."""
    lines = ["| method | use it when |", "| --- | --- |"]
    return "\n".join([*lines, *(f"| {link(methods.METHODS[name])} | {use} |" for name, use in APART.items())])


def page() -> str:
    """docs/methods.md."""
    held_out: Callable[[str], str] = "held-out {}".format
    parts = [
        HEAD.strip(),
        "## Pipelines",
        "Flow-matching model `assets/tiny-t2i`, reward `shapes`: the rule for what a picture shows, from 0 to 1. The "
        "unit is a forward pass for one sample; a model call in training counts as three, its price with all weights "
        "(with LoRA it is nearer two).",
        rows(of_pipelines(SHAPES), SHAPES_COST, "thousand forward-equivalents", held_out("reward")),
        "Noise-predicting model `assets/tiny-sd`, reward `jpeg`: minus the size of the file in kB.",
        rows(of_pipelines(JPEG), JPEG_COST, "thousand forward-equivalents", held_out("reward")),
        "These have models, rewards or data of their own and are compared with nothing here:",
        apart(),
        "## Policies in simulation",
        "MiniTable in pictures of 32 pixels, nine instructions, from a supervised policy; DPPO starts from another "
        "one. Methods that learn from data are on [a page of their own](vla_offline.md).",
        rows(of_policies(), POLICY_COST, "thousand environment steps", "success"),
        "## Vision-language models",
        "Questions about pictures, `assets/tiny-vlm`. All are presets of one method ([how they are put "
        "together](vlm.md#methods)), with one learning rate that was not searched over.",
        rows(of_answers(), TOKEN_COST, "thousand generated tokens", "right answers").replace(
            "use it when", "configuration"
        ),
        "DAPO generates more answers than it trains on, and these tokens count. After equal iterations it is among the "
        "best ([results](vlm_results.md)).",
        "Made by `python -m benchmarks.equal_cost` from `benchmarks/methods.json`, `vla_methods.json` and "
        "`vlm_methods.json`.",
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(page(), end="")

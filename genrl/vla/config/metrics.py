"""What runs in simulation log, whatever their method."""

from __future__ import annotations

from genrl.config.method import MetricDoc

SIMULATION = {
    "rollout/success": MetricDoc(
        "first episodes of the iteration's environments that succeeded / environments, with exploration",
        "What training raises. Below `eval/success_mean`, because exploration costs precision.",
        "share 0..1",
    ),
    "rollout/return_mean": MetricDoc(
        "mean over environments of the undiscounted return of their first episode",
        "As `rollout/success` where the reward is 1 at success.",
        "the environment's own",
    ),
    "rollout/length_mean": MetricDoc(
        "mean number of executed actions of the first episodes that ended",
        "Falls as the policy becomes quicker, or where it fails early.",
        "actions",
    ),
    "rollout/mixed": MetricDoc(
        "groups (instructions, where there are no groups) that neither always nor never succeeded / all of them",
        "Where learning comes from. Below about 0.15 there is next to nothing to learn: start from a policy of more "
        "demonstrations and fewer steps, or explore more.",
        "share 0..1",
    ),
    "rollout/action_std": MetricDoc(
        "standard deviation of the executed actions over eight chunks from one initial noise, mean over numbers and "
        "environments",
        "Exploration as the robot sees it: later denoising steps contract the noise of the earlier ones. A few "
        "percent of the actions' range is usual; near 0 nothing is tried out.",
        "units of the policy, -1 to 1",
    ),
    "rollout/env_steps": MetricDoc(
        "actions executed in rollouts since the run began, without evaluations",
        "The horizontal axis of success curves.",
        "actions",
    ),
    "rollout/log_prob_off": MetricDoc(
        "largest difference between log-probabilities of the first decisions as they were sampled and as the trainer "
        "scores them before any update, by the weights that acted",
        "0 on the CPU. More than 1e-6 of the largest one ends the run.",
        "nats",
    ),
    "rollout/dropped": MetricDoc(
        "episodes of the iteration that a simulator lost: it died, hung or raised",
        "0. They are not trained on; the log says why.",
        "episodes",
    ),
    "ratio/clipped": MetricDoc(
        "share of ratios outside the clip range on the side where they have no gradient; mean over updates",
        "0 in the first update. Above about 0.3: lower the learning rate or the epochs.",
        "share 0..1",
    ),
    "kl/updates": MetricDoc(
        "mean of r - 1 - ln r over the ratios of an update, r = pi / pi of the rollout (with `environment.staleness`: "
        "before the first update); mean over updates",
        "How far an iteration moves the policy. `trainer.kl_stop` ends its updates.",
        "nats",
    ),
    "grad_norm/policy": MetricDoc(
        "L2 norm of the policy's gradient before clipping to max_grad_norm; mean over updates",
        "As `grad_norm`.",
    ),
    "entropy": MetricDoc(
        "mean entropy of a number of an action under a learned noise, at each denoising step",
        "Falls as the policy becomes sure; at once to its lower bound: raise trainer.entropy_weight.",
        "nats",
    ),
    "env_steps_per_s": MetricDoc(
        "actions executed in the rollout / seconds of the rollout (`environment.staleness` with Ray: its own, "
        "which were earlier and beside training)",
        "Compare `timing/simulator_s` with `timing/rollout_s`: what is waited for.",
        "actions/s",
        False,
    ),
    "timing/rollout_s": MetricDoc(
        "seconds of acting: policy, simulators and scoring (`environment.staleness` with Ray: of waiting for it)",
        "Acting.",
        "s",
        False,
    ),
    "timing/simulator_s": MetricDoc(
        "seconds of these that were spent on simulators (`environment.staleness` with Ray: of the rollout's own)",
        "Near `timing/rollout_s`: more workers help.",
        "s",
        False,
    ),
    "eval/success_mean": MetricDoc(
        "episodes of the evaluation's fixed list that succeeded / episodes; no exploration",
        "The figure of a policy.",
        "share 0..1",
    ),
    "eval/success_low": MetricDoc(
        "lower end of the 95 % Wilson interval of `eval/success_mean`", "What more episodes could show.", "share 0..1"
    ),
    "eval/success_high": MetricDoc(
        "upper end of the 95 % Wilson interval of `eval/success_mean`", "What more episodes could show.", "share 0..1"
    ),
    "eval/success/<name>": MetricDoc(
        "success of the episodes with the instruction `<name>`", "Which tasks are not learnt.", "share 0..1"
    ),
    "eval/lost": MetricDoc(
        "episodes that were lost with their simulator, and are in no other figure",
        "Above 0: the rates are of fewer episodes than asked for.",
        "episodes",
    ),
    "eval/length_mean": MetricDoc("mean number of executed actions of an episode", "Quicker is better.", "actions"),
    "eval/return_mean": MetricDoc(
        "mean undiscounted return of an episode", "As the reward says.", "the environment's own"
    ),
}

OFFLINE = {
    "data/success_mean": MetricDoc(
        "episodes that succeeded / episodes of the data that are learned from (RL-100: of this round)",
        "What the behaviour could do that the policy learns from.",
        "share 0..1",
    ),
    "critic/q_loss": MetricDoc(
        "mean over updates of (Q - target)^2, both copies (FISOR: of rewards)",
        "Falls to the spread of what follows an action.",
        "",
    ),
    "critic/value_loss": MetricDoc(
        "mean over updates of the expectile loss of V (online in RL-100: squared error to the return)",
        "Small beside the spread of Q.",
        "",
    ),
    "critic/value": MetricDoc(
        "mean of V over the last batches", "Below 1 where the reward is 1 at success.", "returns"
    ),
    "loss/imitation": MetricDoc(
        "mean matching loss of the imitation that ends a round (RL-100) or comes first (DiWA)", "As any imitation.", ""
    ),
}

SECTIONS = {"Policies in simulation": SIMULATION, "Policies from data": OFFLINE}
"""By the headings of docs/metrics.md."""

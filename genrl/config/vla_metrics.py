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
        "actions executed in rollouts since the run began, evaluations apart",
        "The cost that success curves are drawn over.",
        "actions",
    ),
    "rollout/log_prob_off": MetricDoc(
        "largest difference between log-probabilities of the first decisions as they were drawn and as the trainer "
        "scores them before any update",
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
        "mean of r - 1 - ln r over the ratios of an update, r = pi / pi of the rollout; mean over updates",
        "How far an iteration moves the policy. `trainer.kl_stop` ends its updates.",
        "nats",
    ),
    "critic/explained_variance": MetricDoc(
        "1 - var(return - value) / var(return) over the decisions that are trained on",
        "0.6 to 0.9 from states, 0.1 to 0.3 from pictures. Below 0: lower or raise critic_lr, warm it up longer.",
    ),
    "loss/value": MetricDoc(
        "mean of the critic's loss (half a squared error, or its clipped or Huber form)",
        "Falls, and rises again where the policy gets into new situations.",
    ),
    "grad_norm/policy": MetricDoc(
        "L2 norm of the policy's gradient before clipping to max_grad_norm; mean over updates",
        "As `grad_norm`.",
    ),
    "grad_norm/critic": MetricDoc(
        "L2 norm of the critic's gradient before clipping to max_grad_norm; mean over updates",
        "Large while returns are new to it.",
    ),
    "entropy": MetricDoc(
        "mean entropy of a number of an action under a learned noise, at each denoising step",
        "Falls as the policy becomes sure; at once to its lower bound: raise trainer.entropy_weight.",
        "nats",
    ),
    "env_steps_per_s": MetricDoc(
        "actions executed in the rollout / seconds of the rollout",
        "Compare `timing/simulator_s` with `timing/rollout_s`: what is waited for.",
        "actions/s",
        False,
    ),
    "timing/rollout_s": MetricDoc("seconds of acting: policy, simulators and scoring", "Acting.", "s", False),
    "timing/simulator_s": MetricDoc(
        "seconds of these that were spent on simulators", "Near `timing/rollout_s`: more workers help.", "s", False
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
    "data/cost_mean": MetricDoc(
        "mean over episodes of the data of their cost (FISOR)",
        "What cloning them costs, about.",
        "the environment's own",
    ),
    "data/transitions": MetricDoc(
        "decisions in the data set so far (RL-100)", "Grows by what every round collects.", "decisions"
    ),
    "data/advantage_gap": MetricDoc(
        "mean advantage of the data's actions in episodes that succeeded minus that in the others (RL-VLM-F)",
        "Positive: learned rewards and critics tell them apart, though nobody told them of success.",
        "",
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
    "critic/v_loss": MetricDoc("FISOR's expectile loss of V_r; mean over updates", "As `critic/value_loss`.", ""),
    "critic/v_h_loss": MetricDoc(
        "FISOR's reversed expectile loss of V_h; mean over updates", "Falls slowly: violations are rare and large.", ""
    ),
    "critic/q_h_loss": MetricDoc(
        "(Q_h - reachability target)^2, both copies; mean over updates", "As `critic/v_h_loss`.", ""
    ),
    "dynamics/loss": MetricDoc(
        "squared error of the change in units of its spread, plus the cross-entropy of an end; last 50 steps",
        "Near 1: the model knows nothing, and the gate is blind.",
        "",
    ),
    "gate/accepted": MetricDoc(
        "candidates of the round that offline evaluation admitted: the trust region moved to them",
        "0: nothing the round did is kept.",
        "candidates",
    ),
    "gate/refused": MetricDoc(
        "candidates of the round that it refused",
        "Many: lower the learning rate, or the critics are exhausted.",
        "candidates",
    ),
    "gate/value": MetricDoc(
        "mean imagined Q of the policy that the round ends with",
        "Comparable within a round only: the critics change.",
        "returns",
    ),
    "gate/gain": MetricDoc(
        "`gate/value` minus that of the policy the round began with",
        "If it rises while `eval/success_mean` falls, the policy exploits the critics.",
        "returns",
    ),
    "loss/imitation": MetricDoc(
        "mean matching loss of the imitation that ends a round (RL-100) or comes first (DiWA)", "As any imitation.", ""
    ),
    "distil/error": MetricDoc(
        "mean square of the one-step copy's chunk minus the teacher's from the same noise; last 50 steps",
        "Small beside 1, the spread of noise.",
        "squared policy units",
    ),
    "distil/success_mean": MetricDoc(
        "success of the one-step copy on the evaluation's episodes",
        "Compare with `eval/success_mean` of the same iteration.",
        "share 0..1",
    ),
    "world/reconstruction": MetricDoc(
        "half the squared error of an observation decoded from its latent, summed over normalised numbers",
        "Below 0.01: latents hold what was seen.",
        "",
    ),
    "world/kl": MetricDoc(
        "KL(posterior || prior) of a step, summed over z", "What the model could not foresee.", "nats"
    ),
    "classifier/loss": MetricDoc(
        "cross-entropy plus the weighted contrastive loss; mean over updates", "Falls early.", ""
    ),
    "classifier/accuracy": MetricDoc(
        "share of its training examples that the reward classifier gets right; mean over updates",
        "Below about 0.95: dreams pay for the wrong things.",
        "share 0..1",
    ),
    "labels/pairs": MetricDoc("pairs that were asked about, dropped ones included", "The cost of labelling.", "pairs"),
    "labels/asked": MetricDoc(
        "of these, how many the judge was asked; the cache knew the others",
        "0 in a run that repeats another one.",
        "pairs",
    ),
    "labels/dropped": MetricDoc(
        "share of pairs without a preference (-1)",
        "High: raise the difference between frames, or lower the margin.",
        "share 0..1",
    ),
    "labels/loss": MetricDoc(
        "Bradley-Terry loss of the reward networks; mean over the last round", "Below ln 2.", "nats"
    ),
    "labels/accuracy": MetricDoc(
        "share of training pairs that the reward networks order as the judge does; last round",
        "Near 1 with a consistent judge.",
        "share 0..1",
    ),
    "eval/cost_mean": MetricDoc(
        "mean over the evaluation's episodes of their cost: decisions with an action that ended in a hazard",
        "FISOR: to be at most `trainer.cost_limit`.",
        "the environment's own",
    ),
    "eval/violating": MetricDoc(
        "share of the evaluation's episodes with any cost", "As `eval/cost_mean`.", "share 0..1"
    ),
    "eval/within_limit": MetricDoc("1 where `eval/cost_mean` <= `trainer.cost_limit`", "1.", "0 or 1"),
    "timing/critics_s": MetricDoc("seconds of learning critics and model", "Offline learning.", "s", False),
}

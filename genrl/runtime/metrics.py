"""What a run measures: the catalogue of metrics, and the logger that writes them.

Every logged key has an entry in `METRICS`, with its formula and how to read it; `docs/metrics.md` is made from it.
`<name>` stands for the name of a reward (`shapes`) or of a part of it (`shapes/count`).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from genrl.config.method import MetricDoc, built_in
from genrl.runtime.run import Run, json_line

if TYPE_CHECKING:
    from PIL.Image import Image


_REWARDS = {
    "reward/<name>_mean": MetricDoc(
        "mean of reward `<name>` over the iteration's samples that got a score",
        "The curve to watch. It is noisy, because prompts differ from one iteration to the next; "
        "`eval/<name>_mean` is the fair comparison.",
        "the reward's own",
    ),
    "reward/<name>_std": MetricDoc(
        "standard deviation of reward `<name>` over the iteration's samples that got a score",
        "Falls as the policy becomes surer. Near zero early in a run: the reward hardly distinguishes the samples.",
        "the reward's own",
    ),
    "reward/<name>_failed": MetricDoc(
        "number of the iteration's samples without a score (NaN or None) from reward `<name>`",
        "0, unless the reward answers None where it does not apply. They take no part in statistics or updates, and "
        "never count as zero; where the reward raises, the log says why.",
        "samples",
    ),
    "reward/total_mean": MetricDoc(
        "mean over samples of sum_i weight_i * reward_i; rewards of weight 0 are left out",
        "What training raises. If it rises while a reward of weight 0 falls, the policy is exploiting the reward.",
        "weighted sum",
    ),
    "reward/total_std": MetricDoc(
        "standard deviation of the weighted sum over the iteration's samples",
        "Spread between prompts and within groups together; `group_std_mean` has the second part alone.",
        "weighted sum",
    ),
}

_USED = {
    "used/<name>_mean": MetricDoc(
        "mean of weight * normalised(gated(reward `<name>`)); only for rewards that are not simply added",
        "What the reward put into the total. 0 by definition where it is normalised in groups.",
        "weighted",
    ),
    "used/<name>_std": MetricDoc(
        "standard deviation of weight * normalised(gated(reward `<name>`)); only for rewards that are not simply added",
        "Which reward decides: the one with the largest spread, whatever its weight.",
        "weighted",
    ),
    "used/<name>_weight": MetricDoc(
        "weight * schedule(iteration); only for rewards with a schedule",
        "Where the schedule is.",
    ),
    "used/<name>_gated": MetricDoc(
        "samples whose gate was closed / samples; only for rewards with a gate",
        "Near 1: the gate leaves nothing of the reward, lower `at_least`. Near 0: it does nothing.",
        "share",
    ),
}

_ADVANTAGES = {
    "zero_std_ratio": MetricDoc(
        "groups whose scored samples all have the same total reward / all groups",
        "Such groups give no update. Near 1: prompts too easy or too hard, groups too small, or too little "
        "sampling noise.",
        "share 0..1",
    ),
    "group_std_mean": MetricDoc(
        "mean over groups of the standard deviation of the total reward inside the group",
        "The learning signal. If it shrinks to 0 while the reward is low, raise the noise level or the group size.",
        "weighted sum",
    ),
    "advantage/abs_mean": MetricDoc(
        "mean of |advantage| over the samples that are trained on, after clipping",
        "About 0.8 for normalised, unclipped advantages. Far lower: many groups without spread.",
    ),
    "advantage/clipped": MetricDoc(
        "share of samples whose advantage was cut at +-advantage_clip",
        "Should stay small; a large share means a few outliers dominate the standard deviation.",
        "share 0..1",
    ),
}

_UPDATE = {
    "loss": MetricDoc(
        "mean over samples and trained steps (DiffusionNFT: noise levels) of the training loss, penalties included",
        "In policy-gradient training its level says little: it starts near 0 and need not fall.",
    ),
    "kl": MetricDoc(
        "mean of the configured KL estimate between the policy and the reference (adapter off), before its weight",
        "Distance from the starting model. Slow growth is normal; a sudden jump comes before broken images: lower "
        "the learning rate or raise kl_weight.",
        "nats, or as `trainer.kl` says",
    ),
    "grad_norm": MetricDoc(
        "L2 norm of the averaged gradient over all trainable parameters, before clipping to max_grad_norm; "
        "mean over the iteration's updates",
        "Spikes come before divergence. Constantly above max_grad_norm: every step has the same, clipped length.",
    ),
    "lr": MetricDoc("learning rate of the iteration's last update", "The schedule, as it was applied."),
    "updates": MetricDoc("optimiser steps of this iteration that moved weights", "0: no group had spread.", "steps"),
}

_FLOW_GRPO = {
    "loss/policy": MetricDoc("the policy term of `loss` alone", "As `loss`."),
    "ratio/mean": MetricDoc(
        "mean of exp(log-prob now - log-prob when sampled) over samples and trained steps",
        "Exactly 1 in the first update of an on-policy iteration, close to 1 afterwards.",
    ),
    "ratio/std": MetricDoc(
        "standard deviation of the same ratio over samples and trained steps",
        "How far the updates of one iteration went.",
    ),
    "ratio/max_abs_dev": MetricDoc(
        "max of |ratio - 1| over samples and trained steps",
        "Should be of the order of clip_range. Not 0 in the first update: training does not replay what sampling did.",
    ),
    "clip_frac_high": MetricDoc(
        "share of (sample, step) pairs with positive advantage and ratio > 1 + clip_high: no gradient",
        "0 always: updates are too timid for the clip to matter. Above 0.5: the learning rate or the number of "
        "updates per iteration is too high for the clip range.",
        "share 0..1",
    ),
    "clip_frac_low": MetricDoc(
        "share of (sample, step) pairs with negative advantage and ratio < 1 - clip_low: no gradient",
        "As `clip_frac_high`, for samples that are pushed away.",
        "share 0..1",
    ),
    "window/first": MetricDoc(
        "index of the first stochastic denoising step of this iteration", "Moves only with `trainer.window`.", "step"
    ),
    "layer_tuning/distance": MetricDoc(
        "mean squared distance of the velocity from that of the group's best sample, weighted by how far the sample "
        "falls short (Dynamic-TreeRPO), before its weight",
        "Falls slowly. Large against the policy loss: lower `trainer.layer_tuning.weight`.",
    ),
    "window/size": MetricDoc("number of stochastic denoising steps that are trained on", "As configured.", "steps"),
}

_TALK2MOVE = {
    "exit/variance": MetricDoc(
        "variance of the total reward over samples that leave the chain at the exit step, mean over instructions, when "
        "the steps were last evaluated; not with a given `trainer.exit_step`",
        "What exploring up to that step is worth. The exit step itself is `window/size`.",
        "weighted sum, squared",
    ),
}

_ADV_GRPO = {
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

_NFT = {
    "policy/old_decay": MetricDoc(
        "decay d of the sampling policy: old <- d * old + (1 - d) * current",
        "0: sampling always uses the current policy. It rises as `old_policy_decay` says.",
        "0..1",
    ),
    "nft/reward_weight_mean": MetricDoc(
        "mean of r = clip(advantage / advantage_clip, -1, 1) / 2 + 1/2 over samples (DiffusionNFT, arXiv 2509.16117)",
        "0.5 for centred advantages.",
        "0..1",
    ),
    "nft/old_deviation": MetricDoc(
        "mean of (velocity - old velocity)^2 over elements",
        "How far the policy moved from the one that sampled. A steep rise comes before divergence.",
        "velocity squared",
    ),
}

_FORWARD = {
    "forward/error": MetricDoc(
        "mean of (prediction - target)^2 at the trained noise levels; of a flow the target is noise - sample",
        "The error of training a model on these samples. It need not fall: bad samples are unlearnt.",
        "velocity squared",
    ),
    "kl/ema": MetricDoc(
        "mean of (velocity - that of the slow copy)^2 (AWM), before its weight",
        "How far the last updates went.",
        "velocity squared",
    ),
    "policy/ema_decay": MetricDoc(
        "decay d of the slow copy (AWM, DGPO): copy <- d * copy + (1 - d) * current", "min(0.001 n, 0.3).", "0..1"
    ),
    "dgpo/group_weight": MetricDoc(
        "mean of sigmoid(S) over samples, S = beta * mean over the group of advantage * (error - reference error)",
        "0.5 in the first update. Falls as the groups come into order; near 0: nothing is left to learn at this beta.",
        "0..1",
    ),
    "dgpo/clip_frac": MetricDoc(
        "share of samples whose ratio to the slow average is beyond 1 +- clip_range: no gradient",
        "Above 0.5: lower the learning rate, or raise clip_range.",
        "share 0..1",
    ),
    "crd/residual": MetricDoc(
        "mean of the distillation loss: [beta (implicit - centre) - (aim - centre)]^2",
        "Falls as differences of implicit rewards become those of the rewards. Compare within one run only.",
    ),
    "crd/implicit_abs": MetricDoc(
        "mean of |implicit reward|, the old policy's matching error minus the present one's",
        "0 in the first update; then how far the policy is from the old one.",
    ),
    "policy/sampling_decay": MetricDoc(
        "decay d of the policy that samples (CRD): sampling <- d * sampling + (1 - d) * current",
        "0 for the first 75 optimiser steps, then it rises.",
        "0..1",
    ),
}

_PREFERENCE = {
    "preference/pairs": MetricDoc(
        "pairs that differ in reward / all pairs (DPO: one per group; D3PO: all within the groups)",
        "Only these are trained on. Near 0: the reward hardly tells the samples of a prompt apart.",
        "share 0..1",
    ),
    "preference/correct": MetricDoc(
        "share of the trained pairs whose winner the policy raised more against the reference than the loser",
        "0 in the first update of a run, when both are equal; afterwards above 0.5 where the preferences of earlier "
        "iterations hold for new pairs.",
        "share 0..1",
    ),
    "preference/logit": MetricDoc(
        "mean of what the sigmoid is taken of", "Far above 1: the pairs are settled, lower beta or stop."
    ),
    "preference/clip_frac": MetricDoc(
        "share of ratios to the reference outside 1 +- clip_range: no gradient (D3PO)",
        "Rises with the distance from the model before training. Near 1: nothing is learnt any more.",
        "share 0..1",
    ),
}

_SPO = {
    "spo/valid_ratio": MetricDoc(
        "share of comparisons whose best and worst candidate are decidedly apart: tanh(gap / 2) > threshold",
        "Only these are trained on. Near 0: lower trainer.threshold, or raise the weights of the rewards.",
        "share 0..1",
    ),
    "spo/gap": MetricDoc(
        "mean over comparisons of the total reward of the best candidate minus that of the worst",
        "What `trainer.threshold` is to be chosen by.",
        "weighted sum",
    ),
    "spo/correct": MetricDoc(
        "share of the trained pairs whose better candidate the policy raised more against the reference than the other",
        "0 in the first update of a run, when both are equal; afterwards above 0.5 where the preferences of earlier "
        "iterations hold for new samples.",
        "share 0..1",
    ),
    "spo/clip_frac": MetricDoc(
        "share of ratios to the reference outside 1 +- clip_range: no gradient",
        "Rises with the distance from the model before training. Near 1: nothing is learnt any more.",
        "share 0..1",
    ),
}

_PRDP = {
    "prdp/pairs": MetricDoc(
        "pairs of samples of one prompt in the regression", "As configured, less samples without a score.", "pairs"
    ),
    "prdp/unexplained": MetricDoc(
        "sum over pairs of (predicted - target)^2 / sum of target^2, target = difference of rewards / beta, predicted "
        "= difference of log-ratios to the reference; before each update",
        "1: the policy is still the reference. It falls as the policy comes to predict its rewards. Above 1: it "
        "overshoots, lower the learning rate or raise beta.",
    ),
    "prdp/correct": MetricDoc(
        "share of the pairs of different rewards whose better sample the policy raised more against the reference",
        "0 in the first update of a run, when both are equal; 0.5 is chance.",
        "share 0..1",
    ),
    "prdp/clip_frac": MetricDoc(
        "share of pairs whose error is larger with log-ratios kept within clip_range of the old policy's",
        "0 in the first update of an iteration. Steps that are clipped have no gradient in these pairs.",
        "share 0..1",
    ),
}

_DIRECT = {
    "draft/steps": MetricDoc("denoising steps that the gradient runs through", "As configured, or as drawn.", "steps"),
    "draft/pull": MetricDoc(
        "mean over samples of the norm of d loss / d x_0, through the decoder and the rewards",
        "0: the reward is flat there, or margin is reached. It rises where pictures leave what the reward model knows.",
    ),
    "diff_instruct/divergence": MetricDoc(
        "mean over samples of sigma^2 (sqrt(|s_assistant - s_teacher|^2 + c^2) - c) at the drawn noise levels",
        "How far the generator's pictures are from the teacher's, as the assistant sees it: about 0 at the start, when "
        "the assistant is the teacher; it rises as the assistant learns, then falls as the generator does.",
    ),
    "diff_instruct/pull": MetricDoc(
        "mean over samples of the norm of the divergence's gradient at x_0", "To be compared with `reward_pull`."
    ),
    "diff_instruct/reward_pull": MetricDoc(
        "mean over samples of the norm of the weighted rewards' gradient at x_0",
        "Far above `pull`: the reward leads alone, and will be hacked; far below: it does nothing. Its weight decides.",
    ),
    "assistant/error": MetricDoc(
        "mean over samples and their numbers of (noise - the assistant's prediction of it)^2",
        "Falls from the teacher's error on the generator's pictures. Rising: the generator runs away; lower its "
        "learning rate, or take more assistant_steps.",
    ),
    "assistant/grad_norm": MetricDoc("norm of the assistant's gradient before clipping", "As `grad_norm`."),
}

_PROMPT_RL = {
    "rewriter/format": MetricDoc(
        "share of the answers that end and hold one new prompt between their tags, which the text encoders take whole",
        "Goes to 1 early. The others are drawn from the prompt as it is.",
        "share 0..1",
    ),
    "rewriter/gain": MetricDoc(
        "mean over prompts of the mean reward of refined samples less that of retained ones, format left out",
        "What the rewriting is worth in this iteration; below 0 it harms. It shrinks again where the flow model learns "
        "to draw the prompts as they are.",
        "weighted sum",
    ),
    "rewriter/distinct": MetricDoc(
        "different new prompts of a group / all its refined samples, mean over groups",
        "Near 1 / (n - m): one answer to each prompt is left, and the language model has little to learn from.",
        "share 0..1",
    ),
    "rewriter/tokens": MetricDoc("tokens of an answer, its end included, mean", "At max_new_tokens: answers are cut."),
    "rewriter/loss": MetricDoc(
        "mean over answers of the token mean of kl_weight k3 - exp(l - sg l) A", "Its value says little: l - sg l is 0."
    ),
    "rewriter/kl": MetricDoc(
        "k3 = exp(d) - d - 1, d = l_ref - l, mean over tokens; before the update",
        "Distance from the language model before training. 0 in the first iteration.",
        "nats per token",
    ),
    "rewriter/ratio/max_abs_dev": MetricDoc(
        "max over tokens of |exp(l - l_old) - 1|, l recomputed for training, l_old as it was sampled",
        "0 up to rounding: the policy that is trained is the one that wrote. Large in half precision for tokens of "
        "small probability.",
    ),
    "rewriter/ratio/mean_abs_dev": MetricDoc(
        "mean over tokens of |exp(l - l_old) - 1|", "As its maximum; above 0.05 in the first iteration the run stops."
    ),
    "rewriter/grad_norm": MetricDoc("norm of the language model's gradient before clipping", "As `grad_norm`."),
    "timing/rewrite_s": MetricDoc("wall time of writing the new prompts", "Beside `timing/sample_s`.", "s", False),
    "eval_rewritten/<name>_mean": MetricDoc(
        "as `eval/<name>_mean`, drawn from rewritten prompts and scored by the prompts as they were",
        "What a user of both models gets; `eval/<name>_mean` is what one of the flow model alone gets.",
        "the reward's own",
    ),
    "eval_rewritten/<name>_std": MetricDoc("as `eval/<name>_std`", "As there.", "the reward's own"),
    "eval_rewritten/<name>_failed": MetricDoc("as `eval/<name>_failed`", "As there.", "samples"),
    "eval_rewritten/total_mean": MetricDoc("as `eval/total_mean`", "As `eval_rewritten/<name>_mean`."),
}

_EVALUATION = {
    "eval/<name>_mean": MetricDoc(
        "mean of reward `<name>` over the held-out prompts: fixed prompts, fixed noise, deterministic sampler",
        "The figure to report. The row of step 0 is the model before training.",
        "the reward's own",
    ),
    "eval/<name>_std": MetricDoc(
        "standard deviation of reward `<name>` over the held-out prompts",
        "Divide by the square root of the number of prompts for the standard error of the mean.",
        "the reward's own",
    ),
    "eval/<name>_failed": MetricDoc(
        "number of held-out samples without a score", "As `reward/<name>_failed`.", "samples"
    ),
    "eval/total_mean": MetricDoc("mean of the weighted sum over the held-out prompts", "As `eval/<name>_mean`."),
    "eval/monitor_drop": MetricDoc(
        "best evaluation of the watched reward so far - this one; only with `evaluation.monitor`",
        "Above the tolerance in `patience` evaluations in a row: training ends.",
        "the reward's own",
    ),
}

_TIMING_READING = "Where an iteration's time goes. Measured on the main process; phases do not overlap."
_COST = {
    "timing/sample_s": MetricDoc("wall time of the rollouts, without decoding", _TIMING_READING, "s", False),
    "timing/decode_s": MetricDoc("wall time of decoding latents to pixels", _TIMING_READING, "s", False),
    "timing/score_s": MetricDoc("wall time of all rewards", _TIMING_READING, "s", False),
    "timing/train_s": MetricDoc("wall time of replay, backward passes and updates", _TIMING_READING, "s", False),
    "timing/eval_s": MetricDoc("wall time of the evaluation", _TIMING_READING, "s", False),
    "timing/iteration_s": MetricDoc(
        "wall time of the iteration; evaluation and saving come on top", _TIMING_READING, "s", False
    ),
    "images_per_s": MetricDoc(
        "samples of the iteration, all processes / timing/iteration_s",
        "Training throughput. Divide by the number of processes to compare machines.",
        "images/s",
        False,
    ),
    "model_calls/sample": MetricDoc(
        "denoiser forward passes while sampling, summed over samples; a guided step counts 2",
        "The cost which does not depend on the machine: compare algorithms by it.",
        "calls x samples",
    ),
    "model_calls/train": MetricDoc(
        "denoiser forward passes while training, those of the reference and the old policy included, summed over "
        "samples; a guided step counts 2",
        "As `model_calls/sample`; one with a backward pass costs about three of those.",
        "calls x samples",
    ),
    "memory/peak_mb": MetricDoc(
        "peak memory of the process so far: torch's allocated peak on the accelerator, the resident peak "
        "on CPU; maximum over processes",
        "Grows on after the first few iterations: a leak.",
        "MiB",
        False,
    ),
}

_SIMULATION = {
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

_OFFLINE = {
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

_LANGUAGE = {
    "eval/accuracy_mean": MetricDoc(
        "held-out questions whose most probable answer is right (first reward >= `evaluation.right_at`) / questions",
        "The figure of a model.",
        "share 0..1",
    ),
    "eval/accuracy_low": MetricDoc(
        "lower end of the 95 % Wilson interval of `eval/accuracy_mean`", "What more questions could show.", "share 0..1"
    ),
    "eval/accuracy_high": MetricDoc(
        "upper end of the 95 % Wilson interval of `eval/accuracy_mean`", "What more questions could show.", "share 0..1"
    ),
    "eval/accuracy_blind": MetricDoc(
        "the same with black pictures, before and after training",
        "What can be guessed. Where `eval/accuracy_mean` is no higher, the model does not see what is asked, and "
        "reinforcement sharpens its guesses only.",
        "share 0..1",
    ),
    "rollout/tokens_mean": MetricDoc(
        "mean number of tokens of an answer, its end included", "Grows where longer answers pay.", "tokens"
    ),
    "rollout/cut": MetricDoc(
        "answers that `max_new_tokens` ended / answers",
        "High: they are scored as they stand; allow more tokens, or punish length.",
        "share 0..1",
    ),
    "rollout/rounds": MetricDoc(
        "rounds of sampling in the iteration (`trainer.resample`)", "Grows as more groups are without spread.", "rounds"
    ),
    "rollout/kept": MetricDoc(
        "groups that are trained on / groups that were sampled",
        "Falls to 0 as all answers become right: there is nothing left to learn.",
        "share 0..1",
    ),
    "synthesis/drawn": MetricDoc(
        "descriptions that passed the check and were rendered / descriptions, of those that became due",
        "The rest are worth 0. Falls: the model writes what the check cannot read.",
        "share 0..1",
    ),
    "synthesis/diversity_mean": MetricDoc(
        "mean over these descriptions of what they are worth: normalised entropy of the answers to their pictures",
        "Up to 1, where all answers to a picture differ.",
        "0 to 1",
    ),
    "sampler/gap_mean": MetricDoc(
        "mean of |log-prob of the trainer - log-prob of the sampler| over tokens, before the update",
        "About 1e-7 in float32, 1e-3 in bfloat16. More: the two see different inputs.",
        "nats",
    ),
    "tokens_per_s": MetricDoc(
        "tokens of the answers / seconds of sampling and scoring them", "Speed.", "tokens/s", False
    ),
}

SECTIONS: dict[str, dict[str, MetricDoc]] = {
    "Rewards": _REWARDS,
    "Rewards as used": _USED,
    "Evaluation": _EVALUATION,
    "Groups and advantages": _ADVANTAGES,
    "Update": _UPDATE,
    "Flow-GRPO": _FLOW_GRPO,
    "Adv-GRPO": _ADV_GRPO,
    "Talk2Move": _TALK2MOVE,
    "DiffusionNFT": _NFT,
    "SPO": _SPO,
    "PRDP": _PRDP,
    "PromptRL": _PROMPT_RL,
    "AWM, DGPO and CRD": _FORWARD,
    "DPO and D3PO": _PREFERENCE,
    "Direct reward and Diff-Instruct": _DIRECT,
    "Policies in simulation": _SIMULATION,
    "Policies from data": _OFFLINE,
    **{method.title: dict(method.metrics) for method in built_in("vla").values() if method.metrics},
    "Vision-language models": _LANGUAGE,
    **{method.title: dict(method.metrics) for method in built_in("vlm").values() if method.metrics},
    "Time, memory and cost": _COST,
}
METRICS: dict[str, MetricDoc] = {key: doc for section in SECTIONS.values() for key, doc in section.items()}

_NAME = r"[\w.-]+(/[\w.-]+( [\w.-]+)*)?"  # reward, or reward/part; as `rewards.contract` allows part names
_PATTERNS = {key: re.compile(_NAME.join(map(re.escape, key.split("<name>")))) for key in METRICS if "<name>" in key}


def document(key: str) -> MetricDoc:
    """The catalogue's entry of a logged key. Raises ValueError where there is none."""
    if key in METRICS:
        return METRICS[key]
    for entry, pattern in _PATTERNS.items():
        if pattern.fullmatch(key):
            return METRICS[entry]
    raise ValueError(
        f"metric {key!r} has no entry in genrl.runtime.metrics.METRICS: add its formula and how to read it"
    )


class MetricLogger:
    """Writes one row per iteration to metrics.jsonl and to accelerate's trackers. Only where `enabled`."""

    def __init__(
        self,
        run: Run,
        trackers: Sequence[str] = (),
        *,
        config: Mapping[str, object] | None = None,
        resumed_from: int = 0,
        enabled: bool = True,
    ) -> None:
        """trackers: names known to accelerate. config: shown by trackers that show one. enabled: main process."""
        check_trackers(trackers)
        self.run = run
        self.enabled = enabled
        self.trackers = [_start_tracker(name, run, config, resumed_from) for name in trackers] if enabled else []

    def log(self, step: int, values: Mapping[str, float | None]) -> None:
        """The row of `step` finished iterations (0: before training). NaN, infinity and None are written as null.

        Raises ValueError for a key without documentation.
        """
        row: dict[str, float | None] = {"step": step}
        for key, value in values.items():
            document(key)
            row[key] = value if value is not None and math.isfinite(value) else None
        if not self.enabled:
            return
        self.run.folder.mkdir(parents=True, exist_ok=True)
        with self.run.metrics.open("a", encoding="utf-8") as file:
            file.write(json_line(row))
            file.flush()
            os.fsync(file.fileno())
        numbers = {key: value for key, value in row.items() if value is not None and key != "step"}
        for tracker in self.trackers:
            tracker.log(numbers, step=step)

    def log_picture(self, step: int, name: str, picture: Image) -> None:
        """To the trackers that take pictures; the files in samples/ are written by `pictures`."""
        for tracker in self.trackers:
            if tracker.name == "tensorboard":
                import numpy as np

                tracker.log_images({name: np.asarray(picture.convert("RGB"))[None]}, step=step, dataformats="NHWC")
            elif tracker.name in ("wandb", "swanlab"):
                tracker.log_images({name: [picture]}, step=step)

    def finish(self) -> None:
        for tracker in self.trackers:
            tracker.finish()
        self.trackers = []


_PROJECT = "genrl"
_RUN_NAME_ARGUMENT = {"wandb": "name", "trackio": "name", "swanlab": "experiment_name", "mlflow": "run_name"}


def check_trackers(names: Sequence[str]) -> None:
    """Raises ValueError for an unknown tracker or a missing package, before anything is trained."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    from accelerate.utils import LoggerType

    installed = {str(name) for name in get_available_trackers()}
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise ValueError(f"trackers: unknown tracker {name!r}; allowed: {', '.join(sorted(LOGGER_TYPE_TO_CLASS))}")
        if name in LoggerType.list() and name not in installed:
            raise ValueError(
                f"trackers: {name} is not installed. Run `pip install {name}`, or take it out of trackers."
            )


def _start_tracker(name: str, run: Run, config: Mapping[str, object] | None, resumed_from: int) -> Any:
    """accelerate's tracker of that name, writing into the run folder where it writes files."""
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState()  # accelerate's trackers write to a logger that needs it; shared with the Accelerator if there is one
    kind = LOGGER_TYPE_TO_CLASS[name]
    if name == "tensorboard":  # rows after the step that is resumed from are hidden; config.yaml holds the config
        tracker = kind("tensorboard", run.folder, purge_step=resumed_from + 1 if resumed_from else 0)
        tracker.start()
        return tracker
    if kind.requires_logging_directory:
        tracker = kind(run.folder.name, run.folder)
    else:
        named = {_RUN_NAME_ARGUMENT[name]: run.folder.name} if name in _RUN_NAME_ARGUMENT else {}
        tracker = kind(_PROJECT, **named)
    tracker.start()
    if config is not None:
        tracker.store_init_configuration(_flat(config))
    return tracker


def _flat(tree: Mapping[str, object], prefix: str = "") -> dict[str, bool | int | float | str | None]:
    found: dict[str, bool | int | float | str | None] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
    return found


def markdown() -> str:
    """The page docs/metrics.md. Write it by `python -m genrl.runtime.metrics > docs/metrics.md`."""
    lines = [
        "# Metrics",
        "",
        "Every key of `metrics.jsonl` and of the trackers, made from `genrl/runtime/metrics.py`. One row is written",
        "per iteration; `step` is the number of finished iterations; the row of step 0 is the model before training.",
        "`<name>` is the name of a reward, or `reward/part` for a part of one. A value that is not finite is `null`.",
        "Metrics marked * differ from run to run; all others are equal, byte for byte, in two runs with one seed",
        "on one machine.",
    ]
    for title, section in SECTIONS.items():
        lines += ["", f"## {title}", "", "| key | formula | unit | how to read it |", "| --- | --- | --- | --- |"]
        for key, doc in section.items():
            cells = [f"`{key}`" + ("" if doc.reproducible else " *"), doc.formula, doc.unit or "-", doc.reading]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(markdown(), end="")

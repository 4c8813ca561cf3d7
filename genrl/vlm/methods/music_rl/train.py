"""MusicRL (arXiv 2402.04229): REINFORCE of audio tokens with a value for every token and a KL over all codes.

Draw pieces, score each as a whole, and move the policy by

    L = -(1 - alpha) sum_t log pi(a_t | s_t) (R - V(s_t)) + alpha sum_t KL(pi || pi_0)

and the value by the mean square of R - V: `music_rl_loss`, whose notes say what is read into
the paper's formula. Policy and value both start from the model before training. One update an iteration, on policy.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from genrl.objectives.token_regularisers import kl_categorical
from genrl.objectives.tokens import row_sum, token_mean
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Results, descend, summed
from genrl.vlm.common import Headed, check_gap
from genrl.vlm.methods.music_rl.settings import MusicRL
from genrl.vlm.methods.updates import Asked, updates_of
from genrl.vlm.policies.codes import CodePolicy
from genrl.vlm.policies.music_tokens import MusicPolicy
from genrl.vlm.rollout.rollout import Answers, totals
from genrl.vlm.run import AnswersRun


class Baseline(nn.Module):
    """V(s_t): a copy of the model with an output of one number, which begins at 0. Weights that are not trained, those
    below a LoRA, are the policy's own."""

    def __init__(self, policy: CodePolicy | MusicPolicy) -> None:
        super().__init__()
        # As deepcopy's memo: what is in it counts as copied, so that frozen weights stay the policy's own.
        shared = {id(p): p for p in policy.body.parameters() if not p.requires_grad}
        self.body: Any = copy.deepcopy(policy.body, shared)
        self.head = nn.Linear(self.body.config.hidden_size, 1, device=policy.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, states: Tensor) -> Tensor:
        """Values of states [..., H] of its own body, [...] in float32."""
        values: Tensor = self.head(states.to(self.head.weight.dtype))[..., 0]
        return values


def heads(policy: CodePolicy | MusicPolicy) -> dict[str, nn.Module]:
    """What is trained beside the policy."""
    return {"baseline": Baseline(policy)}


def train(run: AnswersRun, settings: MusicRL) -> None:
    """All iterations that are left."""
    for _ in run.loop.iterations():
        answers, row = run.draw()
        row |= learn(run, settings, answers)
        run.finish(row)


def learn(run: AnswersRun, settings: MusicRL, answers: Answers) -> dict[str, float]:
    """The optimiser step of an iteration, and what it measured over the pieces of all processes."""
    loop, config, alpha = run.loop, run.config, settings.alpha
    headed = Headed(run.policy, run.heads)
    reward = totals(config, answers.scores).float()
    size, micro = config.generation.group_size, settings.micro_batch
    (update,) = updates_of(answers.mask, size, updates=1, micro=micro, seed=config.seed, loop=loop)
    sums: dict[str, float] = defaultdict(float)
    loop.phase("training", len(answers.texts))

    def prepare(rows: Tensor) -> Recorded | None:
        return recorded(run, answers, rows, reward[rows], len(rows) / update.rows) if len(rows) else None

    def measure(rows: Tensor, results: Results, given: Recorded) -> None:
        share = float(given["share"])
        figures = {
            "loss": results["loss"] / share,
            "loss/policy": -(1 - alpha) * results["policy"],
            "loss/kl": alpha * results["kl"],
            "kl": results["kl"] / given["ref_rows"].shape[1],
            "loss/value": results["value_loss"],
            "sampler/gap_mean": results["gap"],
        }
        for name, value in figures.items():
            sums[name] += share * float(value.detach())

    means: dict[str, float] = {}

    def agree() -> None:
        means.update(summed(sums))
        if loop.iteration == 0 and means:  # no piece may have a score
            check_gap(means["sampler/gap_mean"])

    parts = [rows[~reward[rows].isnan()] for rows in update.passes]
    with loop.timed("train"):
        norms = descend(
            loop, settings, headed, parts, prepare, loss,
            groups=["policy", "baseline"], done=len, measure=measure, before_step=agree,
        )  # fmt: skip
    return means | {"grad_norm": norms["policy"], "grad_norm/baseline": norms["baseline"]}


def recorded(run: AnswersRun, answers: Answers, rows: Tensor, reward: Tensor, share: float) -> Recorded:
    """All that the loss of some pieces reads; share: theirs in the update."""
    policy: Any = run.policy
    batch = Asked(answers.prompts, answers.group[rows], run.config.generation.temperature)
    prompts = [answers.prompts[number] for number in batch.group.tolist()]
    tokens = answers.tokens[rows].to(policy.device)
    reference: Any = run.reference or policy  # with a LoRA, the model without it
    with torch.no_grad(), policy.reference() if run.reference is None else nullcontext():
        ref_rows = reference.code_rows(prompts, tokens, batch.temperature)
    tensors = {"answers": tokens, "ref_rows": ref_rows, "reward": reward, "sampler": answers.sampler_log_prob[rows]}
    return Recorded(batch, tensors | {"share": torch.tensor(share, dtype=torch.float64)})


def loss(settings: MusicRL, headed: Headed, given: Recorded) -> dict[str, Tensor]:
    """Share of the update's loss, [], its parts, and the mean difference of the sampler's log-probabilities."""
    policy: Any = headed.policy
    batch: Asked = given.batch
    prompts = [batch.prompts[number] for number in batch.group.tolist()]
    tokens = given["answers"].to(policy.device)
    log_rows = policy.code_rows(prompts, tokens, batch.temperature)
    places = policy.choices(tokens)
    baseline = cast(Baseline, headed.heads["baseline"])
    values = baseline(policy.states(prompts, tokens, baseline.body)[places]).view(log_rows.shape[:2])
    codes = policy.things(tokens).flatten(1)
    losses = music_rl_loss(
        log_rows,
        given["ref_rows"],
        codes,
        given["reward"].to(policy.device),
        values,
        torch.ones_like(codes),
        alpha=settings.alpha,
    )
    sampler = given["sampler"].to(policy.device)[places].view(codes.shape)
    gap = (log_rows.detach().gather(-1, codes[..., None])[..., 0] - sampler).abs().mean()
    total = float(given["share"]) * (losses.loss + losses.value_loss)
    return {"loss": total, "policy": losses.policy, "kl": losses.kl, "value_loss": losses.value_loss, "gap": gap}


# MusicRL (arXiv 2402.04229): reinforcement learning of autoregressive audio tokens from one reward at the end.
#
# Its preference reward model is Bradley-Terry (`genrl.vlm.methods.music_preference`).


class MusicRLOutput(NamedTuple):
    """loss [] for the policy; policy and kl [], its two parts before their weights; value_loss [] for the baseline."""

    loss: Tensor
    policy: Tensor
    kl: Tensor
    value_loss: Tensor


def music_rl_loss(
    log_rows: Tensor,
    ref_log_rows: Tensor,
    tokens: Tensor,
    reward: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    alpha: float = 0.05,
) -> MusicRLOutput:
    """`-(1 - alpha) sum_t l_t (R - V_t) + alpha sum_t KL(pi || pi_0)`, mean over sequences: its objective, negated.

    log_rows, ref_log_rows log-softmax [B, T, V]; tokens int64 [B, T]; reward [B] of the finished piece, the return at
    every step; value [B, T]. The KL is over the whole vocabulary; the paper prints its last term without the factor pi,
    which we read as this. value_loss is the mean square of R - V. alpha is not in the paper's main text.
    Gradient: the loss through log_rows only, value_loss through value only.
    """
    log_prob = log_rows.gather(-1, tokens[..., None])[..., 0]
    advantage = reward.detach()[:, None] - value
    policy = row_sum(log_prob * advantage.detach(), mask).mean()
    kl = row_sum(kl_categorical(log_rows, ref_log_rows), mask).mean()
    return MusicRLOutput(-(1.0 - alpha) * policy + alpha * kl, policy, kl, token_mean(advantage**2, mask))

"""MusicRL (arXiv 2402.04229): REINFORCE of audio tokens with a value for every token and a KL over all codes.

Draw pieces, score each as a whole, and move the policy by

    L = -(1 - alpha) sum_t log pi(a_t | s_t) (R - V(s_t)) + alpha sum_t KL(pi || pi_0)

and the value by the mean square of R - V: `objectives.audio_tokens.music_rl_loss`, whose notes say what is read into
the paper's formula. Policy and value both start from the model before training. One update an iteration, on policy.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from genrl.objectives.tokens.audio_tokens import music_rl_loss
from genrl.runtime.recorded import Recorded
from genrl.vlm.methods.dealing import dealt
from genrl.vlm.methods.music_rl.settings import MusicRL
from genrl.vlm.policies.codes import CODE, CodePolicy
from genrl.vlm.policies.policy import Encoded
from genrl.vlm.rollout.rollout import Answers, totals
from genrl.vlm.run import AnswersRun, check_gap


class Baseline(nn.Module):
    """V(s_t): a copy of the model with an output of one number, which begins at 0."""

    def __init__(self, policy: CodePolicy) -> None:
        super().__init__()
        self.body: Any = copy.deepcopy(policy.model.base_model)
        self.head = nn.Linear(self.body.config.hidden_size, 1, device=policy.device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, states: Tensor) -> Tensor:
        """Of states [..., H] of its own body, [...] in float32."""
        values: Tensor = self.head(states.to(self.head.weight.dtype))[..., 0]
        return values


def heads(policy: CodePolicy) -> dict[str, nn.Module]:
    """What is trained beside the policy."""
    return {"baseline": Baseline(policy)}


def train(run: AnswersRun, settings: MusicRL) -> None:
    """All iterations that are left."""
    for _ in run.loop.iterations():
        answers, row = run.draw()
        row |= learn(run, cast(Baseline, run.heads["baseline"]), answers)
        row["lr"] = run.loop.lr
        run.loop.finish(row)


def settings_of(run: AnswersRun) -> MusicRL:
    """The section `trainer`, which is this method's."""
    return cast(MusicRL, run.config.trainer)


def learn(run: AnswersRun, baseline: Baseline, answers: Answers) -> dict[str, float]:
    """The optimiser step of an iteration, and what it measured over the pieces of all processes."""
    loop, config, settings = run.loop, run.config, settings_of(run)
    alpha = settings.alpha
    policy: Any = run.policy
    reward = totals(config, answers.scores).float()
    size, micro = config.generation.group_size, settings.micro_batch
    (update,) = dealt(answers.mask, size, updates=1, micro=micro, seed=config.seed, loop=loop)
    sums: dict[str, float] = defaultdict(float)
    loop.phase("training", len(answers.texts))
    with loop.timed("train"):
        for k in range(update.passes):
            loss, evidence = torch.zeros(()), {}
            rows = update.parts[k] if k < len(update.parts) else torch.zeros(0, dtype=torch.int64)
            rows = rows[~reward[rows].isnan()]
            if len(rows):
                own, gap = scored(run, baseline, answers, rows, reward[rows])
                share = len(rows) / update.rows
                loss = share * (own.loss + own.value_loss)
                evidence = {"reward": reward[rows]}
                figures = {
                    "loss": loss / share,
                    "loss/policy": -(1 - alpha) * own.policy,
                    "loss/kl": alpha * own.kl,
                    "kl": own.kl / policy.codec.length,
                    "loss/value": own.value_loss,
                    "sampler/gap_mean": gap,
                }
                for name, value in figures.items():
                    sums[name] += share * float(value.detach())
            loop.backward(config.trainer, {"loss": loss}, Recorded(None, evidence))
            loop.advance(len(update.parts[k]) if k < len(update.parts) else 0)
        every = gather_object([dict(sums)])
        found = {name: sum(one.get(name, 0.0) for one in every) for name in dict.fromkeys(n for o in every for n in o)}
        if loop.iteration == 0:
            check_gap(found["sampler/gap_mean"])
        norms = loop.step(["policy", "baseline"])
    return found | {"grad_norm": norms["policy"], "grad_norm/baseline": norms["baseline"]}


def scored(run: AnswersRun, baseline: Baseline, answers: Answers, rows: Tensor, reward: Tensor) -> tuple[Any, Tensor]:
    """(loss and its parts, mean difference of the sampler's log-probabilities) of some pieces."""
    policy: Any = run.policy
    assert run.reference is not None, "open_session makes one for this method"
    prompts = [answers.prompts[number] for number in answers.group[rows].tolist()]
    tokens, temperature = answers.tokens[rows].to(policy.device), run.config.generation.temperature
    log_rows = code_rows(policy, prompts, tokens, temperature)
    with torch.no_grad():
        ref_rows = code_rows(run.reference, prompts, tokens, temperature)
    places = (policy.kinds(tokens)[0] == CODE).nonzero(as_tuple=True)
    values = baseline(policy.states(prompts, tokens, baseline.body)[places]).view(log_rows.shape[:2])
    codes = policy.things(tokens)[:, -1]
    found = music_rl_loss(
        log_rows,
        ref_rows,
        codes,
        reward.to(policy.device),
        values,
        torch.ones_like(codes),
        alpha=settings_of(run).alpha,
    )
    sampler = answers.sampler_log_prob[rows].to(policy.device)[places].view(codes.shape)
    gap = (log_rows.detach().gather(-1, codes[..., None])[..., 0] - sampler).abs().mean()
    return found, gap


def code_rows(policy: Any, prompts: Sequence[Encoded], tokens: Tensor, temperature: float) -> Tensor:
    """log softmax [B, K, N] over the N codes at the K places of codes; nothing else may stand there."""
    kinds, _ = policy.kinds(tokens)
    places = (kinds == CODE).nonzero(as_tuple=True)
    rows = policy.log_rows(policy.states(prompts, tokens)[places], kinds[places], temperature)[:, policy.code_ids]
    found: Tensor = rows.view(len(tokens), -1, len(policy.code_ids))
    return found

"""On-policy distillation of language models: answer, let a teacher read the answers, estimate, update.

    sampled       A[b,t] = c_r A[b] + (l_T - l)[b,t], l_T and l log-probs of the sampled token under teacher and model
    distribution  L = L_preset(c_r A) + D(model, teacher), D by whole distributions (`divergence`)

The first is the policy gradient of the reverse KL, by any surrogate; the gap is neither centred nor divided. Groups
whose rewards are equal, and answers that were cut, teach too. docs/opd_language.md
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from genrl.objectives.policy_losses import kl_k3
from genrl.objectives.tokens import aggregate, log_ratio, masked, per_token
from genrl.runtime.loop.recorded import Recorded
from genrl.vlm.common import Estimated
from genrl.vlm.methods.answers import train as answering
from genrl.vlm.methods.extras import CHUNK, allowed_logits, replayed
from genrl.vlm.methods.opd.settings import LEAST, ROUTE, LanguageOPD
from genrl.vlm.methods.policy_loss import recipe_loss
from genrl.vlm.methods.updates import Asked
from genrl.vlm.policies.folder import open_policy
from genrl.vlm.policies.policy import Encoded, Policy
from genrl.vlm.rollout.augment import with_text
from genrl.vlm.rollout.rollout import Answers
from genrl.vlm.run import AnswersRun

LAST = 2**20
"""Bytes at the end of a file that say, with its name and size, which it is."""


class Said(NamedTuple):
    """log_prob [B, T] of the sampled tokens. With whole distributions, ids int64 and rows [B, T, K]: tokens, and their
    log-probabilities under the teacher."""

    log_prob: Tensor
    ids: Tensor | None
    rows: Tensor | None


class Teachers:
    """The teachers of a run. Raises ValueError for one of other tokens, and where a checkpoint was taught by others."""

    def __init__(self, run: AnswersRun, settings: LanguageOPD) -> None:
        self.run, self.settings = run, settings
        self.known = settings.teachers
        self.models = {name: self._opened(name) for name in self.known}
        files = {name: teacher.path and identity(teacher.path) for name, teacher in self.known.items()}
        before = run.loop.memory.setdefault("teachers", files)
        if others := sorted(name for name in {**before, **files} if before.get(name) != files.get(name)):
            text = "the checkpoint was taught by other weights; give the same, or begin a new run"
            raise ValueError(f"trainer.teachers: {', '.join(others)}: {text}")

    def _opened(self, name: str) -> Policy:
        """Its model; the policy itself where it is that without its LoRA."""
        config, policy, path = self.run.loop.config, self.run.policy, self.known[name].path
        if path is None and policy.peft is not None:
            return policy
        plain = config.model_copy(update={"vlm": config.vlm.model_copy(update={"lora": None})})
        model = open_policy(plain, policy.device, path)
        model.model.requires_grad_(False)
        if model.tokenizer.get_vocab() != policy.tokenizer.get_vocab():
            raise ValueError(f"trainer.teachers: {name} numbers its tokens otherwise than the model; take one "
                             "of the same family")  # fmt: skip
        return model

    def _acting(self, name: str) -> AbstractContextManager[None]:
        model = self.models[name]
        return model.reference() if model is self.run.policy else nullcontext()

    def names(self, answers: Answers) -> list[str]:
        """Who teaches each question. Raises ValueError for a row whose column names none."""
        if len(self.known) == 1:
            return [*self.known] * len(answers.rows)
        for row in answers.rows:
            if row.columns.get(ROUTE) not in self.known:
                raise ValueError(f"{row.name} has {ROUTE}: {row.columns.get(ROUTE)!r}, which is none of the teachers "
                                 f"{', '.join(sorted(self.known))} (trainer.teachers)")  # fmt: skip
        return [str(row.columns[ROUTE]) for row in answers.rows]

    def prompts(self, answers: Answers, names: Sequence[str]) -> list[Encoded]:
        """What the teachers read, each by its own model."""
        prompts_of = []
        for row, name in zip(answers.rows, names, strict=True):
            question = next(part for part in reversed(row.prompt.parts) if isinstance(part, str))
            text = self.known[name].prompt.format(**{**row.columns, "question": question})
            prompts_of.append(self.models[name].encode(with_text(row, text).prompt))
        return prompts_of

    @torch.no_grad()
    def said(self, answers: Answers, parts: Sequence[Tensor], temperature: float) -> Said:
        """What they say of this process's answers, part by part, one pass of each teacher on its own rows."""
        names = self.names(answers)
        prompts, of_row = self.prompts(answers, names), [names[k] for k in answers.group.tolist()]
        size, distribution = answers.mask.shape, self.settings.estimator == "distribution"
        head = self.run.policy.model.get_output_embeddings()
        width = min(self.settings.top or len(head.weight), len(head.weight)) if distribution else 0
        log_prob = torch.zeros(size)
        ids, values = torch.zeros(*size, width, dtype=torch.int64), torch.zeros(*size, width)
        for part in parts:
            for name in self.known:
                rows = part[torch.tensor([of_row[k] == name for k in part.tolist()], dtype=torch.bool)]
                if not len(rows):
                    continue
                model, mask = self.models[name], answers.mask[rows].bool()
                tokens, group = answers.tokens[rows], answers.group[rows]
                with self._acting(name):
                    replay = model.log_probs(prompts, tokens, mask, group=group, temperature=temperature)
                log_prob[rows] = replay.log_prob.float().cpu()
                if not width:
                    continue
                policy = self.run.policy
                now = policy.log_probs(answers.prompts, tokens, mask, group=group, temperature=temperature)
                answers_of = [
                    self._likeliest(model, theirs, student, width, temperature)
                    for theirs, student in zip(
                        replay.states[mask].split(CHUNK), now.states[mask].split(CHUNK), strict=True
                    )
                ]
                for table, column in ((ids, 0), (values, 1)):
                    table[rows] = table[rows].masked_scatter(
                        mask[..., None], torch.cat([f[column] for f in answers_of]).cpu()
                    )
        return Said(log_prob, ids, values) if width else Said(log_prob, None, None)

    def _likeliest(
        self, model: Policy, theirs: Tensor, mine: Tensor, width: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """(ids, the teacher's log-probabilities), [N, K], of hidden states [N, H] of both."""
        policy = self.run.policy
        rows = allowed_logits(model, model.model.get_output_embeddings()(theirs), temperature).log_softmax(-1)
        # The likeliest of the one by whom the distance is mostly weighted: from beta .5 on the model itself.
        by = rows
        if self.settings.beta >= 0.5:
            by = allowed_logits(policy, policy.model.get_output_embeddings()(mine), temperature)
        ids = by.topk(width, -1).indices
        return ids, rows.gather(-1, ids).float()


def divergence(
    settings: LanguageOPD, policy: Policy, states: Tensor, mask: Tensor, ids: Tensor, rows: Tensor, temperature: float
) -> Tensor:
    """[B, T]: how far the model, of hidden states [B, T, H], is from what its teacher said, [B, T, K]; 0 where masked.
    Gradient through the states and the output layer."""
    head = policy.model.get_output_embeddings()

    def far(states: Tensor, ids: Tensor, theirs: Tensor) -> Tensor:
        student = allowed_logits(policy, head(states), temperature).log_softmax(-1).gather(-1, ids)
        theirs = theirs.to(student.dtype)
        if ids.shape[-1] < len(head.weight):
            student, theirs = with_rest(student), with_rest(theirs)
        return generalised_divergence(student, theirs, settings.beta)

    mask = mask.bool().to(states.device)
    of_each = zip(*(t[mask].split(CHUNK) for t in (states, ids.to(states.device), rows.to(states.device))), strict=True)
    # distributions are computed again in the backward pass, so that they exist for a chunk of tokens at a time
    parts = [checkpoint(far, *arguments, use_reentrant=False) for arguments in of_each]
    # Where no token counts there is still a graph, for the backward pass.
    values = torch.cat(parts) if parts else states.sum() * 0 + states.new_zeros(0)
    return torch.zeros(mask.shape, dtype=values.dtype, device=states.device).masked_scatter(mask, values)


def identity(path: str) -> str:
    """Hash of the weights of a folder, by each file's name, size and end; the name itself of a hub id."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return path
    digest = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            # The end: it begins with a header, which all weights of these shapes share.
            opened.seek(max(0, file.stat().st_size - LAST))
            digest.update(f"{file.name}:{file.stat().st_size}:".encode() + opened.read())
    return digest.hexdigest()


def train(run: AnswersRun, settings: LanguageOPD) -> None:
    """All iterations that are left."""
    teachers = Teachers(run, settings)
    for _ in run.loop.iterations():
        answers, row = run.draw()
        ready = run.estimate(answers)
        if ready is not None:
            row |= answering.estimated(run, ready)
            ready, figures = taught(run, settings, teachers, answers, ready)
            row |= figures | answering.learn(run, answers, ready, loss)
        run.finish(row)


def taught(
    run: AnswersRun, settings: LanguageOPD, teachers: Teachers, answers: Answers, ready: Estimated
) -> tuple[Estimated, dict[str, float]]:
    """Estimates with what the teachers say, and figures of all processes."""
    batch, temperature = ready.batch, run.config.generation.temperature
    parts = [part for update in ready.updates for part in update.parts]
    with run.loop.timed("estimate"), run.loop.fitting():
        teacher = teachers.said(answers, parts, temperature)
        old = batch.old_log_prob
        if old is None:  # one update on policy needs none otherwise
            old = replayed(run.policy, answers, parts, temperature)[0]
    run.loop.check_stop()
    assert batch.advantage is not None
    advantage = settings.reward_coef * per_token(batch.advantage, batch.mask).expand(batch.mask.shape)
    extra = dict(batch.extra)
    if teacher.ids is None or teacher.rows is None:
        advantage = gap_advantage(advantage, old, teacher.log_prob, batch.mask)
    else:
        extra |= {"teacher_ids": teacher.ids, "teacher_rows": teacher.rows}
    ready = ready._replace(batch=replace(batch, advantage=advantage, extra=extra))
    return ready, figures(old, teacher.log_prob, batch.mask)


def figures(old: Tensor, teacher: Tensor, mask: Tensor) -> dict[str, float]:
    """Estimates of the KL from the model to its teacher, over the tokens of all processes."""
    gap, k3 = log_ratio(old, teacher, mask), masked(kl_k3(old, teacher), mask)
    every = gather_object([(float(gap.sum()), float(k3.sum()), int(mask.sum()))])
    tokens = max(1, sum(count for *_, count in every))
    return {"teacher/gap": sum(g for g, *_ in every) / tokens, "teacher/k3": sum(k for _, k, _ in every) / tokens}


def loss(settings: LanguageOPD, policy: Policy, given: Recorded) -> dict[str, Tensor]:
    """This micro-batch's part of the update's loss, [], its log-probabilities [b, T], and figures."""
    if settings.estimator == "sampled":
        return answering.loss(settings, policy, given)
    batch: Asked = given.batch
    assert batch.preset is not None, "a method of answers has one"
    tokens, mask = given["answers"], given["answered"]
    now = policy.log_probs(batch.prompts, tokens, mask, group=batch.group, temperature=batch.temperature)
    result = recipe_loss(batch.preset, now.log_prob.cpu(), {}, given)
    teacher = (given["extra/teacher_ids"], given["extra/teacher_rows"])
    far = divergence(settings, policy, now.states, given["answered"], *teacher, batch.temperature)
    totals = {"rows": int(given["rows"]), "tokens": int(given["tokens"]), "length": batch.preset.length}
    term = aggregate(far.cpu(), given["answered"].cpu(), batch.preset.aggregation, **totals)
    return result | {"loss": result["loss"] + term, "loss/distill": term.detach()}


def gap_advantage(
    advantage: Tensor, log_prob: Tensor, teacher_log_prob: Tensor, mask: Tensor, *, coef: float = 1.0
) -> Tensor:
    """`A + coef (l_teacher - l)`, [B, T]: its policy gradient on policy is that of `-coef KL(student || teacher)`.
    advantage [B] or [B, T]; log-probabilities of the sampled tokens; without gradient."""
    gap = log_ratio(teacher_log_prob.detach(), log_prob, mask)
    return per_token(advantage.detach(), mask) + coef * gap.to(advantage.dtype)


def with_rest(log_rows: Tensor) -> Tensor:
    """Log-probabilities of some tokens [..., K], and of all others together: [..., K + 1]. At least 1e-7 is left for
    these, so that the logarithm is finite."""
    mass = log_rows.logsumexp(-1, keepdim=True).clamp(max=-1e-7)
    # log1p: where the named tokens hold nearly all, 1 - mass would be rounding.
    return torch.cat([log_rows, (-mass.exp()).log1p()], -1)


def generalised_divergence(log_p: Tensor, log_t: Tensor, beta: float) -> Tensor:
    """GKD's distance of a student p from a teacher t (arXiv 2306.13649), [...]: `KL(t || p)` for beta 0, `KL(p || t)`
    for 1, else `beta KL(t || M) + (1 - beta) KL(p || M)` with `M = (1 - beta) p + beta t`. Gradient through log_p.

    Raises ValueError for a beta that is neither a KL nor well between them.
    """
    log_t = log_t.detach()
    if beta == 0:
        return _kl(log_t, log_p)
    if beta == 1:
        return _kl(log_p, log_t)
    if not LEAST <= beta <= 1 - LEAST:
        text = (
            f"between {LEAST} and {1 - LEAST}: nearer to 0 or 1 the distance vanishes, and is not the KL of the limit"
        )
        raise ValueError(f"beta must be 0, 1 or {text}; got {beta}")
    middle = torch.logaddexp(log_p + math.log(1 - beta), log_t + math.log(beta))
    return beta * _kl(log_t, middle) + (1 - beta) * _kl(log_p, middle)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(a || b), [...]; what has no probability under a adds nothing."""
    a = log_a.exp()
    return torch.where(a > 0, a * (log_a - log_b), 0.0).sum(-1)

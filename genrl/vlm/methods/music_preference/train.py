"""The reward model of MusicRL-U (arXiv 2402.04229): Bradley-Terry on pairs of pieces to the same text.

    L = - mean log sigmoid( s(c, preferred) - s(c, other) )

s is the score of a MusicGen with a linear head on the mean of its decoder's states (`genrl_rewards.models.musicgen`),
which starts from the model that plays. The paper says what the loss is, not what the head reads. What is saved is
loaded by the reward `music_preference`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from genrl.objectives.preferences import preference_loss
from genrl.runtime.loop.recorded import Recorded
from genrl.runtime.loop.updating import Results, descend, summed
from genrl.runtime.show.compare.statistics import wilson
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.methods.music_preference.settings import MusicPreference
from genrl.vlm.methods.updates import Asked
from genrl.vlm.policies.contract import left_padded
from genrl.vlm.rollout.data import Questions
from genrl.vlm.run import AnswersRun
from genrl.vlm.tasks import Row, Split
from genrl_rewards.models.musicgen import fewest, read_wav

PIECES = ("preferred", "other")
"""Columns with codes, K lists of F numbers; or with `_path` behind them, with .wav files beside the data."""
NONE = -1
"""In padded codes: no code."""


def train(run: AnswersRun, settings: MusicPreference) -> None:
    """All iterations that are left."""
    for _ in run.loop.iterations():
        row = learn(run, settings)
        run.finish(row)


def learn(run: AnswersRun, settings: MusicPreference) -> dict[str, float]:
    """One optimiser step, on pairs that come in passes over all of them, and what it measured."""
    loop, size, rank, at_once = run.loop, settings.batch_size, run.loop.process.rank, settings.rows_per_pass
    first = loop.memory.get("pairs", 0)
    numbers = run.questions.asked(loop.iteration, first, size)[rank :: loop.process.accelerator.num_processes]
    loop.memory |= {"pairs": first + size}
    sums: dict[str, float] = defaultdict(float)
    loop.phase("training", len(numbers))
    parts = list(torch.tensor(numbers, dtype=torch.int64).split(at_once)) if numbers else []

    def prepare(part: Tensor) -> Recorded:
        return recorded(run.policy, [run.questions[k] for k in part.tolist()], size)

    def measure(part: Tensor, results: Results, given: Recorded) -> None:
        sums["loss"] += float(results["loss"].detach())
        sums["pairs/accuracy"] += right(results["margin"]) / size
        sums["pairs/margin"] += float(results["margin"].sum()) / size

    with loop.timed("train"):
        norms = descend(loop, settings, run.policy, parts, prepare, loss, groups=["policy"], done=len, measure=measure)
    return summed(sums) | {"grad_norm": norms["policy"]}


def recorded(policy: Any, rows: Sequence[Row], size: int) -> Recorded:
    """All that the loss of some pairs reads. size: pairs of the update."""
    batch = Asked([policy.encode(row.prompt) for row in rows], torch.arange(len(rows)), temperature=1.0)
    tensors = {"size": torch.tensor(size)}
    for name in PIECES:
        codes = [piece(policy, row, name).T for row in rows]  # [F, K], padded below
        tensors[name] = pad_sequence(codes, batch_first=True, padding_value=NONE)
    return Recorded(batch, tensors)


def loss(settings: MusicPreference, policy: Any, given: Recorded) -> dict[str, Tensor]:
    """This micro-batch's share of the mean over the update's pairs, [], and the margins [b]."""
    ids, mask = left_padded(given.batch.prompts, policy.tokenizer.pad_token_id)

    def scores(padded: Tensor) -> Tensor:
        results: Tensor = policy.model.scores(ids, mask, [code[code[:, 0] != NONE].T for code in padded])
        return results

    preferred, other = scores(given["preferred"]), scores(given["other"])
    share = preference_loss(preferred, other).sum() / int(given["size"])
    return {"loss": share, "margin": (preferred - other).detach()}


def right(margin: Tensor) -> float:
    """How many pairs are ranked as given, a tie being half of one."""
    return float((margin > 0).sum()) + float((margin == 0).sum()) / 2


def piece(policy: Any, row: Row, column: str, *, header: bool = False) -> Tensor:
    """The codes int64 [K, F] of a row's piece; header: of a file none, it is only looked at. Raises ValueError, naming
    the row, for a piece that cannot be read."""
    model, listed, file = policy.model, row.columns.get(column), row.columns.get(f"{column}_path")
    books, last = model.decoder.num_codebooks, model.decoder.config.vocab_size - 1
    try:
        if listed is None and file is not None:
            sound = read_wav(file, header=header)
            model.check_sound(*sound)
            return torch.zeros(books, 0) if header else model.heard(*sound).cpu()
        codes = torch.tensor(listed)
        least = fewest(model.decoder)
        if codes.dim() != 2 or codes.dtype != torch.int64 or len(codes) != books or codes.shape[1] < least:
            raise ValueError(f"a piece is {books} lists of {least} or more codes, of equal length")
        if int(codes.min()) < 0 or int(codes.max()) > last:
            raise ValueError(f"codes are 0 to {last}, found {int(codes.min())} to {int(codes.max())}")
    except (TypeError, ValueError, RuntimeError) as error:
        have = ", ".join(row.columns) or "none"
        text = f"no piece in the column {column!r} or {column + '_path'!r}: {error}; columns: {have}"
        raise ValueError(f"{row.name}: {text}") from error
    return codes


def check(config: VLMConfig, policy: Any) -> None:
    """Raises ValueError for the first row whose pieces cannot be read, before anything is trained."""
    splits: tuple[Split, ...] = ("train", "eval") if config.evaluation.every else ("train",)
    for split in splits:
        questions = Questions(config, split)
        for number in range(len(questions)):
            for column in PIECES:
                piece(policy, questions[number], column, header=True)


@torch.no_grad()
def evaluate(run: AnswersRun) -> dict[str, float]:
    """The share of held-out pairs whose preferred piece has the higher score, with its 95 % interval."""
    config: VLMConfig = run.loop.config
    settings = cast(MusicPreference, config.trainer)
    questions = Questions(config, "eval")
    share, at_once = run.process.share(len(questions)), settings.rows_per_pass
    run.loop.phase("evaluating", len(share))
    mine_right = 0.0
    for start in range(0, len(share), at_once):  # none, where there are fewer pairs than processes
        part = share[start : start + at_once]
        part_recorded = recorded(run.policy, [questions[number] for number in part], 1)
        mine_right += right(loss(settings, run.policy, part_recorded)["margin"])
        run.loop.advance_or_leave(len(part))
    every = sum(gather_object([mine_right]))
    low, high = wilson(every, len(questions))
    return {"eval/accuracy_mean": every / len(questions), "eval/accuracy_low": low, "eval/accuracy_high": high}

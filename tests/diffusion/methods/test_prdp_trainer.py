"""PRDP from inside: its gradient computed a second time from the paper's formulas, its model calls, its runs."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from genrl.config import ConfigError, check_files
from genrl.data.preferences import as_tensor, open_set
from genrl.data.prompts import load as load_prompts
from genrl.data.rows import PREFERENCE_COLUMNS
from genrl.diffusion.config.schema import Config
from genrl.diffusion.forward.noising import GivenPictures
from genrl.diffusion.methods.dpo_offline.train import PAIR
from genrl.diffusion.methods.prdp.train import prdp_loss
from genrl.diffusion.rollout.rollout import MicroBatch, Rollouts
from tests.diffusion import runs
from tests.diffusion.methods.watched import DIFFUSION, TRIPLES, Bare, Given, after_collect, relative, run
from tests.reference.flow_grpo import flow_sde, log_density

FLOW = {"algorithm": "prdp", "kernel": "flow_sde", "noise_level": 0.7, "beta": 1e-3, "clip_range": 1e-3}
DDIM = {"algorithm": "prdp", "beta": 1e-3, "clip_range": 1e-3}
OF_NOISE = {**DIFFUSION, **TRIPLES}  # groups are cut by micro-batches: the table does not mind


def by_hand(config: Config, rollouts: Rollouts, weights: Given) -> tuple[Given, float]:
    """Gradient and loss by autograd through all samples and steps at once, from a model loaded afresh."""
    bare, rows = Bare(config, weights), dict[int, Tensor]()  # slot -> new, reference and old log-probabilities of steps

    def log_prob(one: MicroBatch, i: int) -> Tensor:
        recorded = one.pieces[0].trajectory
        x, sigmas = recorded.states[i], recorded.sigmas.tolist()
        v = bare.velocity(one.batch.prompts, x, torch.tensor(sigmas[i]))
        return log_density(recorded.next_states[i], *flow_sde(x, v, sigmas[i], sigmas[i + 1], sigmas[1], 0.7))

    for one in rollouts.mine.values():
        steps = []
        for i, old in one.pieces[0].trajectory.log_probs.items():
            with bare.untrained():
                reference = log_prob(one, i)
            steps.append(torch.stack([log_prob(one, i), reference, old]))
        rows |= zip(one.slots, torch.stack(steps, 1).unbind(-1), strict=True)
    table = torch.stack([rows[slot] for slot in range(rollouts.num_samples)]).view(-1, 3, 3, 2)  # prompts, samples
    loss = prdp_loss(*table.double().unbind(2), rollouts.total.view(-1, 3), beta=1e-3, clip=1e-3).loss
    return bare.gradient(loss), float(loss)


def test_gradient_and_loss_by_hand(folder: Path, model: Path) -> None:
    """Of the first gradient step, and of one where the policy is away from the reference and from the old policy."""
    trainer = {**FLOW, "inner_epochs": 2}
    config = runs.config(folder, model, trainer=trainer, sampling=TRIPLES, iterations=2, **runs.QUIET)
    seen = run(config)
    assert len(seen.updates) == 4
    actual = {n: by_hand(config, seen.rollouts[n // 2], seen.updates[n].weights) for n in (0, 2, 3)}
    for number, (expected, _) in actual.items():
        assert relative(seen.updates[number].gradient, expected) < 2e-3, number
        assert max(float(g.abs().max()) for g in expected.values()) > 0
    assert seen.rows[1]["loss"] == pytest.approx((actual[2][1] + actual[3][1]) / 2, rel=1e-3)
    assert seen.rows[1]["prdp/clip_frac"] > 0


def test_samples_without_a_score_are_in_no_pair(folder: Path, sd: Path) -> None:
    def silence(opened: Any) -> None:
        after_collect(opened, lambda result: result.total.__setitem__([0, 3, 4], math.nan))

    seen = run(runs.config(folder, sd, trainer=DDIM, sampling=OF_NOISE, iterations=1, **runs.QUIET), silence)
    assert seen.rows[0]["prdp/pairs"] == 1 and seen.rows[0]["grad_norm"] > 0


TINY = Path(__file__).parents[3] / "assets" / "tiny-t2i"
EMBEDDED = f"{TINY.parent / 'preferences'}:train"


def preference_set(folder: Path) -> Path:
    """Four pairs of the embedded set as files: pictures that the tiny autoencoder knows."""
    rows = []
    known = load_prompts(EMBEDDED)[:4]
    reader = open_set(EMBEDDED, known)
    for number, prompt in enumerate(known):
        row = {"prompt": prompt.text}
        for column, image in zip(("image_win", "image_lose"), reader(prompt), strict=True):
            name = f"{number}-{column}.png"
            image.save(folder / name)
            row[column] = name
        rows.append(json.dumps(row))
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


def config(folder: Path, source: Path, model: Path = TINY, **changes: Any) -> Config:
    trainer = {"algorithm": "dpo_offline", "beta": 100.0, "updates_per_iteration": 2}
    sampling = {"prompts_per_iteration": 2, "height": None, "width": None, "pipeline_args": {"max_sequence_length": 2}}
    common = {"prompts": {"train": str(source)}, "trainer": trainer, "sampling": sampling, "evaluation": {"every": 0}}
    return runs.config(folder, model, **common | changes)


def test_pairs_are_encoded_as_they_are_given(folder: Path) -> None:
    with runs.opened(config(folder, preference_set(folder))) as run, torch.no_grad():
        reader = open_set(run.config.prompts.train, run.prompts)
        pictures = GivenPictures(run, PREFERENCE_COLUMNS, PAIR)
        rolls = pictures.rollouts()
        assert (
            pictures.size == (64, 64) and rolls.total.tolist() == [1, 0, 1, 0] and rolls.group.tolist() == [0, 0, 1, 1]
        )
        assert sorted(slot for one in rolls.mine.values() for slot in one.slots) == [0, 1, 2, 3]
        for one in rolls.mine.values():
            decoded = run.policy.decode(one.batch, one.final)
            for slot, prompt, picture in zip(one.slots, one.batch.prompts, decoded, strict=True):
                (row,) = [row for row in run.prompts if row.text == prompt]
                given = [as_tensor(image, 64, 64) for image in reader(row)]
                wanted, other = given[slot % 2], given[1 - slot % 2]
                assert float((picture - wanted).abs().mean()) < min(0.05, float((wanted - other).abs().mean()))
    with pytest.raises(ConfigError, match="has prompts only"):
        check_files(config(folder, folder / "train.txt"), {})


def test_pictures_are_scaled_to_cover_and_cut_around_the_centre() -> None:
    """Those of a data set folder are in its files."""
    image = Image.new("RGB", (40, 20), "white")
    image.paste("black", (0, 0, 10, 20))  # the left quarter is cut off
    assert float(as_tensor(image, 10, 10).min()) > 0.9
    assert as_tensor(image, 10, 20).shape == (3, 10, 20)
    rows = load_prompts(EMBEDDED, pictures=False)
    reader = open_set(EMBEDDED, rows)
    assert len(rows) == 272 and rows[0].columns == {}
    assert all(image.size == (64, 64) for row in (rows[0], rows[-1]) for image in reader(row))

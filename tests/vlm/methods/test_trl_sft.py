"""One supervised update is that of TRL's SFTTrainer: tokens, loss and gradient on the embedded model and its pictures.

TRL renders, tokenises and batches the rows by its own collator and computes the loss by its own `compute_loss`, with
the number of tokens of the step as transformers' Trainer hands it over. Measured with TRL 1.16 in float32: losses agree
to 3e-7, gradients to 1e-6 of the largest.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from genrl.vlm.methods.sft.train import update
from genrl.vlm.policies.processor import load_processor
from genrl.vlm.rollout.data import tell
from genrl.vlm.tasks import Row
from tests.vlm import vlm_runs
from tests.vlm.by_hand import assert_same, watched

trl = pytest.importorskip("trl", reason="pip install 'genrl-diffusion[trl]'")

import datasets  # noqa: E402
import transformers  # noqa: E402

TARGET = "<answer> {answer} </answer>"


def trl_batch(rows: list[Row], place: Path) -> tuple[Any, dict[str, Tensor]]:
    """TRL's trainer, and its batch for these rows."""
    data = [
        {
            "prompt": [{"role": "user", "content": row.prompt.parts[1]}],
            "completion": [{"role": "assistant", "content": TARGET.format(**row.columns)}],
            "image": row.prompt.parts[0],
        }
        for row in rows
    ]
    quiet = {"bf16": False, "use_cpu": True, "report_to": []}
    arguments = trl.SFTConfig(output_dir=str(place), max_length=None, loss_type="nll", **quiet)
    made = trl.SFTTrainer(
        model=transformers.AutoModelForImageTextToText.from_pretrained(vlm_runs.MODEL, dtype=torch.float32),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(data),
        processing_class=load_processor(str(vlm_runs.MODEL), "llava"),
    )
    made.model.eval()
    return made, dict(made.data_collator([dict(row) for row in data]))


def test_loss_and_gradient_of_an_update_are_trls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = {"algorithm": "sft", "target": TARGET, "batch_size": 6, "micro_batch": 4}
    config = vlm_runs.config(tmp_path, trainer=trainer)
    with vlm_runs.opened(config) as run:
        run.enter()
        policy = run.policy
        policy.forbidden = policy.forbidden[:0]  # TRL leaves the ids of images in its normalisation
        rows = [run.questions[number] for number in range(6)]
        told = tell(policy, rows, TARGET)
        seen = watched(run, monkeypatch)
        figures = update(run, run.settings, list(range(6)))
    theirs, batch = trl_batch(rows, tmp_path / "trl")
    for number, row in enumerate(batch["labels"]):
        assert row[row != -100].tolist() == told.tokens[number][told.mask[number]].tolist()
    loss = theirs.compute_loss(theirs.model, batch, num_items_in_batch=(batch["labels"] != -100).sum())
    loss.backward()
    assert figures["loss"] == pytest.approx(float(loss.detach()), abs=2e-6)
    parameters = dict(theirs.model.named_parameters())
    assert_same({name: parameters[name].grad for name in seen[0]}, seen[0], apart=1e-5)

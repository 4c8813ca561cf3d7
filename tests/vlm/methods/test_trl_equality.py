"""One update is TRL's: loss and gradient on the embedded model, by TRL's own tokens, pictures, rewards, advantages.

Only drawing is left out of TRL: its trainer is handed the answers that genrl drew. Weights are moved after the old
log-probabilities were taken, so that ratios, clips and the KL to the model before are not those of the first step.
Measured with TRL 1.16, in float32: losses agree to 4e-7, gradients to 1e-6 of the largest. A supervised update is that
of its SFTTrainer, with its tokens, collator, loss, and number of tokens of the step.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from genrl.vlm.methods.answers.train import learn
from genrl.vlm.methods.sft.train import update
from genrl.vlm.policies.processor import load_processor
from genrl.vlm.rollout.data import tell
from genrl.vlm.rollout.rollout import Answers
from genrl.vlm.run import AnswersRun
from genrl.vlm.tasks import Row
from genrl_rewards.scorers.texts import verifiable
from tests.run_folders import tiered
from tests.vlm import vlm_runs
from tests.vlm.by_hand import assert_same, watched

trl = pytest.importorskip("trl", reason="pip install 'genrl-diffusion[trl]'")

import datasets  # noqa: E402
import transformers  # noqa: E402

MOVED = 0.15
"""Standard deviation of the noise on the weights, relative to each tensor's own."""

CLIPPED = ("grpo", "corrected kl", "dr_grpo", "dapo", "bnpo", "gspo", "luspo", "two-sided clip")
CORRECTED = {"name": "kl", "corrected": True}
OF_SEQUENCES = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # what genrl is told, what TRL is told
    "grpo": ({"preset": "grpo"}, {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False}),
    "corrected kl": ({"preset": "grpo", "regularisers": [CORRECTED]}, {"loss_type": "grpo", "beta": 0.04}),
    "dr_grpo": ({"preset": "dr_grpo"}, {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "dapo": ({"preset": "dapo"}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "bnpo": ({"preset": "bnpo"}, {"loss_type": "bnpo"}),
    "gspo": ({"preset": "gspo"}, {"loss_type": "grpo", **OF_SEQUENCES}),
    "luspo": ({"preset": "luspo"}, {"loss_type": "luspo", **OF_SEQUENCES}),
    "cispo": ({"preset": "cispo"}, {"loss_type": "cispo", "epsilon_high": 5.0}),
    "sapo": ({"preset": "sapo"}, {"loss_type": "sapo"}),
    "vespo": ({"preset": "vespo"}, {"loss_type": "vespo"}),
    "two-sided clip": (
        {"preset": "grpo", "surrogate": {"cap": 1.4}, "regularisers": []},
        {"loss_type": "grpo", "delta": 1.4},
    ),
}


def exact(completions: list[Any], answer: list[str], **_: Any) -> list[float | None]:
    return verifiable.exact([chat[0]["content"] for chat in completions], answer)


def tag_format(completions: list[Any], **_: Any) -> list[float | None]:
    return verifiable.tag_format([chat[0]["content"] for chat in completions])


def embedded() -> dict[str, Any]:
    """The embedded model, as TRL takes one."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(vlm_runs.MODEL, dtype=torch.float32)
    return {"model": model, "processing_class": load_processor(str(vlm_runs.MODEL), "llava")}


def trl_trainer(answers: Answers, settings: dict[str, Any], place: Path) -> tuple[Any, dict[str, Tensor]]:
    """TRL's trainer, and its batch for these answers, drawn by the weights on disk."""
    rows = [row for row in answers.rows for _ in range(answers.size)]
    data = []
    for row in rows:
        picture, text = row.prompt.parts
        asked = [{"role": "user", "content": text}]
        data.append({"prompt": asked, "image": picture, "answer": row.columns["answer"]})
    arguments = trl.GRPOConfig(
        output_dir=str(place),
        per_device_train_batch_size=len(rows),
        num_generations=answers.size,
        max_completion_length=12,
        num_iterations=2,  # so that it computes the old log-probabilities
        reward_weights=[1.0, 0.2],
        temperature=1.0,
        bf16=False,
        use_cpu=True,
        report_to=[],
        **{"beta": 0.0, **settings},
    )
    made = trl.GRPOTrainer(
        reward_funcs=[exact, tag_format],
        args=arguments,
        train_dataset=datasets.Dataset.from_list([{key: row[key] for key in ("prompt", "answer")} for row in data]),
        **embedded(),
    )
    written = [ids[kept].tolist() for ids, kept in zip(answers.tokens, answers.mask, strict=True)]
    made._generate_single_turn = lambda *_, **__: (written, None)
    made.current_gradient_accumulation_steps = 1
    made.model.train()
    return made, made._generate_and_score_completions(data)


def move(parameters: dict[str, Tensor]) -> None:
    """The same noise on the weights of either model."""
    for name, parameter in sorted(parameters.items()):
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
        parameter.data.add_(MOVED * parameter.data.std().nan_to_num() * noise)


def genrl_update(
    run: AnswersRun, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> tuple[Any, dict[str, float], dict[str, Tensor]]:
    """What was estimated, and figures and gradient of the update after `move`."""
    ready = run.estimate(answers)
    move(run.loop.weights.named)
    seen = watched(run, monkeypatch)
    monkeypatch.setattr(run.loop.optimization, "updates", 1)  # not the first: the ratio need not be 1
    figures = learn(run, answers, ready)
    return ready, figures, seen[0]


@pytest.mark.parametrize("name", tiered(LOSSES, ("corrected kl",)))
def test_loss_and_gradient_of_an_update_are_trls(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, asked = LOSSES[name]
    with vlm_runs.opened(vlm_runs.config(tmp_path, trainer=ours)) as run:
        for policy in (run.policy, run.reference):
            if policy is not None:  # TRL leaves the ids of images in its normalisation
                policy.forbidden = policy.forbidden[:0]
        answers, _ = run.draw()
        ready, figures, gradient = genrl_update(run, answers, monkeypatch)
    assert figures["ratio/max"] > 1.05 and (figures["ratio/clipped"] > 0 or name not in CLIPPED)
    theirs, batch = trl_trainer(answers, asked, tmp_path / "trl")
    kept, old = answers.mask, ready.batch.old_log_prob
    assert torch.equal(batch["completion_mask"].bool(), kept)
    assert torch.equal(batch["completion_ids"][kept], answers.tokens[kept])
    torch.testing.assert_close(batch["advantages"].double(), ready.batch.advantage, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(batch["old_per_token_logps"][kept], old[kept], rtol=0, atol=1e-5)
    parameters = dict(theirs.model.named_parameters())
    move(parameters)
    loss = theirs.compute_loss(theirs.model, batch)
    loss.backward()
    assert figures["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    assert_same({name: parameters[name].grad for name in gradient}, gradient, apart=1e-5)


# -- A supervised update
TARGET = "<answer> {answer} </answer>"


def sft_batch(rows: list[Row], place: Path) -> tuple[Any, dict[str, Tensor]]:
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
    made = trl.SFTTrainer(args=arguments, train_dataset=datasets.Dataset.from_list(data), **embedded())
    made.model.eval()
    return made, dict(made.data_collator([dict(row) for row in data]))


def test_a_supervised_update_is_trls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = {"algorithm": "sft", "target": TARGET, "batch_size": 6, "micro_batch": 4}
    config = vlm_runs.config(tmp_path, trainer=trainer)
    with vlm_runs.opened(config) as run:
        run.enter()
        policy = run.policy
        policy.forbidden = policy.forbidden[:0]  # TRL leaves the ids of images in its normalisation
        rows = [run.questions[number] for number in range(6)]
        lessons = tell(policy, rows, TARGET)
        seen = watched(run, monkeypatch)
        figures = update(run, run.settings, list(range(6)))
    theirs, batch = sft_batch(rows, tmp_path / "trl")
    for number, row in enumerate(batch["labels"]):
        assert row[row != -100].tolist() == lessons.tokens[number][lessons.mask[number]].tolist()
    loss = theirs.compute_loss(theirs.model, batch, num_items_in_batch=(batch["labels"] != -100).sum())
    loss.backward()
    assert figures["loss"] == pytest.approx(float(loss.detach()), abs=2e-6)
    parameters = dict(theirs.model.named_parameters())
    assert_same({name: parameters[name].grad for name in seen[0]}, seen[0], apart=1e-5)

"""PromptRL: a language model and a flow model in one loop."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import genrl
from genrl.config import ConfigError, check_files, load_located
from genrl.config import load as load_config
from genrl.diffusion.config.sections import Model
from genrl.diffusion.config.sections import Rewriter as Rewritten
from genrl.diffusion.methods.prompt_rl import train as prompt_rl
from genrl.diffusion.methods.prompt_rl.settings import PromptRL
from genrl.diffusion.methods.prompt_rl.train import compared, learn_to_write, rewriter_loss
from genrl.diffusion.policy.rewriter import Rewriter, TextRoom, load_rewriter
from genrl.diffusion.rollout.rollout import Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.sample import load, sample
from genrl.diffusion.train import train
from genrl.mdp.noise import prompt_indices
from tests.diffusion import runs
from tests.diffusion.methods.watched import watch
from tests.diffusion.policy.test_rewriter import TINY, anything, moved

REWRITER = {"path": str(TINY), "instruction": "{prompt}", "max_new_tokens": 16}
TRAINER: dict[str, Any] = {"algorithm": "prompt_rl", "retained": 1, "rewriter": REWRITER, "clip_range": 1e-2}
GROUPS = {"sampling": {"group_size": 4, "prompts_per_iteration": 2, "batch_size": 4}}


def trainer(**changes: Any) -> dict[str, Any]:
    rewriter = {**REWRITER, **changes.pop("rewriter", {})}
    return {**TRAINER, **changes, "rewriter": rewriter}


def test_refinements_first_then_the_prompt_as_it_is(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn in each slot, and that scores are by the prompts as they were."""
    sampled: dict[int, str] = {}
    estimate = prompt_rl.estimate

    def watched(run: DiffusionRun, settings: PromptRL, rollouts: Rollouts, *rest: Any) -> Any:
        for one in rollouts.mine.values():
            sampled.update(zip(one.slots, one.batch.prompts, strict=True))
        assert rollouts.prompts == [runs.PROMPTS[k] for k in order for _ in range(4)]
        extra = (rollouts.total - run.rollouts.total).view(2, 4)  # type: ignore[union-attr]
        assert torch.allclose(extra[:, 3], extra[:, :3].mean(1))
        assert set(extra[:, :3].flatten().round(decimals=9).tolist()) <= {0.0, 1.0}
        return estimate(run, settings, rollouts, *rest)

    monkeypatch.setattr(prompt_rl, "estimate", watched)
    config = runs.config(folder, model, trainer=trainer(), iterations=1, evaluation={"every": 0}, **GROUPS)
    order = prompt_indices(4, 2, seed=0, iteration=0)
    train(config)
    rewriter = Rewriter(config.trainer.rewriter, seed=config.seed)  # type: ignore[union-attr]
    for p, row in enumerate(order):
        texts = rewriter.write(runs.PROMPTS[row], 3, (0, "rewrite", 0, p), anything).texts
        assert [sampled[4 * p + k] for k in range(4)] == [*texts, runs.PROMPTS[row]]


def test_one_update_is_the_gradient_of_the_plain_formula(folder: Path, model: Path) -> None:
    """- A log p + beta k3, mean over tokens, then over the answers of all prompts; on policy the ratio is 1."""
    config = runs.config(folder, model, trainer=trainer(), **GROUPS)
    rewriter = moved(Rewriter(config.trainer.rewriter))  # type: ignore[union-attr]
    advantages = torch.tensor([[1.0, -0.5, 2.0, 9.0], [-1.0, 0.5, 0.0, 9.0]], dtype=torch.float64)
    mine = {p: rewriter.write(("a jade disc", "two plum boxes")[p], 3, ("key", p), anything) for p in range(2)}
    wanted: dict[str, Tensor] = {}
    with runs.opened(config) as run:

        def taken(optimizer: torch.optim.Optimizer) -> float:
            wanted.update({name: p.grad for name, p in rewriter.model.named_parameters() if p.grad is not None})
            return 0.0

        run.loop.optimization.step_other = taken  # type: ignore[method-assign]
        metrics = learn_to_write(run, config.trainer, rewriter, mine, advantages, check=True)  # type: ignore[arg-type]
    assert metrics["rewriter/ratio/max_abs_dev"] < 1e-4
    rewriter.optimizer.zero_grad()
    loss = torch.zeros(())
    for p, written in mine.items():
        for k in range(3):
            tokens = written.tokens[k][written.mask[k]]
            asked = written.asked["input_ids"][0]
            whole = torch.cat([asked, tokens])[None]
            log_p = rewriter.model(whole).logits[0, len(asked) - 1 : -1].log_softmax(-1)
            with torch.no_grad(), rewriter.model.disable_adapter():
                start = rewriter.model(whole).logits[0, len(asked) - 1 : -1].log_softmax(-1)
            new, ref = (table.gather(1, tokens[:, None]).T for table in (log_p, start))
            loss = loss + rewriter_loss(new, ref, advantages[p, k : k + 1], torch.ones(new.shape)).sum() / 6
    loss.backward()
    actual = {name: p.grad for name, p in rewriter.model.named_parameters() if p.grad is not None}
    assert wanted.keys() == actual.keys() != set()
    for name, gradient in actual.items():
        assert torch.allclose(wanted[name], gradient, atol=2e-6), name


def written_by(path: str, out: str) -> None:
    """Child: train, and keep what is drawn in which slot."""
    config = load_config(Path(path))
    with runs.opened(config) as run:
        seen = watch(run)
        prompt_rl.train(run, config.trainer)  # type: ignore[arg-type]
        sampled = []
        for rollouts in seen.rollouts:
            pairs = (pair for one in rollouts.mine.values() for pair in zip(one.slots, one.batch.prompts, strict=True))
            sampled.append({"texts": dict(pairs), "total": rollouts.total.tolist()})
        adapter = run.loop.kept.things["rewriter"].state_dict()["adapter"]
        sums = {key: float(t.double().sum()) for key, t in adapter.items()}
        rank = run.accelerator.process_index
        Path(f"{out}-{rank}.json").write_text(json.dumps({"drawn": sampled, "adapter": sums}))


@pytest.mark.slow
def test_two_processes_write_and_learn_as_one(folder: Path, model: Path) -> None:
    changes: dict[str, Any] = {"trainer": trainer(), "iterations": 2, "evaluation": {"every": 2}, **GROUPS}
    for count in (1, 2):
        runs.finish(runs.written(folder, model, str(count), **changes), count, written_by, str(folder / f"of-{count}"))
    names = ("of-1-0", "of-2-0", "of-2-1")
    one, first, second = (json.loads((folder / f"{name}.json").read_text()) for name in names)
    for alone, left, right in zip(one["drawn"], first["drawn"], second["drawn"], strict=True):
        assert alone["texts"] == left["texts"] | right["texts"]
        assert left["texts"].keys().isdisjoint(right["texts"])
        assert alone["total"] == pytest.approx(left["total"], abs=1e-5) and left["total"] == right["total"]
    assert first["adapter"] == second["adapter"]
    assert one["adapter"] == pytest.approx(first["adapter"], abs=1e-3)


def test_pictures_are_drawn_of_rewritten_prompts(model: Path, tmp_path: Path) -> None:
    """`genrl sample --rewriter`: both texts are on record, and the picture is a plain call with the new one."""
    moved(Rewriter(Rewritten(**REWRITER))).save_pretrained(tmp_path / "rewriter")
    rewriter = load_rewriter(tmp_path / "rewriter")
    arguments = {"num_inference_steps": 2, "height": 16, "width": 16, "max_sequence_length": 4}
    prompts = ["a jade disc", "two plum boxes", "a gold cone"]
    pipe = load(Model(path=str(model)), None)
    paths = sample(pipe, prompts, tmp_path / "out", seed=7, arguments=arguments, rewriter=rewriter)
    record = json.loads((tmp_path / "out" / "prompts.json").read_text())
    assert [row["prompt"] for row in record] == prompts
    fits = TextRoom(pipe, arguments)
    sampled = [rewriter.rewrite(prompt, (7 + k,), fits) for k, prompt in enumerate(prompts)]
    assert [row["drawn"] for row in record] == sampled != prompts
    unwritten = genrl.sample(model, prompts, seed=7, arguments=arguments, rewriter=tmp_path / "rewriter")
    for k, path in enumerate(paths):
        wanted = pipe(prompt=sampled[k], generator=torch.Generator().manual_seed(7 + k), **arguments).images[0]
        assert np.array_equal(Image.open(path), wanted) and np.array_equal(unwritten[k], wanted)


def test_what_is_compared_and_texts_are_measured_by_the_longest_encoder(folder: Path, model: Path) -> None:
    generation = torch.tensor([[1.0, 0.5, 0.0], [0.5, float("nan"), 0.25]], dtype=torch.float64)
    formats = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    result = compared(generation, formats, [["a", "a"], ["a", "b"]])
    assert result == {"rewriter/format": 0.75, "rewriter/distinct": 0.75, "rewriter/gain": 0.5}
    assert "rewriter/gain" not in compared(generation[:, :2], formats, [["a", "a"], ["a", "b"]])
    with runs.opened(runs.config(folder, model)) as run:
        pipe = run.policy.pipe
        short = TextRoom(pipe, {"max_sequence_length": 4})
        clip = max(pipe.tokenizer.model_max_length, pipe.tokenizer_2.model_max_length)
        assert short.limit == clip and short.name == "tokenizer"
        assert short("a red star") and not short("a red star " * clip)
        pipe.tokenizer_3.model_max_length = 512
        long = TextRoom(pipe, {"max_sequence_length": clip + 10})
        assert (long.name, long.limit) == ("tokenizer_3", clip + 10)
        assert TextRoom(pipe, {}).limit == 256  # the default of the pipeline's call


def test_a_prompt_that_would_be_cut_is_refused(folder: Path, model: Path) -> None:
    """Or that leaves the rewriter no room: before the first iteration, whenever it would have had its turn."""
    for times, message, rewriter in (
        (80, r"train.txt:2: \d+ tokens, but tokenizer of .* takes 77", {}),
        (8, r"max_new_tokens: \d+ tokens .* more than the 256 positions", {"max_new_tokens": 240}),
    ):
        (folder / "train.txt").write_text("a red star\n" + "a red star " * times)
        output = folder / f"run-{times}"
        with pytest.raises(ValueError, match=message):
            train(runs.config(folder, model, trainer=trainer(rewriter=rewriter), output=str(output), **GROUPS))
        assert runs.rows(output) == []


def test_a_wrong_language_model_is_refused_before_work(folder: Path, model: Path, tmp_path: Path) -> None:
    def problems(**rewriter: Any) -> str:
        runs.config(folder, model, trainer=trainer(rewriter=rewriter), **GROUPS)
        config, origins = load_located(folder / "tiny.yaml")
        with pytest.raises(ConfigError) as error:
            check_files(config, origins)
        return str(error.value)

    assert "trainer.rewriter.path: no such folder" in problems(path=str(TINY.with_name("tiny-ml")))
    assert "no config.json with a model_type" in problems(path=str(tmp_path))
    assert "leave no place for the prompt in 256 positions" in problems(max_new_tokens=300)
    (tmp_path / "tokenizer_config.json").write_text((TINY / "tokenizer_config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    assert "is a BertModel; a rewriter is a causal language model" in problems(path=str(tmp_path))

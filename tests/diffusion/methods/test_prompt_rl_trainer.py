"""PromptRL: a language model and a flow model in one loop."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from genrl.config import ConfigError, check_files, load_located
from genrl.config import load as load_config
from genrl.diffusion.config.sections import Model
from genrl.diffusion.config.sections import Rewriter as Rewritten
from genrl.diffusion.methods.prompt_rl import train as prompt_rl
from genrl.diffusion.methods.prompt_rl.settings import PromptRL
from genrl.diffusion.methods.prompt_rl.train import compared, learn_to_write
from genrl.diffusion.policy.rewriter import Rewriter, TextRoom, load_rewriter
from genrl.diffusion.rollout.rollout import Rollouts
from genrl.diffusion.run import DiffusionRun
from genrl.diffusion.sample import load, sample
from genrl.diffusion.steps.plans import Edges, Steps
from genrl.diffusion.train import train
from genrl.mdp.batches import prompt_indices
from genrl.runtime.folder.run import Run, read_metrics
from genrl.runtime.loop.updating import Meter
from tests.diffusion import runs
from tests.diffusion.methods.watched import resumed, watch
from tests.diffusion.policy.test_rewriter import TINY, anything, moved

REWRITER = {"path": str(TINY), "instruction": "{prompt}", "max_new_tokens": 16}
TRAINER: dict[str, Any] = {"algorithm": "prompt_rl", "retained": 1, "rewriter": REWRITER, "clip_range": 1e-2}
GROUPS = {"sampling": {"group_size": 4, "prompts_per_iteration": 2, "batch_size": 4}}


def trainer(**changes: Any) -> dict[str, Any]:
    rewriter = {**REWRITER, **changes.pop("rewriter", {})}
    return {**TRAINER, **changes, "rewriter": rewriter}


def test_refinements_first_then_the_prompt_as_it_is(folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is drawn in each slot, and that scores are by the prompts as they were."""
    drawn: dict[int, str] = {}
    estimate = prompt_rl.estimate

    def watched(
        run: DiffusionRun, settings: PromptRL, rollouts: Rollouts, steps: Steps, advantages: Tensor, meter: Meter
    ) -> Edges:
        for one in rollouts.mine.values():
            drawn.update(zip(one.slots, one.batch.prompts, strict=True))
        assert rollouts.prompts == [runs.PROMPTS[k] for k in order for _ in range(4)]
        generation, total = run.rollouts.total, rollouts.total  # type: ignore[union-attr]
        extra = (total - generation).view(2, 4)
        assert torch.allclose(extra[:, 3], extra[:, :3].mean(1))
        assert set(extra[:, :3].flatten().round(decimals=9).tolist()) <= {0.0, 1.0}
        return estimate(run, settings, rollouts, steps, advantages, meter)

    monkeypatch.setattr(prompt_rl, "estimate", watched)
    config = runs.config(folder, model, trainer=trainer(), iterations=1, evaluation={"every": 0}, **GROUPS)
    order = prompt_indices(4, 2, seed=0, iteration=0)
    train(config)
    rewriter = Rewriter(config.trainer.rewriter, seed=config.seed)  # type: ignore[union-attr]
    for p, row in enumerate(order):
        texts = rewriter.write(runs.PROMPTS[row], 3, (0, "rewrite", 0, p), anything).texts
        assert [drawn[4 * p + k] for k in range(4)] == [*texts, runs.PROMPTS[row]]


def test_one_update_is_the_gradient_of_the_plain_formula(folder: Path, model: Path) -> None:
    """- A log p + beta k3, mean over tokens, then over the answers of all prompts; on policy the ratio is 1."""
    config = runs.config(folder, model, trainer=trainer(), **GROUPS)
    rewriter = moved(Rewriter(config.trainer.rewriter))  # type: ignore[union-attr]
    advantages = torch.tensor([[1.0, -0.5, 2.0, 9.0], [-1.0, 0.5, 0.0, 9.0]], dtype=torch.float64)
    mine = {
        p: rewriter.write(text, 3, ("key", p), anything) for p, text in enumerate(["a jade disc", "two plum boxes"])
    }
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
            new, ref = (table.gather(1, tokens[:, None])[:, 0] for table in (log_p, start))
            k3 = (ref - new).exp() - (ref - new) - 1
            loss = loss + (0.01 * k3 - float(advantages[p, k]) * new).mean() / 6
    loss.backward()
    found = {name: p.grad for name, p in rewriter.model.named_parameters() if p.grad is not None}
    assert wanted.keys() == found.keys() != set()
    for name, gradient in found.items():
        assert torch.allclose(wanted[name], gradient, atol=2e-6), name


@pytest.mark.slow
def test_a_run_that_goes_on_writes_the_same(folder: Path, model: Path) -> None:
    """Without retained prompts; weights, adapter and optimiser of the language model, metrics: to the bit."""
    config = runs.config(folder, model, trainer=trainer(retained=0), evaluation={"every": 1}, **GROUPS)
    straight = resumed(config, folder)
    kept = runs.last_state(straight).tensors["kept-rewriter"]
    assert any(key.startswith("adapter/") for key in kept) and any("exp_avg" in key for key in kept)
    one, other = (load_rewriter(run / "rewriter") for run in (straight, folder / "again"))
    assert one.rewrite("a jade disc", (3,)) == other.rewrite("a jade disc", (3,))
    adapter = one.state_dict()["adapter"]
    assert all(torch.equal(adapter[key], kept[f"adapter/{key}"]) for key in adapter)
    start = Rewriter(one.settings, seed=config.seed).state_dict()["adapter"]
    assert any(not torch.equal(start[key], adapter[key]) for key in adapter)
    rows = read_metrics(Run(straight).metrics)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all("eval_rewritten/total_mean" in row and "eval/total_mean" in row for row in rows)
    assert rows[1]["rewriter/kl"] == 0.0 < rows[2]["rewriter/kl"] and "rewriter/gain" not in rows[1]
    assert max(row["rewriter/ratio/max_abs_dev"] for row in rows[1:]) < 1e-4
    assert len(list((straight / "samples" / "rewritten").glob("step-*.png"))) == 3


def written_by(path: str, out: str) -> None:
    """Child: train, and keep what is drawn in which slot."""
    config = load_config(Path(path))
    with runs.opened(config) as run:
        seen = watch(run)
        prompt_rl.train(run, config.trainer)  # type: ignore[arg-type]
        drawn = [
            {
                "texts": {
                    s: t for one in rollouts.mine.values() for s, t in zip(one.slots, one.batch.prompts, strict=True)
                },
                "total": rollouts.total.tolist(),
            }
            for rollouts in seen.rollouts
        ]
        adapter = run.loop.kept.things["rewriter"].state_dict()["adapter"]
        sums = {key: float(t.double().sum()) for key, t in adapter.items()}
        rank = run.accelerator.process_index
        Path(f"{out}-{rank}.json").write_text(json.dumps({"drawn": drawn, "adapter": sums}))


@pytest.mark.slow
def test_two_processes_write_and_learn_as_one(folder: Path, model: Path) -> None:
    changes: dict[str, Any] = {"trainer": trainer(), "iterations": 2, "evaluation": {"every": 2}, **GROUPS}
    runs.config(folder, model, **changes)
    path = str(folder / "tiny.yaml")
    assert runs.wait([runs.start(written_by, path, str(folder / "one"), log=folder / "one.log")]) == [0]
    pair = runs.start_ranks(2, written_by, path, str(folder / "two"), log=folder / "two.log")
    assert runs.wait(pair) == [0, 0], (folder / "two-rank-0.log").read_text()[-2000:]
    one, first, second = (json.loads((folder / f"{name}.json").read_text()) for name in ("one-0", "two-0", "two-1"))
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
    drawn = [rewriter.rewrite(prompt, (7 + k,), fits) for k, prompt in enumerate(prompts)]
    assert [row["drawn"] for row in record] == drawn != prompts
    for k, path in enumerate(paths):
        wanted = pipe(prompt=drawn[k], generator=torch.Generator().manual_seed(7 + k), **arguments).images[0]
        assert np.array_equal(np.asarray(Image.open(path)), np.asarray(wanted))


def test_what_is_compared() -> None:
    generation = torch.tensor([[1.0, 0.5, 0.0], [0.5, float("nan"), 0.25]], dtype=torch.float64)
    formats = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    found = compared(generation, formats, [["a", "a"], ["a", "b"]])
    assert found == {"rewriter/format": 0.75, "rewriter/distinct": 0.75, "rewriter/gain": 0.5}
    assert "rewriter/gain" not in compared(generation[:, :2], formats, [["a", "a"], ["a", "b"]])


def test_texts_are_measured_by_the_longest_encoder(folder: Path, model: Path) -> None:
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
    for times, told, rewriter in (
        (80, r"train.txt:2: \d+ tokens, but tokenizer of .* takes 77", {}),
        (8, r"max_new_tokens: \d+ tokens .* more than the 256 positions", {"max_new_tokens": 240}),
    ):
        (folder / "train.txt").write_text("a red star\n" + "a red star " * times)
        output = folder / f"run-{times}"
        with pytest.raises(ValueError, match=told):
            train(runs.config(folder, model, trainer=trainer(rewriter=rewriter), output=str(output), **GROUPS))
        assert runs.rows(output) == []


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"retained": 4}, "use 3 or less"),
    ({"tree": {"ways": 2}, "window": {"size": 1}}, "trainer.tree: unknown key"),
    ({"advantage_scale": "prompt_history"}, "one of group, global, none"),
    ({"aggregate": "gdpo"}, "trainer.aggregate: unknown key"),
    ({"rewriter": {"instruction": "Rewrite it."}}, "holds {prompt} 0 times"),
    ({"rewriter": {"dtype": "float16"}}, "not scaled, and small gradients vanish in float16; use bfloat16"),
]


@pytest.mark.parametrize(("changes", "text"), REFUSED, ids=[text for _, text in REFUSED])
def test_impossible_settings_are_refused(folder: Path, model: Path, changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as error:
        runs.config(folder, model, trainer=trainer(**changes), **GROUPS)
    assert text in str(error.value)


def test_a_wrong_language_model_is_refused_before_work(folder: Path, model: Path, tmp_path: Path) -> None:
    def problems(**rewriter: Any) -> str:
        runs.config(folder, model, trainer=trainer(rewriter=rewriter), **GROUPS)
        config, origins = load_located(folder / "tiny.yaml")
        with pytest.raises(ConfigError) as error:
            check_files(config, origins)
        return str(error.value)

    near = problems(path=str(TINY.with_name("tiny-ml")))
    assert "tiny.yaml" in near and "trainer.rewriter.path: no such folder" in near
    assert f"did you mean {TINY}?" in near
    assert "no config.json with a model_type" in problems(path=str(tmp_path))
    assert "leave no place for the prompt in 256 positions" in problems(max_new_tokens=300)
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((TINY / name).read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": None}))
    assert "has no eos_token" in problems(path=str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    assert "is a BertModel; a rewriter is a causal language model" in problems(path=str(tmp_path))

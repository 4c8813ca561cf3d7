"""Talk2Move: drawn steps, costs, the exit step, the gradient by hand; its recipes on a tiny Qwen-Image-Edit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from genrl.config import load
from genrl.diffusion.config.estimate import plan, read_components
from genrl.diffusion.config.schema import Config
from genrl.diffusion.methods.talk2move import settings as talk2move_settings
from genrl.diffusion.methods.talk2move import train as talk2move
from genrl.diffusion.methods.talk2move.train import exit_step, take_shortcut
from genrl.diffusion.policy import decoding
from genrl.diffusion.policy.trajectory import Batch
from genrl.diffusion.rollout.rollout import batch_inputs, call_arguments
from genrl.diffusion.steps.plans import Steps, choose_kernel
from genrl.diffusion.train import train
from tests.diffusion import runs
from tests.diffusion.families import FAMILIES
from tests.diffusion.methods.watched import QUIET, resumed, run
from tests.diffusion.policy.test_starting import editing
from tests.rewards import tiny_orient

MOVE: dict[str, Any] = {"algorithm": "talk2move"}
STEPS = 5


def config(folder: Path, kontext: Path, **changes: Any) -> Config:
    sampling = {"num_inference_steps": STEPS, "guidance_scale": 1.0, "same_initial_noise": True}
    return editing(folder, kontext, sampling=sampling, **changes)


@pytest.mark.parametrize("exit_at", [1, 4])
def test_a_picture_costs_the_drawn_steps_and_the_shortcut(folder: Path, kontext: Path, exit_at: int) -> None:
    """And training the drawn steps; on policy every ratio is exactly 1. At step 4 of 5 one step is left."""
    chosen = config(folder, kontext, trainer={**MOVE, "exit_step": exit_at}, iterations=1, **QUIET)
    predicted = plan(chosen)
    (row,) = runs.rows(train(chosen))
    assert (row["model_calls/sample"], row["model_calls/train"]) == (predicted.sample_calls, predicted.train_calls)
    assert row["model_calls/sample"] == 4 * (exit_at + min(2, STEPS - exit_at))
    assert row["model_calls/train"] == 4 * exit_at and row["window/size"] == exit_at
    assert row["ratio/max_abs_dev"] == 0.0 and row["grad_norm"] > 0 and "exit/variance" not in row


def test_the_end_is_the_ode_on_even_levels_down_to_no_noise(folder: Path, kontext: Path) -> None:
    """The shortcut by hand; and the recorded steps are those before the exit, no others."""
    seen = run(config(folder, kontext, trainer={**MOVE, "exit_step": 2, "shortcut": 3}, iterations=1, **QUIET))
    with runs.opened(config(folder, kontext, trainer=MOVE, iterations=1, output=str(folder / "b"), **QUIET)) as fresh:
        for one in seen.rollouts[0].mine.values():
            (piece,) = one.pieces
            assert sorted(piece.trajectory.log_probs) == [0, 1] and piece.trajectory.stop == 2
            state, level = piece.trajectory.next_states[1], float(one.sigmas[2])
            for k in range(3):
                sigma, following = level * (1 - k / 3), level * (1 - (k + 1) / 3)
                with torch.no_grad():
                    velocity = fresh.policy.velocity(one.batch, state, torch.tensor(sigma))
                state = state - (sigma - following) * velocity
            assert torch.allclose(one.final, state, atol=1e-5)


def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 instructions and 3 edits of each are tried."""
    for module in (talk2move, talk2move_settings):
        monkeypatch.setattr(module, "TRIED_PROMPTS", 2)
        monkeypatch.setattr(module, "TRIED_SAMPLES", 3)


def test_the_exit_step_is_where_rewards_of_separate_chains_differ_most(
    folder: Path, kontext: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains that are rolled out anew for every exit step give the very rewards of the one that is left at each."""
    few(monkeypatch)
    with runs.opened(config(folder, kontext, trainer=MOVE, **QUIET)) as opened:
        trainer, policy = opened.config.trainer, opened.policy
        kernel = choose_kernel(opened, trainer, Steps.of(opened.config, trainer, 0).plan)  # type: ignore[arg-type]
        table = talk2move.evaluate_steps(opened, trainer, kernel, 0)  # type: ignore[arg-type]
        assert table.shape == (2, STEPS, 3) and bool(table[:, 0].isnan().all()) and not bool(table[:, 1:].isnan().any())
        rows = [opened.prompts[r] for r in talk2move.prompt_indices(3, 2, seed=0, iteration=0)]
        for p, row in enumerate(rows):
            for k in range(1, STEPS):
                for slots in ([0, 1], [2]) if p == 0 else ([0], [1, 2]):  # micro-batches of 2 over 6 samples
                    keys = [(0, 0, "exit", 3 * p + s) for s in slots], [(0, 0, "exit", "group", p)] * len(slots)
                    pictures = batch_inputs({"image": "source_image"}, [row] * len(slots))
                    call = call_arguments(opened.config.sampling)
                    batch = Batch([row.text] * len(slots), keys[0], call, keys[1], pictures)
                    with torch.no_grad():
                        chain = policy.roll_out(batch, kernel, range(k), stop=k)
                        final = take_shortcut(policy, batch, chain.final, chain.sigmas, k, 2)
                        bright = policy.decode(batch, final).mean(dim=(1, 2, 3)).double()
                    assert torch.allclose(table[p, k, slots], bright, atol=1e-5), (p, k)
        chosen, _ = talk2move.choose_exit(opened, trainer, kernel, 0)  # type: ignore[arg-type]
        assert chosen == exit_step(table) == opened.loop.memory["exit"]["step"] and 1 <= chosen < STEPS


@pytest.mark.slow
def test_finding_the_exit_step_is_paid_when_it_is_found(folder: Path, kontext: Path, monkeypatch: Any) -> None:
    """2 x 3 chains of 4 drawn steps, with shortcuts of 2, 2, 2 and 1 steps; then it is remembered, over a stop."""
    few(monkeypatch)
    chosen = config(folder, kontext, trainer=MOVE, iterations=3, evaluation={"every": 0})
    straight = resumed(chosen, folder)
    assert plan(chosen).sample_calls == pytest.approx(4 * 5 + 6 * (4 + 7) / 3)  # at most: no exit is later
    result = runs.rows(straight)
    for n, row in enumerate(result):
        size = int(row["window/size"])
        own = 4 * (size + min(2, STEPS - size))
        assert row["model_calls/sample"] == own + (6 * (4 + 7) if n == 0 else 0)
        assert row["exit/variance"] > 0
    assert len({row["exit/variance"] for row in result}) == 1
    assert runs.last_state(straight).state["memory"]["exit"]["step"] >= 1


RECIPES = Path(__file__).parents[3] / "configs/diffusion"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny-qwen-edit"
    FAMILIES["qwen_image_edit"]().pipe.save_pretrained(folder)
    return folder


def rehearsal(name: str, qwen: Path, folder: Path, group: int, rewards: str) -> Config:
    """The recipe on a tiny model, with 32 pixels, two prompts and groups of 2, for one iteration."""
    changes = [
        *(f"model.path={qwen}", "model.dtype=float32", "model.lora.rank=4"),
        *("sampling.height=32", "sampling.width=32", "evaluation.every=0", "iterations=1", f"output={folder / 'run'}"),
        *("sampling.prompts_per_iteration=2", f"sampling.group_size={group}", "sampling.batch_size=2"),
        "sampling.pipeline_args={true_cfg_scale: 4.0, negative_prompt: ' ', max_sequence_length: 48}",
        f"rewards={rewards}",
    ]
    if name != "qwen_image_edit_talk2move_sft":
        changes.append("trainer.updates_per_iteration=1")  # the second is off the policy that drew
    return load(RECIPES / f"{name}.yaml", changes)


BRIGHT = "{{name: '{folder}/rewards.py:brightness', weight: 1.0}}"


def test_a_recipe_trains(qwen: Path, folder: Path) -> None:
    """On policy the ratio is exactly 1; calls are those of the plan; each reward is logged under its name.

    A tiny random model draws nothing that can be found, so brightness stands beside the rewards to have a gradient.
    """
    file, backbone = tiny_orient.save(folder)
    orient = f"{{name: edit_orient, weight: 0.9, args: {{model: {file}, backbone: {backbone}, detector: shapes}}}}"
    position = "{name: edit_position, weight: 0.1, args: {detector: shapes}}"
    rewards = f"[{BRIGHT.format(folder=folder)}, {orient}, {position}]"
    chosen = rehearsal("qwen_image_edit_talk2move_rotate", qwen, folder, 2, rewards)
    (row,) = runs.rows(train(chosen))
    predicted = plan(chosen, read_components(qwen))
    assert row["ratio/max_abs_dev"] == 0.0 and row["grad_norm"] > 0 and row["window/size"] == 9
    assert (row["model_calls/sample"], row["model_calls/train"]) == (predicted.sample_calls, predicted.train_calls)
    assert row["model_calls/sample"] == 2 * 2 * 2 * (9 + 1)  # true guidance doubles it
    assert row["reward/edit_orient_mean"] == row["reward/edit_position_mean"] == 0.0


def test_the_start_is_trained_without_guidance(qwen: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for each picture, where sampling takes two for each step."""
    monkeypatch.setattr(decoding, "MOST", 10.0)  # the autoencoder is random: it need not give pictures back
    bright = f"[{BRIGHT.format(folder=folder)}]"
    chosen = rehearsal("qwen_image_edit_talk2move_sft", qwen, folder, 1, bright)
    (row,) = runs.rows(train(chosen))
    assert row["model_calls/train"] == plan(chosen, read_components(qwen)).train_calls == 2
    assert row["grad_norm"] > 0

"""The code, commands and sizes on the pages of robot policies are as they stand there: vla.md, vla_robot.md with
small numbers, vla_simulators.md, vla_data.md, vla_policies.md.
"""

import re
import runpy
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from genrl.cli.app import app
from genrl.config import check_files, load
from genrl.config.plugins import import_file
from genrl.vla.data.lerobot_dataset import open_dataset
from genrl.vla.evaluate import evaluation_episodes
from genrl.vla.policies.folder import load_policy, save_first_steps, save_policy
from genrl.vla.policies.policy import ACTION, NoiseHead
from genrl.vla.run import VLARun
from genrl.vla.setup import open_tables, simulation_of
from genrl.vla.train import train
from tests.docs.test_pages import blocks
from tests.vla import vla_runs
from tests.vla.published import pi_folder, pi_observation
from tests.vla.tiny_policies import diffusion, flow, frames

ROOT = Path(__file__).parents[2]


def test_the_code_of_vla_runs(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-policy").symlink_to(ROOT / "assets" / "tiny-vla")
    page = ROOT / "docs" / "vla.md"
    block, dppo = blocks(page, "python")
    exec(compile(block, "docs/vla.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 10 and any("True" in line for line in printed)
    save_policy(diffusion(seed=1), tmp_path / "dppo")
    save_first_steps(diffusion(seed=2), tmp_path / "dppo", 20, 10)
    observation = {name: value[:4] for name, value in frames().items() if name != ACTION}
    names = {"folder": tmp_path / "dppo", "observation": observation, "noise": torch.randn(4, 4, 3)}
    exec(compile(dppo, "docs/vla.md", "exec"), names)
    assert names["chunk"].shape == (4, 4, 3)


def test_demonstrations_of_the_example_fit_the_files_on_the_page(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    monkeypatch.setattr("sys.argv", ["example_simulator.py", "corners"])
    runpy.run_path("docs/example_simulator.py", run_name="__main__")
    dataset = open_dataset(Path("corners"))
    assert len(dataset) == 40 and set(dataset.tasks.values()) == {"go to the red corner", "go to the blue corner"}
    assert all(episode.columns["next.success"][-1, 0] for episode in dataset.read(["next.success"]))
    page = ROOT / "docs" / "vla_simulators.md"
    imitation, reinforcement, _ = blocks(page, "yaml")
    (tmp_path / "corners_sft.yaml").write_text(imitation + "trackers: []\n")
    check_files(load("corners_sft.yaml"))
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "corners_sft").symlink_to(ROOT / "assets" / "tiny-vla")
    (tmp_path / "corners.yaml").write_text(reinforcement + "trackers: []\n")
    check_files(load("corners.yaml"))


EXAMPLE = ROOT / "docs" / "example_robot.py"
SMALL = ["trainer.steps_per_iteration=2", "trainer.batch_size=8", "iterations=1", "trackers=[]"]


def test_every_command_of_robot_runs(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("docs", "assets"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    page = ROOT / "docs" / "vla_robot.md"
    (settings,) = blocks(page, "yaml")
    Path("robot.yaml").write_text(settings)
    robot = import_file(EXAMPLE)
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()]
    assert [shlex.split(line)[1] for line in lines].count("train") == 2 and len(lines) == 8
    for line in lines:
        words = re.sub(r"--episodes \d+", "--episodes 6", line).split()
        if words[0] == "genrl":
            result = CliRunner().invoke(app, [*words[1:], *(SMALL if words[1] == "train" else [])])
            assert result.exit_code == 0, (line, result.output)
        else:
            robot.main(words[2:])
    said = capsys.readouterr().out
    assert "demos: 6 demonstrations" in said and re.search(r"my-policy: \d of 6 succeed, 0\.\d+ to [01]\.\d+", said)
    parts = [list(open_dataset(Path(name)).read()) for name in ("demos", "corrections", "both")]
    assert len(parts[2]) == len(parts[0]) + len(parts[1]) and 0 < len(parts[1]) < 6
    for joined, one in zip(parts[2], parts[0] + parts[1], strict=True):
        assert joined.instructions == one.instructions
        assert all(np.array_equal(value, one.columns[name]) for name, value in joined.columns.items())
    assert (tmp_path / "my-policy-2" / "model.safetensors").is_file()


DATA_PAGE = ROOT / "docs" / "vla_data.md"


def test_the_code_of_data_runs(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    parts = blocks(DATA_PAGE, "python")
    assert len(parts) == 3
    exec(compile("\n".join(parts), str(DATA_PAGE), "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "20 10 ['observation.image'] put the blue block in the far zone"
    assert "'action': (" in printed[1] and "'action_is_pad': (" in printed[1]
    assert printed[3:5] == ["21 (21, 6)", "23 (23, 6)"]
    assert "'success-00.gif'" in printed[5] and "'sheet.png'" in printed[5]
    assert printed[6].startswith("(0.8388") and printed[6].endswith(", 1.0)")


POLICIES_PAGE = ROOT / "docs" / "vla_policies.md"


def test_the_code_of_policies_runs(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    pi_folder(tmp_path / "published")
    seen = pi_observation(1)
    seen["observation.image"] = seen.pop("observation.images.base_0_rgb")
    (block,) = blocks(POLICIES_PAGE, "python")
    names = {"FOLDER": "published", "observation": seen, "x": torch.randn(1, 6, 32), "sigma": torch.ones(1)}
    exec(compile(block, str(POLICIES_PAGE), "exec"), names)
    assert names["velocity"].shape == (1, 6, 32)
    again = load_policy(tmp_path / "fine-tuned")
    assert again.critic and again.inputs == names["policy"].inputs


# -- Heads of a policy that is trained further
@pytest.mark.parametrize(
    ("policy", "critic", "noise_head"),
    [(flow(critic=1, noise_head=had), 1, head) for had, head in (("expert", "context"), ("context", "expert"))]
    + [(flow(critic=1), 1, "expert"), (flow(critic=1), 4, "none"), (diffusion(critic=1), 4, "none")],
)
def test_heads_that_are_other_ones_are_new_and_the_rest_stays(policy: Any, critic: int, noise_head: NoiseHead) -> None:
    """From a Flow-Noise run to ReinFlow, and back; from one value of a chunk to one of every action."""
    made, again = (policy.with_heads(critic=critic, noise_head=noise_head, seed=3) for _ in range(2))
    before, after, part = policy.state_dict(), made.state_dict(), "noise_head." if critic == 1 else "value_head."
    new = {name for name, value in after.items() if name not in before or not torch.equal(value, before[name])}
    assert new and all(name.startswith(part) for name in new)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in after.items())
    assert made.with_heads(critic=critic, noise_head=noise_head, seed=5) is made
    assert critic == 1 or made.value_head[-1].out_features == 4


def test_a_run_rounds_to_tf32_and_a_script_does_not_go_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    products = torch.backends.cuda.matmul
    monkeypatch.setattr(VLARun, "evaluate", lambda self, iteration: seen.append(products.allow_tf32) or {})
    assert not products.allow_tf32
    train(vla_runs.config(tmp_path, **vla_runs.SFT, tf32=True, evaluation={"every": 1}))
    assert seen == [True, True] and not products.allow_tf32
    other = str(tmp_path / "other")
    one_step_size = vla_runs.config(tmp_path, optimizer={"name": "prodigy", "lr": 1.0}, output=other)
    with pytest.raises(ValueError, match="policy, critic have rates of their own"):
        train(one_step_size)


@pytest.mark.parametrize("freeze", ["encoder", "nothing"])
def test_a_run_goes_on_only_from_what_it_began_with(freeze: str, tmp_path: Path) -> None:
    """The encoder that is not trained and the first steps of DPPO are read from the policy's folder once more."""
    source = tmp_path / "source"
    shutil.copytree(vla_runs.policy_of("diffusion"), source)
    policy = {"path": str(source), "freeze": freeze}
    run = train(vla_runs.config(tmp_path, sampler="diffusion", policy=policy))
    longer = vla_runs.config(tmp_path, sampler="diffusion", policy=policy, iterations=2)
    other = load_policy(source)
    other.out.bias.data += 0.1
    save_policy(other, source)
    before = vla_runs.trained_weights(run)
    with pytest.raises(ValueError, match=f"policy.path: {source} is not what the run began with"):
        train(longer, run)
    shutil.rmtree(source)
    shutil.copytree(vla_runs.policy_of("diffusion"), source)
    train(longer, run)
    after = vla_runs.trained_weights(run)
    assert any(not torch.equal(before[name], value) for name, value in after.items())


def test_runs_of_other_seeds_are_judged_on_the_same_starts(tmp_path: Path) -> None:
    simulator = Path(__file__).parents[2] / "docs" / "example_simulator.py"
    environment = {"name": f"{simulator}:make", "tasks": ["red"], "max_steps": 20, "timeout_s": 9}
    starts = []
    for seed in (0, 1):
        config = vla_runs.config(tmp_path, environment=environment, seed=seed)
        assert simulation_of(config, flow(), num_envs=1, group_size=1).start_timeout_s == 18
        env = open_tables(config, flow(), num_envs=3)
        seen, _ = env.reset(options={"episodes": evaluation_episodes(1234, 3)})
        starts.append(np.concatenate([value.reshape(3, -1) for value in seen.values()], 1))
        env.close()
    assert np.array_equal(*starts) and len(np.unique(starts[0], axis=0)) == 3

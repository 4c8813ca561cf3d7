"""Every method, from its own YAML on the embedded models: ended after one iteration and gone on with is never ended;
drawn by a rollout worker that has a pipeline of its own is drawn here, or refused; stopped by a gradient that is not
finite is replayed to the bit (of VLA and VLM: tests/runtime/loop/test_replay.py).

Weights, snapshots, optimisers, what a trainer keeps beside them, and metrics, to the bit. A new method is tested as
soon as its file is in configs/diffusion.
"""

import shutil
from pathlib import Path

import pytest
from diffusers import DiffusionPipeline

import genrl.diffusion.train as train_module
from genrl.config import load
from genrl.diffusion.config.schema import Config
from genrl.diffusion.config.sections import Model
from genrl.diffusion.train import train
from genrl.runtime.folder import checkpoint
from genrl.runtime.loop.loop import Loop
from genrl.runtime.loop.state import Stateful
from tests.diffusion import runs
from tests.diffusion.rollout import far_here
from tests.planted import replayed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures(
        "unproven"
    ),  # each family's adapter is loaded again in tests/diffusion/policy/test_families.py
]

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    path.stem: path
    for path in sorted((ROOT / "configs/diffusion").glob("*.yaml"))
    if load(path).model.path.startswith("assets/")
}
FURTHER = {
    "adv_grpo": ["trainer.adversary.warmup=1"],  # the judge in the first iteration, the model in the second
    "adv_grpo_style": ["trainer.adversary.warmup=1", "trainer.keep_graph=false"],  # workers keep no graphs
    "ddpo": ["sampling.prompts_per_iteration=4", "sampling.batch_size=4"],  # rewards of one picture have no spread
    # smaller trees, of two depths where theirs have more
    "branch_grpo": ["trainer.tree.at=[0, 1]", "sampling.group_size=4", "sampling.batch_size=4", "seed=2"],
    "flow_grpo_fast": ["trainer.tree.ways=4", "sampling.group_size=4", "sampling.batch_size=4"],
    "tree_grpo": ["trainer.window.size=2", "sampling.group_size=9", "sampling.batch_size=9", "seed=2"],
    "tree_rpo": ["trainer.window.size=2", "sampling.group_size=4", "sampling.batch_size=4"],
    "talk2move": ["trainer.exit_step=null"],
}
NOT_ELSEWHERE = ("spo", "dpo_offline", "talk2move_sft")
"""As tests/fixtures/config/impossible.yaml has it."""


def shrunken(path: Path, output: Path) -> Config:
    """The file's settings with the fewest samples, and few steps where no tree stands on them."""
    full = load(path)
    group = full.sampling.group_size
    if getattr(full.trainer, "tree", None) is None:
        group = min(group, 4)
    prompts = full.trainer.updates
    changes = [
        f"sampling.prompts_per_iteration={prompts}",
        f"sampling.group_size={group}",
        f"sampling.batch_size={group}",
        "evaluation={every: 2, num_prompts: 1}",
        "checkpoint={every: 1, keep: 9}",
        "trackers=[]",
        "iterations=2",
        f"output={output}",
        *FURTHER.get(path.stem, []),
    ]
    if full.sampling.num_inference_steps > 5 and getattr(full.trainer, "tree", None) is None:
        changes.append("sampling.num_inference_steps=5")
        changes += ["trainer.window.size=2", "trainer.window.high=4"] if getattr(full.trainer, "window", None) else []
    return load(path, changes)


@pytest.mark.parametrize("name", FILES)
def test_resumed_drawn_elsewhere_and_replayed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second iteration of two, done again from the checkpoint of the first, by samples that a worker draws."""
    monkeypatch.chdir(ROOT)
    kept: set[str] = set()
    keep = Loop.keep

    def watched(self: Loop, name: str, thing: Stateful, *, changes: bool = True) -> None:
        kept.add(name)
        keep(self, name, thing, changes=changes)

    monkeypatch.setattr(Loop, "keep", watched)
    loaded: list[str] = []
    load_pipeline = train_module.load_pipeline

    def counted(model: Model) -> DiffusionPipeline:
        loaded.append(model.path)
        return load_pipeline(model)

    monkeypatch.setattr(train_module, "load_pipeline", counted)
    config = shrunken(FILES[name], tmp_path / "straight")
    straight = train(config)
    assert len(loaded) == 1  # no reference, old policy or average is another model
    again, planted = tmp_path / "again", tmp_path / "planted"
    for copy in (again, planted):
        shutil.copytree(straight, copy)
        shutil.rmtree(copy / "checkpoints" / "step-000002")
    replayed(config, monkeypatch, planted)
    if name not in NOT_ELSEWHERE:
        far_here.install(monkeypatch)
        config = Config.model_validate(config.model_dump(mode="json") | {"engine": far_here.ENGINE})
    train(config, again)
    assert runs.differences(straight, again) == []
    one, two = (checkpoint.load(straight / "checkpoints" / f"step-{k:06d}") for k in (1, 2))
    assert any(not one.tensors["weights"][key].equal(value) for key, value in two.tensors["weights"].items())
    for stem, tensors in two.tensors.items():
        if stem == "weights" or stem.startswith("snapshot-"):
            assert tensors.keys() == one.tensors["weights"].keys()
            assert config.model.lora is None or all(".lora_" in key for key in tensors)
    assert {stem.removeprefix("kept-") for stem in two.tensors if stem.startswith("kept-")} == kept

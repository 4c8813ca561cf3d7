"""What a policy's run logs is what the catalogue documents, both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from genrl.runtime.folder.metrics import by_heading, catalogue, document
from genrl.runtime.folder.run import Run, read_metrics
from genrl.vla.methods.ppo.settings import PPO
from genrl.vla.train import train
from tests.vla import vla_runs

CRITIC = set(PPO.metrics)
OWN = set(by_heading()["Policies in simulation"]) | CRITIC
SHARED = {"loss/policy", "ratio/mean", "lr", "updates", "timing/train_s", "timing/eval_s", "timing/iteration_s"}
SHARED |= {"memory/peak_mb", "eval/below_best"}
UPDATES = {"ratio/mean", "ratio/clipped", "kl/updates"}
LEARNED_NOISE = {"entropy"}  # only with entropy_weight above 0
EVALUATION = {key for key in OWN if key.startswith("eval/")} | {"timing/eval_s", "eval/below_best"}
CONFIGURATIONS: dict[str, tuple[dict[str, Any], set[str]]] = {
    # settings, and the entries that such a run logs
    "ppo": ({"evaluation": {"every": 1}}, (OWN | SHARED) - LEARNED_NOISE),
    "flow_noise": ({"sampler": "flow_noise", "trainer": {"entropy_weight": 0.01}}, (OWN | SHARED) - EVALUATION),
    "warm-up": (
        {"trainer": {"critic_warmup": 9}},
        (OWN | SHARED) - EVALUATION - LEARNED_NOISE - {"loss/policy", "grad_norm/policy"} - UPDATES,
    ),
    "grpo": (vla_runs.GRPO, (OWN | SHARED) - EVALUATION - LEARNED_NOISE - CRITIC),
    "sft": (
        {**vla_runs.SFT, "evaluation": {"every": 1}},
        {"loss", "grad_norm/policy", *(SHARED - {"loss/policy", "ratio/mean"}), *EVALUATION},
    ),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_run_logs_what_the_catalogue_has(name: str, tmp_path: Path) -> None:
    """That no other key is logged is the logger's to refuse (`document` raises)."""
    changes, wanted = CONFIGURATIONS[name]
    run = train(vla_runs.config(tmp_path, **changes))
    entry = {id(doc): key for key, doc in catalogue().items()}
    logged = {entry[id(document(key))] for row in read_metrics(Run(run).metrics) for key in row if key != "step"}
    assert logged == wanted


def test_every_entry_is_logged_by_some_run_and_times_are_not_compared() -> None:
    assert OWN <= set.union(*(logged for _, logged in CONFIGURATIONS.values()))
    times = {"env_steps_per_s", "timing/rollout_s", "timing/simulator_s"}
    assert {key for key in OWN if not document(key).reproducible} == times

"""Sections of a run that do not go together: refused before anything is loaded, in words that say what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from genrl.config import ConfigError
from tests.vlm import vlm_runs
from tests.vlm.methods import test_rlfr, test_sft
from tests.vlm.methods.episodes import test_sub_agents

AGENT: dict[str, Any] = {"task": None, "rewards": None, "environment": {"name": "grid"}}
SERVER = {"staleness": 1, "vllm": {"url": "http://localhost:1"}}
AHEAD = {"generation": SERVER, "iterations": 4}


def opd(place: Path, **trainer: Any) -> object:
    return test_rlfr.config_of_opd_language(place, trainer)


def stale(place: Path, **changes: Any) -> object:
    return vlm_runs.config(place, **({"iterations": 4, "generation": {"staleness": 1}} | changes))


def staged(place: Path, **stage: Any) -> object:
    return vlm_runs.config(place, stages=[{"iterations": 1, **stage}])


def preferring(place: Path, **trainer: Any) -> object:
    return vlm_runs.config(place, task=test_sft.TASK, trainer=test_sft.DPO | trainer)


REFUSED: dict[Callable[..., object], list[tuple[dict[str, Any], str]]] = {
    vlm_runs.config: [
        ({"rewards": []}, "answers are worth nothing"),
        ({"vlm": {"packing": True, "prefix_attention": "sdpa"}}, "share no prompts"),
        (
            {"generation": {"group_size": 1}, "stages": [{"iterations": 1, "trainer": {"preset": "grpo"}}]},
            "answers of a group",
        ),
        ({"trainer": {"preset": "trloo"}}, "turns are of episodes: write environment"),
        ({"trainer": {"preset": "ui_s1"}}, "turns are of episodes: write environment"),
        ({"vlm": {"quantize": "int4", "lora": {"rank": 2}}}, "vlm.quantize.*packed four-bit"),
        ({"vlm": {"quantize": "nf4"}}, "vlm.quantize, vlm.lora|quantised weights cannot be trained"),
        ({"vlm": {"quantize": "nf4", "lora": {}}, "distributed": {"fsdp": True}}, "cannot be divided"),
        ({"vlm": {"quantize": "int8", "lora": {}}, "generation": {"vllm": {}}}, "vLLM is sent merged weights"),
        # before which the server has to know what is asked
        (AHEAD | {"trainer": {"filter": "spread", "resample": 1}}, "before which the server samples"),
        (AHEAD | {"augmentation": {}}, "before which the server samples"),
    ],
    staged: [
        ({"trainer": {"preset": "dapo", "epochs": 0}}, "stages.0.trainer.epochs"),
        ({"trainer": {"algorithm": "episodes"}}, "stages.0.trainer.algorithm.*learns from episodes"),
    ],
    test_sub_agents.crops: [({"generation": SERVER, "iterations": 2}, "samples answers ahead, not episodes")],
    test_rlfr.config: [
        ({"trainer": {"preset": "gspo"}}, "the flow pays tokens, and sequence_clip takes one advantage"),
        ({"generation": {"staleness": 1}}, "rlfr learns from samples of the present weights"),
        ({"distributed": {"fsdp": True}}, "not tried in shards"),
        ({"flow": {"threshold": 1.0}}, "threshold"),
    ],
    opd: [
        ({"beta": 0.001}, "the distance vanishes"),
        ({"preset": "gspo"}, "takes one advantage per answer"),
        ({"preset": "poad"}, "trainer.preset"),
    ],
    stale: [
        ({"trainer": {"preset": "rloo"}}, "losses of clipped ratios, 'reinforce' is none"),
        ({"trainer": {"preset": "dpo"}}, "losses of clipped ratios, 'preference' is none"),
        ({"stages": [{"iterations": 4}]}, "stages.*was not tried with it"),
        ({"distributed": {"fsdp": True}}, "in shards are not kept"),
        ({"iterations": 1}, "samples of all 1 iterations would be of the first weights"),
        ({**AGENT, "trainer": {"algorithm": "archer"}}, "of the present weights"),
        ({**AGENT, "trainer": {"preset": "vl_dac"}}, "values and episodes that go on are of the present weights"),
        ({**AGENT, "trainer": {"preset": "rloo"}}, "losses of clipped ratios, 'reinforce' is none"),
    ],
    preferring: [
        ({"preference": {"loss": "ipo", "smoothing": 0.1}}, "ipo has none"),
        ({"preference": {"loss": "robust", "smoothing": 0.5}}, "say nothing"),
        ({"preference": {"loss": "orpo"}}, "write 1"),
        ({"batch_size": 2, "preference": {"loss": "kto"}}, "write 4 or more"),
        ({"first_token_share": 0.1}, "likelihood of answers"),
    ],
}


@pytest.mark.parametrize(
    ("make", "changes", "text"), [(make, *case) for make, cases in REFUSED.items() for case in cases]
)
def test_what_does_not_go_together_is_refused(make: Any, changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        make(tmp_path, **changes)

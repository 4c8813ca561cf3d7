"""Two processes (gloo) do what one does; more of shards is in test_shards.py."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.train import train
from tests.ports import free_port
from tests.run_folders import rows, start_ranks, wait
from tests.vlm import vlm_ranks, vlm_runs
from tests.vlm.methods import test_rlfr, test_sft
from tests.vlm.methods.episodes import agent_runs

pytestmark = pytest.mark.slow
ONE = {"every": 1, "questions": 4}
UNEVEN = test_sft.SFT | {"updates": None, "batch_size": 4, "micro_batch": 1}
RUNS: dict[str, Callable[[Path], VLMConfig]] = {
    "statistics of all answers": lambda place: vlm_runs.config(
        place, trainer={"preset": "stable_reinforce", "updates": 2, "micro_batch": 4}, evaluation=ONE
    ),
    "rlfr": lambda place: test_rlfr.config(place),
    # the last step has three questions: one process has a pass more than the other
    "sft": lambda place: vlm_runs.config(place, trainer=UNEVEN, task={"rows": 7}, evaluation=ONE),
    "sft in shards": lambda place: vlm_runs.config(
        place, trainer=UNEVEN, task={"rows": 7}, distributed={"fsdp": place.name == "two"}
    ),
    # the preset's token_mean is one of each process's tokens
    "agents": lambda place: agent_runs.config(
        place, "vl_dac", trainer={"aggregation": "token_mean_global"}, evaluation=ONE
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_do_what_one_does(name: str, tmp_path: Path) -> None:
    """The same answers, statistics over all of them, and one gradient. (Adam makes steps of its rounding.)"""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    train(RUNS[name](tmp_path / "one"))
    RUNS[name](tmp_path / "two")
    file = str(tmp_path / "two" / "tiny.yaml")
    assert wait(start_ranks(2, vlm_ranks.run, file, log=tmp_path / "log")) == [0, 0]
    for one, two in zip(rows(tmp_path / "one" / "run"), rows(tmp_path / "two" / "run"), strict=True):
        assert one.keys() == two.keys()
        for key in one:
            assert two[key] == pytest.approx(one[key], rel=2e-3, abs=5e-5), key


def test_where_the_environments_of_one_process_die_no_other_waits(tmp_path: Path) -> None:
    dies = {"parallel": 2, "steps": 2, "timeout_s": 60.0}
    agent_runs.config(tmp_path, "vl_dac", environment={**dies, "name": f"{tmp_path / 'pays.py'}:Pays"})
    own = "        if os.environ['RANK'] == '1': os._exit(7)\n        self.left -= 1\n"
    text = agent_runs.PAYS.replace("import numpy", "import os, numpy").replace("        self.left -= 1\n", own)
    (tmp_path / "pays.py").write_text(text)
    command = [sys.executable, "-c", "from genrl.cli.app import app; app()", "train", str(tmp_path / "tiny.yaml")]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    shared |= {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
    ranks = [  # not `start_ranks`, whose processes may have none of their own
        subprocess.Popen(
            command,
            env=os.environ | shared | {"RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.STDOUT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]
    try:
        for process in ranks:
            told = " ".join(process.communicate(timeout=100)[0].split())
            assert process.returncode == 1
            assert "all environments of process 1 hung or died in one iteration" in told, told[-3000:]
    finally:
        for process in ranks:
            process.kill()

"""A reward in a process of its own: the same scores, a clean end in every case, and started again when it dies."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import genrl_rewards
from genrl_rewards.service.isolation import Isolated, python_of
from genrl_rewards.service.remote import Outage
from tests.rewards import plain_rewards

IMAGES = torch.rand(3, 3, 9, 7, generator=torch.Generator().manual_seed(0))
FILE = str(Path(plain_rewards.__file__))
FAST = Outage(timeout_s=5, deadline_s=20)


def score(reward: genrl_rewards.Reward, first: str = "fine", **more: Any) -> genrl_rewards.Scores:
    return genrl_rewards.score(reward, images=IMAGES, prompts=[first, "a", "b"], **more)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return b"Z" not in Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2][:3]


def ends(pid: int, within: float = 10) -> bool:
    end = time.monotonic() + within
    while is_alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not is_alive(pid)


def test_one_process_from_start_to_end(tmp_path: Path) -> None:
    """Failures leave it alone; it is started again when it was killed, also while it starts, and when a sample kills
    it."""
    log = tmp_path / "log"
    reward = Isolated(f"{FILE}:Moody", outage=FAST, args={"bonus": 0.25, "log": str(log)})
    try:
        local = score(plain_rewards.Moody(0.25))
        assert score(reward) == local
        assert score(reward, "raise").failed == score(reward, "exit").failed == 3
        assert score(reward) == local
        first = int(log.read_text().split()[0])
        start, dies = reward._start, iter([True])

        def started(name: str) -> Any:
            if next(dies, False):
                raise ValueError("it died while it was starting")
            return start(name)

        reward._start = started  # type: ignore[method-assign]
        os.kill(first, signal.SIGKILL)
        assert ends(first)
        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(score, [reward] * 2)) == [local] * 2 and reward._restarts == 2
        assert score(reward, "die").failures[0].fatal  # it dies of this sample every time
        pids = list(dict.fromkeys(int(line.split()[0]) for line in log.read_text().splitlines()))
        assert 3 <= len(pids) <= 6 and os.getpid() not in pids  # as many as the deadline allows
    finally:
        reward.close()
    reward.close()  # twice is allowed
    assert all(ends(int(line.split()[0])) for line in log.read_text().splitlines())


@pytest.mark.slow
def test_no_orphan_is_left_where_the_parent_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = (
        "import os, signal, torch, genrl_rewards\n"
        "from genrl_rewards.service.isolation import Isolated\n"
        f"reward = Isolated({FILE + ':Moody'!r}, {{'log': {str(log)!r}}})\n"
        "genrl_rewards.score(reward, images=torch.zeros(1, 3, 4, 4), prompts=['fine'])\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = str(Path(genrl_rewards.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": root}, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert ends(int(log.read_text().split()[0]))


@pytest.mark.slow
def test_what_goes_wrong_at_the_start_is_raised_here(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no 'Moodie'. Did you mean 'Moody'"):
        Isolated(f"{FILE}:Moodie")
    with pytest.raises(ValueError, match="is not a virtual environment: there is no .*bin/python"):
        Isolated("shapes", venv=str(tmp_path))
    (tmp_path / "ends.py").write_text("import os\nos._exit(5)\ndef f(images): ...\n")
    with pytest.raises(ValueError, match="its process ended with status 5"):
        Isolated(f"{tmp_path}/ends.py:f")
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(60)\ndef f(images): ...\n")
    with pytest.raises(ValueError, match="was not ready within 0.5 s"):
        Isolated(f"{tmp_path}/slow.py:f", start_s=0.5)


@pytest.mark.slow
def test_another_environment_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual environment with this one's packages but without genrl: of the sources only `rewards` is handed on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    packages = next(Path(path) for path in sys.path if path.endswith("site-packages"))
    site = next((tmp_path / "venv" / "lib").glob("python*")) / "site-packages"
    for entry in packages.iterdir():
        if "genrl" not in entry.name:
            (site / entry.name).symlink_to(entry)
    (tmp_path / "where.py").write_text(
        "import sys\nfrom importlib.util import find_spec\n"
        "def where(images, prompts):\n"
        "    return [float(sys.prefix.endswith('venv')), float(find_spec('genrl') is None), 1.0]\n"
    )
    assert python_of(str(tmp_path / "venv")) == str(python)
    reward = Isolated(f"{tmp_path}/where.py:where", venv=str(tmp_path / "venv"), outage=FAST)
    assert score(reward).values == [1.0, 1.0, 1.0]
    reward.close()

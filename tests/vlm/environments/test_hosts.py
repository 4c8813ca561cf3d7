"""Environments in processes of their own: the same as in this one; what hangs, dies or raises."""

from __future__ import annotations

from pathlib import Path

import pytest

from genrl.vlm.config.sections import Environment
from genrl.vlm.environments.hosts import Local, Processes
from genrl.vlm.episodes.episodes import Table

FRAIL = """
import os, time
class Frail:
    layout, help, begun = 'steps', 'say what to do', ''
    def reset(self, seed, split):
        return (f'seed {seed}',)
    def step(self, text):
        if text == 'hang': time.sleep(60)
        if text == 'die': os._exit(7)
        if text == 'raise': raise KeyError('inside')
        if text == 'nan': return (text,), float('nan'), False, False, {}
        if text == 'half': return (text,), 1.0, 0.5, False, {}
        if text == 'unsure': return (text,), 1.0, True, False, {'success': 0.3}
        return (text,), 1.0, text == 'end', False, {'success': text == 'end'}
    def render(self): ...
    def close(self): ...
"""


def frail(place: Path, timeout_s: float = 5.0) -> Environment:
    (place / "frail.py").write_text(FRAIL)
    return Environment(name=f"{place / 'frail.py'}:Frail", processes=True, timeout_s=timeout_s)


def test_what_hangs_or_dies_is_cut_and_begun_anew(tmp_path: Path) -> None:
    settings = frail(tmp_path, timeout_s=0.5)
    host = Processes(settings)
    try:
        table = Table(settings, host)
        table.begin({0: 1, 1: 2, 2: 3}, "train")
        told = table.say({0: "hang", 1: "go", 2: "die"})
        assert "0.5 s (environment.timeout_s)" in told[0].lost and "exit code 7" in told[2].lost
        assert [table.episodes[slot].lost for slot in (0, 1, 2)] == [True, False, True]
        assert table.episodes[0].truncated and table.episodes[0].seen == [("seed 1",), ("seed 1",)]
        assert table.episodes[1].total == 1.0 and not table.episodes[1].ended
        table.begin({0: 9, 2: 10}, "train")
        assert table.say({0: "end", 1: "end", 2: "go"})[0].terminated
        assert table.episodes[0].success and table.episodes[1].total == 2.0
    finally:
        host.close()


def test_ends_rewards_and_success_are_not_cast(tmp_path: Path) -> None:
    settings = frail(tmp_path)
    table = Table(settings, Local(settings))
    table.begin({0: 1}, "train")
    for text, says in (
        ("nan", "reward is nan"),
        ("half", "terminated is 0.5"),
        ("unsure", r"info\['success'\] is 0.3"),
    ):
        with pytest.raises(ValueError, match=says):
            table.say({0: text})


def test_what_raises_or_is_lost_three_times_running_is_an_error(tmp_path: Path) -> None:
    settings = frail(tmp_path)
    host = Processes(settings)
    try:
        table = Table(settings, host)
        table.begin({1: 1}, "train")
        with pytest.raises(RuntimeError, match="Frail raised KeyError: 'inside'"):
            table.say({1: "raise"})
        for _ in range(2):
            table.begin({0: 1}, "train")
            table.say({0: "die"})
        table.begin({0: 1}, "train")
        with pytest.raises(RuntimeError, match=r"slot 0 died with exit code 7; the last of 3 times.*Say\(text='die'\)"):
            table.say({0: "die"})
    finally:
        host.close()


def test_an_episode_is_played_again_from_its_seed_and_answers() -> None:
    settings = Environment(name="grid")
    one, other = Table(settings, Local(settings)), Table(settings, Local(settings))
    one.begin({0: 3, 1: 4}, "train")
    for text in ('{"action": "up"}', "nonsense", '{"action": "left"}'):
        one.say({slot: text for slot in (0, 1) if not one.episodes[slot].ended})
    other.restore(one.state())
    for slot in (0, 1):
        a, b = one.episodes[slot], other.episodes[slot]
        assert a.said == b.said and a.total == b.total and a.ended == b.ended
        assert a.seen[-1][0].tobytes() == b.seen[-1][0].tobytes()  # type: ignore[union-attr]


def test_an_episode_that_goes_otherwise_when_it_is_played_again_is_an_error(tmp_path: Path) -> None:
    settings = frail(tmp_path)
    table = Table(settings, Local(settings))
    with pytest.raises(RuntimeError, match="seed 5 ended earlier"):
        table.restore([[0, 5, "train", ["go", "end"]]])
    host = Processes(settings)
    try:
        with pytest.raises(RuntimeError, match="seed 5 died with exit code 7, when"):
            Table(settings, host).restore([[0, 5, "train", ["go", "die"]]])
    finally:
        host.close()

"""Tunes of two models on one page, from the same noise, scored by the rewards of the run."""

import io
import json
import shutil
import wave
from pathlib import Path

import numpy as np
import pytest
import torch

from genrl.config import dump
from genrl.runtime.show.compare.page import Page, key_path
from genrl.vlm.evaluate import compare
from genrl.vlm.train import train
from genrl_rewards.scorers.texts.tunes import sound_quality
from tests.cli import commands
from tests.runtime.show.compare import pages
from tests.vlm import vlm_runs
from tests.vlm.test_sequence_training import ASSETS, config

BASE = str(ASSETS / "tiny-tunes")


@pytest.mark.slow
def test_tunes_of_a_run_and_of_the_model_that_it_began_with(tmp_path: Path) -> None:
    changes = {"optimizer": {"lr": 0.05}, "evaluation": {"every": 0, "questions": 6}, "iterations": 1}
    run = train(config(tmp_path, "audio", "music_rl", **changes))
    out = tmp_path / "compare.html"
    said = commands.run("compare", BASE, str(run), "--out", str(out), "--category", "answer")
    key = json.loads(key_path(out).read_text())
    assert f"{len(key['pairs'])} pairs" in said and len(key["pairs"]) + key["identical"] == 6
    shown = pages.data(out)["pairs"]
    for pair in shown:
        of_pair = key["pairs"][pair["token"]]
        assert pair["prompt"] == of_pair["prompt"] and of_pair["category"] in pair["prompt"]
        for side in ("left", "right"):
            with wave.open(io.BytesIO(pages.content(pair[side]["url"], tmp_path))) as file:
                sound = np.frombuffer(file.readframes(file.getnframes()), np.int16) / 32767
                rate = file.getframerate()
            score = sound_quality([torch.from_numpy(sound.copy()).float()], [rate])[0]
            index = "ab".index(of_pair["left"]) if side == "left" else "ba".index(of_pair["left"])
            assert of_pair["rewards"]["sound_quality"][index] == pytest.approx(float(score), abs=0.01)
    copy = shutil.copytree(run, tmp_path / "copy")
    page = Page(tmp_path / "copies.html", question="")
    compare(str(run), str(copy), page, scores=False)
    assert (len(page), page.identical) == (0, 6)
    with pytest.raises(ValueError, match="A and B are the same model"):
        compare(str(run), str(run), page)


def test_answers_that_are_text(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    settings = vlm_runs.config(tmp_path)
    (tmp_path / "run" / "config.yaml").write_text(dump(settings))
    page = Page(tmp_path / "compare.html", question="")
    with pytest.raises(ValueError, match="its answers are text or actions; a page shows pictures and sounds"):
        compare(BASE, str(tmp_path / "run"), page)

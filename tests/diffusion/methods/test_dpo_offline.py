"""Diffusion-DPO from a preference set: what the loss is made of, resume, and sets that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from genrl.config import ConfigError, check_files
from genrl.data.preferences import as_tensor, open_set
from genrl.data.prompts import PromptError
from genrl.data.prompts import load as load_prompts
from genrl.diffusion.config.schema import Config
from genrl.diffusion.forward.noising import given_pictures, picture_size
from genrl.diffusion.methods.dpo_offline import train as dpo_offline
from genrl.diffusion.methods.dpo_offline.train import PAIR
from genrl.diffusion.policy import decoding
from genrl.diffusion.train import train
from tests.diffusion import runs
from tests.diffusion.methods.watched import resumed, watch

pytestmark = pytest.mark.filterwarnings("ignore")  # deprecations within diffusers

TINY = Path(__file__).parents[3] / "assets" / "tiny-t2i"
EMBEDDED = f"{TINY.parent / 'preferences'}:train"


def preference_set(folder: Path, **renamed: str) -> Path:
    """Four pairs of the embedded set as files: pictures that the tiny autoencoder knows."""
    rows = []
    known = load_prompts(EMBEDDED)[:4]
    reader = open_set(EMBEDDED, known)
    for number, prompt in enumerate(known):
        row = {"prompt": prompt.text}
        for column, image in zip(("image_win", "image_lose"), reader(prompt), strict=True):
            name = f"{number}-{column}.png"
            image.save(folder / name)
            row[renamed.get(column, column)] = name
        rows.append(json.dumps(row))
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(rows), encoding="utf-8")
    return path


def config(folder: Path, source: Path, model: Path = TINY, **changes: Any) -> Config:
    return runs.config(
        folder,
        model,
        **{
            "prompts": {"train": str(source)},
            "trainer": {"algorithm": "dpo_offline", "beta": 100.0, "updates_per_iteration": 2},
            "sampling": {
                "prompts_per_iteration": 2,
                "height": None,
                "width": None,
                "pipeline_args": {"max_sequence_length": 2},
            },
            "evaluation": {"every": 0},
            **changes,
        },
    )


def test_pairs_are_encoded_as_they_are_given(folder: Path) -> None:
    with runs.opened(config(folder, preference_set(folder))) as run, torch.no_grad():
        reader = open_set(run.config.prompts.train, run.prompts)
        size = picture_size(run)
        found = given_pictures(run, reader, size, PAIR)
        assert size == (64, 64) and found.total.tolist() == [1, 0, 1, 0] and found.group.tolist() == [0, 0, 1, 1]
        assert sorted(slot for one in found.mine.values() for slot in one.slots) == [0, 1, 2, 3]
        for one in found.mine.values():
            decoded = run.policy.decode(one.batch, one.final)
            for slot, prompt, picture in zip(one.slots, one.batch.prompts, decoded, strict=True):
                (row,) = [row for row in run.prompts if row.text == prompt]
                given = [as_tensor(image, 64, 64) for image in reader(row)]
                wanted, other = given[slot % 2], given[1 - slot % 2]
                assert float((picture - wanted).abs().mean()) < min(0.05, float((wanted - other).abs().mean()))


def test_an_editing_model_learns_from_pairs_with_their_sources(
    folder: Path, kontext: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pair is judged beside the picture that it edits. The autoencoder is random: it need not give them back."""
    monkeypatch.setattr(decoding, "MOST", 10.0)
    source = preference_set(folder)
    rows = [json.loads(line) | {"source_image": f"{k}.png"} for k, line in enumerate(source.read_text().splitlines())]
    source.write_text("\n".join(map(json.dumps, rows)))
    for k in range(len(rows)):
        Image.new("RGB", (16, 16), (40 * k, 80, 120)).save(folder / f"{k}.png")
    call = {"max_sequence_length": 16, "max_area": 256, "_auto_resize": False}
    sampling = {"guidance_scale": 2.5, "inputs": {"image": "source_image"}, "pipeline_args": call}
    sizes = {"height": 16, "width": 16, "prompts_per_iteration": 2}
    prompts = {"train": str(source), "eval": None}
    found = config(folder, source, kontext, prompts=prompts, sampling=sizes | sampling, iterations=1)
    with runs.opened(found) as run:
        watched = watch(run)
        dpo_offline.train(run, found.trainer)  # type: ignore[arg-type]
    batches = [piece.batch for update in watched.updates for piece in update.pieces]
    seen = [pair for batch in batches for pair in zip(batch.prompts, batch.inputs["image"], strict=True)]
    texts = [row["prompt"] for row in rows]
    assert len(seen) == 4  # winner and loser of two pairs
    assert all(picture.getpixel((0, 0)) == (40 * texts.index(text), 80, 120) for text, picture in seen)


def test_a_missing_column_is_named_with_its_row_and_the_nearest(folder: Path) -> None:
    source = preference_set(folder, image_win="image_won")
    wanted = r"pairs.jsonl:1: no column 'image_win', found .*'image_won'.*; did you mean 'image_won'\?"
    found = config(folder, source)
    with pytest.raises(ConfigError, match=wanted):
        check_files(found, {})
    with pytest.raises(PromptError, match=wanted):
        train(found)
    with pytest.raises(ConfigError, match="has prompts only"):
        check_files(config(folder, folder / "train.txt"), {})


def test_a_picture_that_is_none_is_named(folder: Path) -> None:
    source = preference_set(folder)
    (folder / "1-image_lose.png").write_bytes(b"no picture")
    rows = load_prompts(str(source))
    reader = open_set(str(source), rows)
    assert [image.size for image in reader(rows[0])] == [(64, 64)] * 2
    wanted = r"pairs.jsonl:2: image_lose cannot be read as an image"
    with pytest.raises(PromptError, match=wanted):
        reader(rows[1])
    with pytest.raises(PromptError, match=wanted):
        train(config(folder, source))
    assert not (folder / "run" / "checkpoints").exists()


def test_a_run_goes_on_to_the_bit(folder: Path) -> None:
    rows = runs.rows(resumed(config(folder, preference_set(folder), iterations=3), folder))
    assert all(row["model_calls/sample"] == 0 and "reward/total_mean" not in row for row in rows)
    assert rows[-1]["preference/logit"] > rows[0]["preference/logit"]  # a few pairs over and over: learnt by heart


def test_pictures_are_scaled_to_cover_and_cut_around_the_centre() -> None:
    """Those of a data set folder are in its files."""
    image = Image.new("RGB", (40, 20), "white")
    image.paste("black", (0, 0, 10, 20))  # the left quarter is cut off
    assert float(as_tensor(image, 10, 10).min()) > 0.9
    assert as_tensor(image, 10, 20).shape == (3, 10, 20)
    rows = load_prompts(EMBEDDED, pictures=False)
    reader = open_set(EMBEDDED, rows)
    assert len(rows) == 272 and rows[0].columns == {}
    assert all(image.size == (64, 64) for row in (rows[0], rows[-1]) for image in reader(row))

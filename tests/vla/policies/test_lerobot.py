"""Folders of published policies: tokenizers, features, statistics, what is missing; and letterboxes, which distort
nothing and leave the rest black, on the side that each family puts it.
"""

from __future__ import annotations

import json

import pytest
import torch

from genrl.vla.policies.folder import load_policy
from genrl.vla.policies.robot import letterbox
from tests.vla.published import pi_folder, smol_folder


def changed(path, **settings) -> None:
    """Settings of the tokenizer's step."""
    file = path / "policy_preprocessor.json"
    content = json.loads(file.read_text())
    for step in content["steps"]:
        if step["registry_name"] == "tokenizer_processor":
            step["config"] |= settings
    file.write_text(json.dumps(content))


def test_instructions_are_padded_to_one_length_and_cut_as_the_folder_says(tmp_path) -> None:
    smol_folder(tmp_path)
    policy = load_policy(tmp_path)
    tokens = policy.tokenise(["touch the blue block", "put the red block in the far zone put the red block in"])
    assert tokens.shape == (2, 12) and (tokens[0] > 0).sum() == 5 and (tokens[1] > 0).all()
    assert torch.equal(policy.tokenise(["touch the blue block\n"])[0], tokens[0])
    with pytest.raises(ValueError, match="has token 0, which stands for padding"):
        policy.tokenise(["touch the <pad> block"])
    changed(tmp_path, truncation=False)
    with pytest.raises(ValueError, match="has 14 tokens, the policy takes 12"):
        load_policy(tmp_path).tokenise(["put the red block in the far zone put the red block in"])


def test_a_tokenizer_that_is_nowhere_is_asked_for(tmp_path) -> None:
    pi_folder(tmp_path)
    (tmp_path / "tokenizer").rename(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"'google/paligemma-3b-pt-224'.*put its files into .*tokenizer"):
        load_policy(tmp_path)
    changed(tmp_path, tokenizer_name=str(tmp_path / "elsewhere"))
    assert load_policy(tmp_path).tokenise(["touch the blue block"]).shape == (1, 12)


def test_folders_that_lack_something_are_refused(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="has no config.json"):
        load_policy(tmp_path)
    pi_folder(tmp_path)
    file = tmp_path / "policy_postprocessor.json"
    content = json.loads(file.read_text())
    content["steps"][0]["state_file"] = "../stats.safetensors"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="state_file must lie beside it"):
        load_policy(tmp_path)
    for name in ("policy_preprocessor.json", "model.safetensors"):
        pi_folder(tmp_path)
        (tmp_path / name).unlink()
        with pytest.raises(FileNotFoundError, match=f"has no {name}"):
            load_policy(tmp_path)


@pytest.mark.parametrize(("height", "width"), [(20, 40), (40, 20), (12, 30)])
@pytest.mark.parametrize("padding", ["centre", "top_left"])
def test_a_white_picture_fills_its_part_of_the_square(height: int, width: int, padding) -> None:
    ratio = max(height, width) / 28
    inner = (int(height / ratio), int(width / ratio))
    out = letterbox(torch.ones(2, 3, height, width), (28, 28), padding)
    rows, columns = out[0, 0].amax(1).nonzero()[:, 0], out[0, 0].amax(0).nonzero()[:, 0]
    assert out.shape == (2, 3, 28, 28) and out.sum() == 2 * 3 * inner[0] * inner[1]
    spare = (28 - inner[0], 28 - inner[1])
    first = (spare[0] // 2, spare[1] // 2) if padding == "centre" else spare
    assert (int(rows[0]), int(columns[0])) == first and (len(rows), len(columns)) == inner


def test_a_picture_of_the_right_size_is_left_alone() -> None:
    image = torch.rand(1, 3, 28, 28)
    assert letterbox(image, (28, 28), "centre") is image


def test_halving_averages_neighbours() -> None:
    image = torch.rand(1, 3, 8, 8)
    mean = image.unflatten(2, (4, 2)).unflatten(4, (4, 2)).mean((3, 5))
    torch.testing.assert_close(letterbox(image, (4, 4), "centre"), mean)

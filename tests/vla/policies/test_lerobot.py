"""Folders of published policies: tokenizers, features, statistics, what is missing."""

from __future__ import annotations

import json

import pytest
import torch

from genrl.vla.policies.folder import load_policy
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

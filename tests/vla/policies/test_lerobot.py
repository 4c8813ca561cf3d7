"""Folders of published policies: tokenizers, features, statistics, what is missing; and letterboxes, which distort
nothing and leave the rest black, on the side that each family puts it.
"""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from genrl.mdp.noise import generator, keyed_noise
from genrl.vla.policies.folder import load_policy, save_policy
from genrl.vla.policies.policy import ACTION, rows
from genrl.vla.policies.robot import letterbox, normalise, statistics, unnormalise
from tests.vla.published import pi_folder, smol_folder
from tests.vla.tiny_policies import FACTS, FEELS, SEES, diffusion, flow, frames


def changed(path, **settings) -> None:
    file = path / "policy_preprocessor.json"
    content = json.loads(file.read_text())
    for step in content["steps"]:
        if step["registry_name"] == "tokenizer_processor":
            step["config"] |= settings
    file.write_text(json.dumps(content))


def test_instructions_are_padded_and_cut_as_the_folder_says_and_its_tokenizer_is_asked_for(tmp_path) -> None:
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


# -- LeRobot's normalisation modes and their inverses
MODES = ["MEAN_STD", "MIN_MAX", "QUANTILES", "QUANTILE10", "IDENTITY"]


def demonstrations(seed: int = 0) -> torch.Tensor:
    """200 actions of four numbers of very different scales, the last constant."""
    scale = torch.tensor([1.0, 0.01, 300.0, 0.0])
    return torch.randn(200, 4, generator=generator(seed)) * scale + torch.tensor([0.0, 5.0, -40.0, 0.7])


@settings(max_examples=20)
@given(st.sampled_from(MODES), st.integers(0, 100))
def test_the_inverse_brings_actions_back(mode, seed: int) -> None:
    values = demonstrations(seed)
    stats = statistics(values)
    back = unnormalise(normalise(values.double(), stats, mode), stats, mode)
    torch.testing.assert_close(back, values.double(), rtol=1e-9, atol=1e-9)


def test_statistics_by_hand_and_what_a_mode_promises() -> None:
    values = demonstrations()
    stats = statistics(values)
    moving = values[:, :3]
    centred = normalise(values, stats, "MEAN_STD")
    assert centred.mean(0).abs().max() < 1e-3
    torch.testing.assert_close(centred[:, :3].std(0, correction=0), torch.ones(3), rtol=1e-3, atol=1e-3)
    bounded = normalise(values, stats, "MIN_MAX")[:, :3]
    torch.testing.assert_close(bounded.amin(0), -torch.ones(3))
    torch.testing.assert_close(bounded.amax(0), torch.ones(3))
    for mode, share in (("QUANTILES", 0.98), ("QUANTILE10", 0.8)):
        inside = normalise(moving, {k: v[:3] for k, v in stats.items() if k != "count"}, mode).abs() <= 1 + 1e-4
        assert inside.float().mean(0).sub(share).abs().max() < 0.02
    assert all(normalise(values, stats, mode).isfinite().all() for mode in MODES)  # the last number never moved
    values = torch.arange(101.0)[:, None].repeat(1, 2).view(101, 1, 2)
    stats = statistics(values)
    assert stats["count"].item() == 101 and stats["mean"].tolist() == [50.0, 50.0]
    wanted = {"min": 0, "q01": 1, "q10": 10, "q50": 50, "q90": 90, "q99": 99, "max": 100}
    assert {name: stats[name][0].item() for name in wanted} == pytest.approx(wanted)
    with pytest.raises(ValueError, match=r"not finite: \[1\]"):
        statistics(torch.tensor([[1.0], [torch.nan]]))
    with pytest.raises(KeyError, match="q01"):
        normalise(torch.ones(1), {"mean": torch.ones(1)}, "QUANTILES")
    with pytest.raises(ValueError, match="mode must be"):
        normalise(torch.ones(1), {}, "ZSCORE")  # type: ignore[arg-type]


# -- Saved policies: the same one back, LeRobot's files, and what is refused
POLICIES = {
    "flow": lambda: flow(SEES, critic=1, noise_head="context"),
    "flow from states": lambda: flow(FACTS),
    "flow from points": lambda: flow(FEELS),
    "diffusion": lambda: diffusion(SEES, critic=1, train_steps=100),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_saved_policy_is_the_same_policy(name: str, tmp_path) -> None:
    policy = POLICIES[name]()
    save_policy(policy, tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    assert type(loaded) is type(policy) and loaded.config == policy.config and not loaded.training
    seen, x = rows(frames(points=14), torch.arange(4)), keyed_noise((4, 4, 3), 0)
    ours, theirs = policy.encode(seen), loaded.encode(seen)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    ask, time = "noise" if name == "diffusion" else "velocity", torch.ones(4, dtype=torch.int64)
    assert torch.equal(getattr(policy, ask)(ours, x, time), getattr(loaded, ask)(theirs, x, time))
    assert torch.equal(policy.actions(x), loaded.actions(x))
    assert not list((tmp_path / "policy").glob("*.partial"))


def test_the_files_are_lerobots_and_what_is_not_such_a_folder_is_refused(tmp_path) -> None:
    policy = flow(SEES)
    save_policy(policy, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["input_features"] == {
        "observation.state": {"type": "STATE", "shape": [3]},
        "observation.image": {"type": "VISUAL", "shape": [3, 32, 32]},
    }
    assert config["output_features"] == {"action": {"type": "ACTION", "shape": [3]}} and config["chunk_size"] == 4
    assert config["normalization_mapping"]["ACTION"] == "MIN_MAX" and config["type"] == "tiny_flow_vla"
    processor = json.loads((tmp_path / "policy_postprocessor.json").read_text())
    stats = load_file(tmp_path / processor["steps"][0]["state_file"])
    assert torch.equal(stats["action.max"], policy.stats[ACTION]["max"])
    assert set(load_file(tmp_path / "model.safetensors")) == set(policy.state_dict())
    save_policy(flow(SEES), tmp_path)
    good = json.loads((tmp_path / "config.json").read_text())

    def with_config(**changes) -> None:
        (tmp_path / "config.json").write_text(json.dumps(good | changes))

    with_config(type="diffusion_mlq")
    with pytest.raises(ValueError, match="unknown policy 'diffusion_mlq'; did you mean diffusion_mlp"):
        load_policy(tmp_path)
    with_config(normalization_mapping={"ACTION": "MEAN_STD"})
    with pytest.raises(ValueError, match="normalization_mapping"):
        load_policy(tmp_path)
    with_config(chunk_size=8)
    with pytest.raises(ValueError, match="does not fit"):
        load_policy(tmp_path)
    with_config()
    file = tmp_path / "policy_preprocessor_step_0_normalizer_processor.safetensors"
    save_file({name: value for name, value in load_file(file).items() if "action" not in name}, file)
    with pytest.raises(ValueError, match="action needs statistics"):
        load_policy(tmp_path)

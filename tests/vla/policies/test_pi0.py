"""pi0 and pi0.5: the published layout, LeRobot's own actions, replay, heads, cameras, what is refused."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from genrl.mdp.noise import keyed_noise
from genrl.vla.offline.imitation import matching_error
from genrl.vla.policies import pi0, smolvla
from genrl.vla.policies.folder import load_policy, save_policy
from genrl.vla.policies.lerobot import Adapt
from genrl.vla.policies.policy import STATE, TOKENS
from tests.conftest import GOLDEN
from tests.vla import published
from tests.vla.published import LINES, PI_REAL, SMOL_REAL

LEROBOT = Path(__file__).parents[2] / "fixtures" / "lerobot"
BOTH = pytest.mark.parametrize("adaptive", [False, True], ids=["pi0", "pi05"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {adaptive: tmp_path_factory.mktemp("pi") for adaptive in (False, True)}
    for adaptive, path in made.items():
        published.pi_folder(path, adaptive=adaptive)
    return made


def observation(policy, batch: int = 3) -> dict[str, Tensor]:
    return published.pi_observation(batch) | {TOKENS: policy.tokenise([LINES[n % 3] for n in range(batch)])}


def chunk(batch: int = 3) -> Tensor:
    return keyed_noise((batch, 6, 32), 0)


SIGMA = torch.tensor([1.0, 0.5, 0.1])


def acts_as(policy, seen: dict[str, Tensor], given: dict[str, Tensor]) -> None:
    """Ten Euler steps from LeRobot's noise, to its robot's units."""
    with torch.no_grad():
        context, x = policy.encode(seen), given["x"]
        for step in range(10):
            x = x - policy.velocity(context, x, torch.full((3,), 1 - step / 10)) / 10
    torch.testing.assert_close(x[..., :3], given["chunk"], rtol=0, atol=1e-5)
    torch.testing.assert_close(policy.actions(x), given["acts"], rtol=0, atol=1e-5)


@BOTH
def test_the_layout_is_the_published_one(adaptive: bool, folders) -> None:
    """The real sizes, on no device: names and shapes of the list. pi05_base has 812 tensors, LeRobot counts
    3,616,757,520 parameters in it, 693,422,112 of them beside PaliGemma."""
    listed = published.pi_shapes(PI_REAL, adaptive=adaptive)
    assert len(listed) == (812 if adaptive else 777)
    if adaptive:
        sizes = {key: math.prod(shape) for key, shape in listed.items()}
        assert sum(sizes.values()) == 3_616_757_520
        assert sum(size for key, size in sizes.items() if ".paligemma." not in key) == 693_422_112
    policy = load_policy(folders[adaptive])
    real = pi0.PI0(pi0.PI0Config(adaptive), policy.robot, policy.prompts, 257152)
    wanted = {pi0.own_name(key): shape for key, shape in listed.items() if "gemma_expert.lm_head" not in key}
    assert {name: tuple(value.shape) for name, value in real.state_dict().items()} == wanted


def test_an_embedding_stored_under_both_its_names_and_a_trained_number_stay_so(tmp_path) -> None:
    """What was trained is not rounded to the dtype of the file."""
    weights = published.pi_folder(tmp_path / "a", dtype=torch.bfloat16)
    both = weights | {pi0._EMBEDDING: weights[pi0._TIED].clone()}
    save_file(both, tmp_path / "a" / "model.safetensors")
    policy = load_policy(tmp_path / "a")
    with torch.no_grad():
        policy.action_in_proj.bias += 1e-6
    save_policy(policy, tmp_path / "b")
    saved = load_file(tmp_path / "b" / "model.safetensors")
    bias = saved["action_in_proj.bias"]
    assert torch.equal(bias, policy.action_in_proj.bias) and bias.dtype == torch.float32
    assert saved.keys() == both.keys()
    assert all(torch.equal(saved[key], both[key]) for key in both if key != "action_in_proj.bias")
    save_file(both | {pi0._EMBEDDING: both[pi0._EMBEDDING] + 1}, tmp_path / "a" / "model.safetensors")
    with pytest.raises(ValueError, match="is another tensor than"):
        load_policy(tmp_path / "a")


@given(st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=32))
def test_the_state_falls_into_numpys_bins(state: list[float]) -> None:
    wanted = np.digitize(np.array(state, np.float32), np.linspace(-1, 1, 257)[:-1]) - 1
    assert pi0.discretised(torch.tensor([state]))[0].tolist() == wanted.tolist()


def test_pi05_is_told_the_robots_own_numbers_as_openpi_tells_them(folders, tmp_path, monkeypatch) -> None:
    """Five; with padded_state as many as the model is wide. The choice goes with the policy that is saved."""
    written: list[str] = []
    write = pi0._prompts
    monkeypatch.setattr(pi0, "_prompts", lambda tokens, state: written.extend(lines := write(tokens, state)) or lines)

    def numbers(policy) -> list[str]:
        written.clear()
        with torch.no_grad():
            policy.encode(observation(policy))
        return written[0].split("State: ")[1].removesuffix(";\nAction: ").split()

    own = numbers(load_policy(folders[True]))
    padded = load_policy(folders[True], adapt=Adapt(padded_state=True))
    assert len(own) == 5 and numbers(padded) == [*own, *["128"] * 27]
    padded.save(tmp_path / "again")
    assert numbers(load_policy(tmp_path / "again")) == [*own, *["128"] * 27]
    assert numbers(load_policy(tmp_path / "again", adapt=Adapt(padded_state=False))) == own
    with pytest.raises(ValueError, match="policy.padded_state is of type pi05, and this is pi0"):
        load_policy(folders[False], adapt=Adapt(padded_state=True))
    policy = load_policy(folders[True])
    written = pi0._prompts(policy.tokenise(["put_the red\nblock "]), torch.tensor([[-2.0, -1.0, 0.0, 0.9999, 1.0]]))
    assert written == ["Task: put the red block, State: -1 0 128 255 255;\nAction: "]
    texts = ["touch the blue block", "légère"]
    written = pi0._prompts(policy.tokenise(texts), torch.zeros(2, 1))
    assert [text.split(",")[0] for text in written] == [f"Task: {text}" for text in texts]


@BOTH
def test_they_act_as_lerobots_own(adaptive: bool, folders) -> None:
    """As LeRobot 0.6.1 acts with the same folder (benchmarks/lerobot_reference.py), prompt and pictures being made
    by its own processors."""
    policy = load_policy(folders[adaptive])
    with np.load(LEROBOT / ("pi05.npz" if adaptive else "pi0.npz")) as arrays:
        acts_as(policy, observation(policy), {name: torch.from_numpy(arrays[name]) for name in arrays.files})


@BOTH
def test_gradients_reach_a_language_model_that_is_trained(adaptive: bool, folders, tmp_path) -> None:
    frozen = load_policy(folders[adaptive])
    seen = observation(frozen)
    assert not any(value.requires_grad for value in frozen.encode(seen).values())
    published.pi_folder(tmp_path, adaptive=adaptive, train_expert_only=False, freeze_vision_encoder=True)
    policy = load_policy(tmp_path)
    actions = policy.normalised(torch.randn(3, 6, 3))
    matching_error(policy, policy.encode(seen), actions, chunk(), SIGMA, None).square().mean().backward()
    last = "language_model.layers.3."  # its queries and what follows them reach nothing that the expert reads
    for name, parameter in policy.named_parameters():
        reached = not any(part in name for part in ("vision_tower", last, "language_model.norm"))
        if reached or f"{last}self_attn.k_proj" in name:
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_cameras_can_be_renamed_and_left_out_and_what_an_observation_lacks_is_named(folders) -> None:
    path = folders[False]
    policy = load_policy(path, adapt=Adapt(rename={"observation.image": "observation.images.left_wrist_0_rgb"}))
    assert policy.inputs == ("observation.state", "observation.image", TOKENS)
    seen = observation(policy)
    one = {STATE: seen[STATE], TOKENS: seen[TOKENS], "observation.image": seen["observation.images.left_wrist_0_rgb"]}
    assert policy.encode(one)["valid"].sum(1).tolist() == [4 + 9, 4 + 5, 4 + 5]
    with pytest.raises(ValueError, match="nearest one is 'observation.images.left_wrist_0_rgb'"):
        load_policy(path, adapt=Adapt(rename={"observation.image": "observation.images.left_wrist"}))
    policy = load_policy(folders[False])
    seen = observation(policy)
    with pytest.raises(KeyError, match="base_0_rgb"):
        policy.encode({key: value for key, value in seen.items() if "base" not in key})
    with pytest.raises(ValueError, match="observation.state has 4 numbers"):
        policy.encode(seen | {STATE: seen[STATE][:, :4]})


def test_what_does_not_fit_is_refused(tmp_path) -> None:
    weights = published.pi_folder(tmp_path)
    file = tmp_path / "model.safetensors"

    def refused(changed: dict[str, Tensor], match: str) -> None:
        save_file(changed, file)
        with pytest.raises(ValueError, match=match):
            load_policy(tmp_path)

    name = "paligemma_with_expert.paligemma.model.language_model.layers.0.self_attn.q_proj.weight"
    less = {key: value for key, value in weights.items() if key != name}
    refused(less, rf"1 keys are missing, the first '{name}'; the nearest one that it has is .*q_proj.weight'")
    refused(less | {name.replace("q_proj", "query"): weights[name]}, rf"unknown keys, .*query.*needs is '{name}'")
    refused(weights | {name: weights[name][:64]}, r"q_proj.weight has shape \[64, 64\], it needs \[128, 64\]")
    deeper = weights | {name.replace("layers.0", "layers.6"): weights[name].clone()}
    refused(deeper, r"language_model has 7 layers, bigger than the 4 of the configuration")
    save_file(weights, file)
    steps = json.loads((tmp_path / "policy_preprocessor.json").read_text())
    steps["steps"][3]["config"]["enabled"] = True
    (tmp_path / "policy_preprocessor.json").write_text(json.dumps(steps))
    with pytest.raises(ValueError, match="step 'relative_actions_processor' is not known"):
        load_policy(tmp_path)


def test_a_base_model_needs_statistics_and_keeps_those_it_is_given(tmp_path) -> None:
    published.pi_folder(tmp_path / "base")
    for name in ("policy_preprocessor", "policy_postprocessor"):
        file = tmp_path / "base" / f"{name}.json"
        content = json.loads(file.read_text())
        for step in content["steps"]:
            step.pop("state_file", None)
        file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="no statistics of 'observation.state'.*MEAN_STD: it is a base model"):
        load_policy(tmp_path / "base")
    stats = {STATE: {"mean": torch.ones(5), "std": torch.full((5,), 2.0)}}
    stats["action"] = {"mean": torch.zeros(3), "std": torch.full((3,), 4.0)}
    policy = load_policy(tmp_path / "base", adapt=Adapt(stats=stats))
    save_policy(policy, tmp_path / "own")
    again = load_policy(tmp_path / "own")
    for result in (policy, again):
        torch.testing.assert_close(result.actions(torch.ones(1, 6, 32)), torch.full((1, 6, 3), 4.0))
        torch.testing.assert_close(result.normalised(torch.full((1, 6, 3), 8.0))[..., :3], torch.full((1, 6, 3), 2.0))


# -- SmolVLA: the published layout, LeRobot's own actions, replay, freezing, what is refused
@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("smol")
    published.smol_folder(path)
    return path


def test_the_layout_is_the_published_one_smolvla(folder) -> None:
    """The real sizes, on no device. LeRobot counts 450,046,176 parameters in smolvla_base, and trains 99,880,992; in
    lerobot/smolvla_libero, whose file has 906,712,520 bytes, the backbone and the expert are bfloat16 but for what is
    no layer of transformers' own."""
    listed = published.smol_shapes(SMOL_REAL)
    sizes = {key: math.prod(shape) for key, shape in listed.items()}
    assert len(listed) == 500 and sum(sizes.values()) == 450_046_176
    assert sum(size for key, size in sizes.items() if ".vlm." not in key) == 99_880_992
    cross = [key for key, shape in listed.items() if "lm_expert" in key and shape == (320, 320)]
    single = sum(sizes[key] for key in listed if key in cross or "vlm_with_expert" not in key)
    assert len(cross) == 16 and 0 < 906_712_520 - (2 * sum(sizes.values()) + 2 * single) < 100_000  # the header
    policy = load_policy(folder)
    vlm = smolvla._vlm_config(policy.folder, smolvla.PUBLISHED)
    vlm.text_config.vocab_size = 49280
    real = smolvla.SmolVLA(smolvla.SmolVLAConfig(), policy.robot, policy.prompts, vlm)
    wanted = {key.removeprefix("model."): shape for key, shape in listed.items() if "lm_head" not in key}
    assert {name: tuple(value.shape) for name, value in real.state_dict().items()} == wanted


def test_a_tied_head_is_the_embedding_and_the_state_may_be_frozen(folder, tmp_path) -> None:
    weights = published.smol_folder(tmp_path)
    model = "model.vlm_with_expert.vlm."
    weights[f"{model}lm_head.weight"] = weights.pop(f"{model}model.text_model.embed_tokens.weight")
    save_file(weights, tmp_path / "model.safetensors")
    ours, theirs = load_policy(tmp_path), load_policy(folder)
    seen = observation(ours)
    assert torch.equal(ours.encode(seen)["keys"], theirs.encode(seen)["keys"])
    published.smol_folder(tmp_path, train_state_proj=False)
    assert not any(value.requires_grad for value in load_policy(tmp_path).encode(seen).values())


def test_it_acts_as_lerobots_own() -> None:
    """A folder that LeRobot 0.6.1 made, saved and acted with."""
    place = GOLDEN / "lerobot_smolvla"
    with np.load(place / "ref.npz") as arrays:
        given = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    policy = load_policy(place)
    seen = {name: value for name, value in given.items() if name.startswith("observation")}
    acts_as(policy, seen | {STATE: given["state"], TOKENS: policy.tokenise(LINES)}, given)

"""OpenVLA-OFT: the published layout, timm's and transformers' own modules, bins, units, what is refused."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from genrl.vla.policies import openvla, openvla_folder
from genrl.vla.policies.folder import load_policy
from genrl.vla.policies.lerobot import Adapt
from genrl.vla.policies.openvla import action_tokens, token_actions
from genrl.vla.policies.policy import TOKENS, rows
from genrl.vla.policies.transformer import VITS, Featurizer
from genrl.vla.rollout.sampling import Regression, Tokens
from tests.vla import openvla_folders
from tests.vla.openvla_folders import REAL, TINY, bounds, observation
from tests.vla.published import LINES, pi_folder

LIBERO = {"action": bounds([-0.5] * 7, [1.5] * 7, [True] * 6 + [False]), "proprio": bounds([-1.0] * 8, [1.0] * 8)}


def oft(**settings: Any) -> Adapt:
    return Adapt(oft={"chunk": 4, **settings})


def seen(policy: Any, batch: int = 3, **settings: Any) -> dict[str, Tensor]:
    lines = [LINES[n % 3] for n in range(batch)]
    return observation(batch, **settings) | {TOKENS: policy.tokenise(lines)}


def test_the_layout_is_the_published_one(tmp_path: Path) -> None:
    """The real sizes, on no device: openvla-7b has 7,541,237,184 parameters. What no action depends on is in the file
    alone: the last blocks of the vision transformers, their norms, SigLIP's pooling."""
    published = openvla_folders.shapes(REAL)
    assert sum(map(math.prod, published.values())) == 7_541_237_184
    openvla_folders.write(tmp_path)
    folder = openvla_folder.read(tmp_path, None)
    folder.config = openvla_folders.config(REAL, {"libero_10_no_noops": LIBERO})
    (tmp_path / "config.json").write_text(json.dumps(folder.config))
    policy = openvla.OpenVLA(folder, openvla_folder.Robot(folder))
    own = {name: tuple(value.shape) for name, value in policy.state_dict().items()}
    unused = published.keys() - own.keys()
    assert own == {name: shape for name, shape in published.items() if name not in unused}
    towers = {"featurizer": 23, "fused_featurizer": 26}
    parts = [f"vision_backbone.{tower}.{p}" for tower, n in towers.items() for p in (f"blocks.{n}.", "norm.")]
    assert all(name.startswith((*parts, "vision_backbone.fused_featurizer.attn_pool.")) for name in unused)
    assert (policy.words - 256, policy.end, policy.prompts.begin, policy.horizon) == (31744, 2, 1, 8)


@pytest.mark.parametrize("sizes", [TINY.dino, TINY.siglip], ids=["dinov2", "siglip"])
def test_patches_are_those_of_timm(sizes: Any) -> None:
    vits = pytest.importorskip("timm.models.vision_transformer")
    own = {"init_values": 1e-5, "reg_tokens": 4} if sizes.registers else {"global_pool": "map"}
    theirs = vits.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=sizes.width, depth=3, num_heads=4, mlp_ratio=2, num_classes=0,
        class_token=sizes.registers is not None, no_embed_class=True, **own,
    ).eval()  # fmt: skip
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=rng) * 0.2)
    ours = Featurizer(VITS[sizes.name], 32)
    named = {key.replace(".gamma", ".scale_factor"): value for key, value in theirs.state_dict().items()}
    assert not ours.load_state_dict(named, strict=False).missing_keys
    pictures = torch.randn(2, 3, 32, 32, generator=rng)
    (wanted,) = theirs.get_intermediate_layers(pictures, n={1})
    assert wanted.std() > 0.1
    torch.testing.assert_close(ours(pictures), wanted)


def test_logits_are_those_of_transformers_own_llama_row_by_row(tmp_path: Path) -> None:
    """With a mask that hides nothing, which is what makes parallel decoding comparable: no action token enters the
    pass, so there is no order of tokens; each is the likeliest after its own place, and a row alone, unpadded, is
    enough."""
    from transformers import LlamaConfig, LlamaForCausalLM

    names = ("observation.images.0", "observation.images.1")
    weights = openvla_folders.write(tmp_path, proprio=True)
    policy = load_policy(tmp_path, adapt=oft(cameras=names))
    text = openvla_folders.config(TINY, None)["text_config"]
    theirs = LlamaForCausalLM(LlamaConfig(**text, attn_implementation="eager")).eval()
    part = "language_model."
    theirs.load_state_dict({name.removeprefix(part): v for name, v in weights.items() if name.startswith(part)})
    given = seen(policy, cameras=names, state=3)
    assert len({int((line > 0).sum()) for line in given[TOKENS]}) == 2  # one line is longer than the others
    ours = policy.encode(given)["logits"]
    table, count = theirs.get_input_embeddings().weight, policy.horizon * policy.action_dim
    for row in range(3):
        one = rows(given, torch.tensor([row]))
        line = one[TOKENS][0][one[TOKENS][0] > 0]
        patches = policy._seen(one, torch.device("cpu"))
        assert patches.shape == (1, 2 * 16, TINY.width)
        projector = policy.proprio_projector
        state = policy.robot.state(one, torch.device("cpu"))
        state = projector["fc2"](torch.nn.functional.gelu(projector["fc1"](state)))[:, None]
        empty = torch.zeros(1, count, TINY.width)
        parts = [table[line[:1]][None], patches, state, table[line[1:]][None], empty, table[2][None, None]]
        x = torch.cat(parts, 1)
        whole = torch.zeros(1, 1, x.shape[1], x.shape[1])
        actual = theirs(inputs_embeds=x, attention_mask=whole).logits[0]
        first = x.shape[1] - 1 - count  # of the empty places; each is predicted by the place before it
        wanted = actual[first - 1 : first - 1 + count, TINY.vocabulary - 256 : TINY.vocabulary]
        torch.testing.assert_close(ours[row].flatten(0, 1), wanted, rtol=1e-4, atol=1e-5)


def test_bins_are_those_of_numpy() -> None:
    """OpenVLA's formulas: token = vocabulary - digitize(a); centre of digit - 1, the last one for digit 256."""
    sampled = np.random.default_rng(0).uniform(-1.2, 1.2, 500)
    actions = np.concatenate([sampled, [-3.0, -1.0, 0.0, 1.0, 3.0]]).astype(np.float32)
    bins = np.linspace(-1, 1, 256)
    tokens = 32000 - np.digitize(np.clip(actions, -1.0, 1.0), bins)
    places = action_tokens(torch.from_numpy(actions))
    assert (31744 + places).tolist() == tokens.tolist()
    centres = (bins[:-1] + bins[1:]) / 2
    wanted = centres[np.clip(32000 - tokens - 1, 0, 254)]
    np.testing.assert_allclose(token_actions()[places], wanted, atol=1e-7)
    assert token_actions().shape == (256,) and token_actions().unique().numel() == 255


def test_a_replay_is_what_was_sampled_and_imitation_is_cross_entropy(tmp_path: Path) -> None:
    openvla_folders.write(tmp_path)
    policy = load_policy(tmp_path, adapt=oft())
    given = seen(policy)
    context = policy.encode(given)
    for sampler in (Tokens(), Tokens(temperature=1.6)):
        rngs = [torch.Generator().manual_seed(n) for n in range(3)]
        sampled = sampler.sample(policy, context, sampler.noise(policy, rngs))
        again = sampler.replay(policy, policy.encode(given), *sampled[1:4])
        assert torch.equal(again.log_prob, sampled.log_prob) and sampled.log_prob.shape == (3, 1, 4, 3)
        assert torch.equal(sampled.chunk, policy.centres[sampled.next_states[:, 0]])
        exact = torch.log_softmax(context["logits"].double() / sampler.temperature, -1)
        exact = exact.gather(-1, sampled.next_states[:, 0][..., None])[..., 0]
        torch.testing.assert_close(sampled.log_prob[:, 0].double(), exact, rtol=1e-5, atol=1e-5)
        best = sampler.act(policy, context, torch.zeros(3, 4, 3))
        assert torch.equal(best, policy.centres[context["logits"].argmax(-1)])
    actions, logits = torch.linspace(-1, 1, 36).view(3, 4, 3), context["logits"].flatten(0, 2)
    wanted = torch.nn.functional.cross_entropy(logits, action_tokens(actions).flatten(), reduction="none")
    torch.testing.assert_close(policy.demonstration_error(context, actions).flatten(), wanted)
    with pytest.raises(TypeError, match="Regression draws nothing"):
        Regression().sample(policy, context, Regression().noise(policy, rngs))


def test_the_continuous_head_is_a_function_of_the_hidden_states(tmp_path: Path) -> None:
    """Plain formulas on the file's numbers."""
    openvla_folders.write(tmp_path, head=True)
    policy = load_policy(tmp_path, adapt=oft())
    file = torch.load(tmp_path / "action_head--150_checkpoint.pt", weights_only=True)
    given = seen(policy)
    x = policy._hidden(given).view(3, 4, 3 * TINY.width)
    w = {name.removeprefix("module.model."): value for name, value in file.items()}

    def normed(x: Tensor, name: str) -> Tensor:
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    x = (normed(x, "layer_norm1") @ w["fc1.weight"].T + w["fc1.bias"]).relu()
    for n in range(2):
        ffn = f"mlp_resnet_blocks.{n}.ffn."
        x = x + (normed(x, f"{ffn}0") @ w[f"{ffn}1.weight"].T + w[f"{ffn}1.bias"]).relu()
    x = normed(x, "layer_norm2") @ w["fc2.weight"].T + w["fc2.bias"]
    context = policy.encode(given)
    torch.testing.assert_close(policy.regressed(context), x, rtol=1e-4, atol=1e-5)
    assert torch.equal(Regression().act(policy, context, torch.zeros(3, 4, 3)), policy.regressed(context))
    demonstrated = torch.zeros(3, 4, 3)
    assert torch.equal(policy.demonstration_error(context, demonstrated), policy.regressed(context).abs())
    with pytest.raises(ValueError, match="no likelihood, so nothing can reinforce it: use sft"):
        policy.with_heads(critic=1, noise_head="none", seed=0)


def robot(folder: Path, stats: dict[str, Any], **settings: Any) -> openvla_folder.Robot:
    openvla_folders.write(folder, stats=stats)
    return openvla_folder.Robot(openvla_folder.read(folder, oft(**settings)))


def test_actions_are_mapped_by_quantiles_and_mask_grippers_opened_and_data_sets_chosen_by_name(tmp_path: Path) -> None:
    """LIBERO's data sets have 1 for open, 0 for closed; robosuite's action is -1 and 1."""
    units = robot(tmp_path, {"bridge": {"action": bounds([-0.5, 0.0, 0.0], [1.5, 2.0, 9.0], [True, True, False])}})
    chunk = torch.tensor([[-1.0, 0.0, 0.25], [1.0, 1.0, 1.0]])
    torch.testing.assert_close(units.actions(chunk), torch.tensor([[-0.5, 1.0, 0.25], [1.5, 2.0, 1.0]]))
    torch.testing.assert_close(units.normalised(units.actions(chunk), 3), chunk)
    beyond = units.normalised(torch.tensor([[9.0, -9.0, 0.5]]), 3)
    torch.testing.assert_close(beyond, torch.tensor([[1.0, -1.0, 0.5]]))
    units = robot(tmp_path / "libero", {"libero_10_no_noops": LIBERO}, unnorm_key="libero_10")
    chunk = torch.zeros(4, 7)
    chunk[:, 6] = torch.tensor([0.0, 0.49, 0.51, 1.0])
    assert units.actions(chunk)[:, 6].tolist() == [1.0, 1.0, -1.0, -1.0]
    assert units.actions(chunk)[:, 0].tolist() == pytest.approx([0.5] * 4)
    shown = torch.zeros(2, 7)
    shown[:, 6] = torch.tensor([-1.0, 1.0])
    assert units.normalised(shown, 7)[:, 6].tolist() == [1.0, 0.0]
    every = {f"libero_{suite}_no_noops": LIBERO for suite in ("10", "goal", "spatial")} | {"bridge_orig": LIBERO}
    assert robot(tmp_path, every, unnorm_key="libero_goal").data_set == "libero_goal_no_noops"
    text = "policy.oft.unnorm_key: must name one of the 4 data sets .* found 'libero_gaol'; the nearest: libero_goal_no"
    with pytest.raises(ValueError, match=text):
        robot(tmp_path, every, unnorm_key="libero_gaol")
    with pytest.raises(ValueError, match="nothing is written; the nearest: bridge_orig, libero_10_no_noops, libero_g"):
        robot(tmp_path, every)
    (tmp_path / "dataset_statistics.json").write_text(json.dumps({"mine": LIBERO}))
    assert robot(tmp_path, every, unnorm_key="mine").data_set == "mine"


def test_a_state_is_clipped_to_its_range_and_pictures_of_another_size_are_resized(tmp_path: Path) -> None:
    openvla_folders.write(tmp_path, proprio=True)
    units = openvla_folder.Robot(openvla_folder.read(tmp_path, oft()))
    result = units.state({"observation.state": torch.tensor([[0.5, -7.0, 0.75]])}, torch.device("cpu"))
    assert result.tolist() == [[0.5, -1.0, 0.5]] and units.stats.keys() == {"action", "observation.state"}
    assert units.inputs == ("observation.state", "observation.image")
    units = robot(tmp_path / "other", {"a": openvla_folders.TABLE}, centre_crop=False)
    units.cameras = ("top", "wrist")
    sizes = {"top": (64, 64), "wrist": (48, 36)}
    given = {name: torch.full((1, *size, 3), 51, dtype=torch.uint8) for name, size in sizes.items()}
    result = units.pictures(given, torch.device("cpu"))
    assert result.shape == (2, 3, 32, 32) and torch.equal(result, torch.full_like(result, 0.2))


def test_the_central_crop_is_tensorflows() -> None:
    """crop_and_resize by its definition: sample i of n lies at y1 (n - 1) + i (y2 - y1), bilinear; then 255.5 steps."""
    pictures = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    low, high = (1 - math.sqrt(0.9)) / 2, (1 + math.sqrt(0.9)) / 2
    at = np.array([low * 7 + i * (high - low) for i in range(8)])
    below, share = np.floor(at).astype(int), at - np.floor(at)
    plane = pictures[0].double().numpy()
    along = plane[:, :, below] * (1 - share) + plane[:, :, below + 1] * share
    both = along[:, below] * (1 - share)[:, None] + along[:, below + 1] * share[:, None]
    steps = np.floor(both * 255.5) / 255
    result = openvla_folder.central(pictures)[0].numpy()
    assert np.abs(result - steps).max() < 1e-6 or (np.abs(result - steps) > 1e-6).mean() < 0.01
    assert np.abs(result - both).max() < 1 / 255 + 1e-6


@pytest.mark.parametrize("old", [(40, 56), (20, 24), (28, 40)])
def test_resizing_is_tensorflows_lanczos(old: tuple[int, int]) -> None:
    """tf.image.resize of lanczos3 with antialias, by its definition: pixel centres at halves, a window of 3 new pixels
    or of 3 old ones, whichever is more, weights of a sum of 1."""

    def shares(size: int) -> np.ndarray:
        scale = max(size / 28, 1.0)
        x = ((np.arange(28) + 0.5)[:, None] * size / 28 - (np.arange(size) + 0.5)[None]) / scale
        weights = np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0.0)
        return weights / weights.sum(1, keepdims=True)

    pictures = torch.rand(2, 3, *old, generator=torch.Generator().manual_seed(0))
    wanted = shares(old[0]) @ pictures.double().numpy() @ shares(old[1]).T
    assert np.abs(openvla_folder.lanczos(pictures, (28, 28)).numpy() - wanted).max() < 1e-5


def test_what_does_not_fit_and_incomplete_folders_are_refused(tmp_path: Path) -> None:
    openvla_folders.write(tmp_path, proprio=True)
    with pytest.raises(ValueError, match="holds an OpenVLA: write policy.oft, not policy.rename"):
        load_policy(tmp_path, adapt=Adapt(rename={"observation.image": "observation.images.top"}))
    policy = load_policy(tmp_path, adapt=oft())
    with pytest.raises(ValueError, match=r"observation.state has 4 numbers, the policy of .* reads 3"):
        policy.encode(seen(policy, state=4))
    pi_folder(tmp_path / "pi")
    with pytest.raises(ValueError, match="policy.oft is of an OpenVLA, and this is pi0"):
        load_policy(tmp_path / "pi", adapt=oft())
    openvla_folders.write(tmp_path, head=True)
    head, other = (tmp_path / f"action_head--{steps}_checkpoint.pt" for steps in (150, 300))
    other.write_bytes(head.read_bytes())
    with pytest.raises(ValueError, match=r"has 2 files action_head--\*.pt: leave the one that belongs to the weights"):
        load_policy(tmp_path, adapt=oft())
    other.rename(tmp_path / "vision_backbone--150_checkpoint.pt")
    with pytest.raises(ValueError, match=r"vision_backbone--150_checkpoint.pt is not known here.*\(no FiLM, no diff"):
        load_policy(tmp_path, adapt=oft())

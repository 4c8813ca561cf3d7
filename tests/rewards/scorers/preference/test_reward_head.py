"""HPSv3 and EditReward on small Qwen2-VLs with heads, saved under the names that the published files have."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import genrl_rewards
from genrl_rewards.scorers.preference import reward_head
from tests.rewards import tiny_vlm
from tests.rewards.asking import scored

from transformers import Qwen2VLModel  # isort: skip

INSTRUCTION = "Rate it.\nTextual prompt - {text_prompt}\n\n\n"
PROMPTS = ["a red circle", "two <|Reward|> stars"]


@pytest.fixture(autouse=True)
def small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_head, "PIXELS", 32 * 32)  # 200,704 pixels in patches of 4 would be 3,136 tokens


def head(prefix: str, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"0": (1024, 32), "3": (16, 1024), "5": (2, 16)}
    weights = {f"{prefix}.{n}.weight": torch.randn(s, generator=generator) / s[1] ** 0.5 for n, s in sizes.items()}
    return weights | {f"{prefix}.{n}.bias": torch.randn(s[0], generator=generator) for n, s in sizes.items()}


def backbone() -> Qwen2VLModel:
    made = tiny_vlm.tokenizer()
    model = Qwen2VLModel(tiny_vlm.config(made, size=len(made) + 1)).eval()
    tiny_vlm.randomise(model)
    return model


def old_names(model: Qwen2VLModel) -> dict[str, torch.Tensor]:
    """As transformers before 4.52 saved them: `visual.` and, for the language model, `model.`."""
    held = {}
    for name, value in model.state_dict().items():
        held[name.replace("language_model.", "model.", 1) if name.startswith("language_model.") else name] = value
    return held | {"lm_head.weight": torch.zeros(3, 32)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vlm.published_pixels(tiny_vlm.save(tmp_path_factory.mktemp("base")))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hpsv3")
    held = old_names(backbone()) | head("rm_head", 1)
    save_file({k: v.contiguous() for k, v in held.items()}, folder / "HPSv3.safetensors")
    return folder


@pytest.fixture(scope="module")
def args(base: Path, checkpoint: Path) -> dict[str, str]:
    return {"instruction": INSTRUCTION, "model": str(checkpoint), "base": str(base), "dtype": "float32"}


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(2, 3, 40, 30, generator=torch.Generator().manual_seed(0))


def by_hand(pictures: list, text: str, weights: dict, prefix: str, rotary: bool = False) -> torch.Tensor:
    """The head's output at the reward token, from a sequence put together here and positions 0, 1, 2..."""
    from transformers import Qwen2VLImageProcessorPil

    tokenizer = tiny_vlm.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|Reward|>"]})
    seen = Qwen2VLImageProcessorPil(patch_size=4, min_pixels=32 * 32, max_pixels=32 * 32)(pictures, return_tensors="pt")
    pads = ["<|image_pad|>" * (int(grid.prod()) // 4) for grid in seen["image_grid_thw"]]
    shown = "".join(f"<|vision_start|>{pad}<|vision_end|>" for pad in pads)
    chat = f"<|im_start|>user\n{shown}{text}<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(chat, return_tensors="pt")["input_ids"]
    kinds = (ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")).long()
    plain = {"position_ids": torch.arange(ids.shape[1]).expand(3, 1, -1)}
    where = {"mm_token_type_ids": kinds} if rotary else plain
    with torch.no_grad():
        hidden = backbone()(input_ids=ids, **seen, **where).last_hidden_state
    x = hidden[ids == tokenizer.convert_tokens_to_ids("<|Reward|>")]
    for number in ("0", "3", "5"):
        x = x @ weights[f"{prefix}.{number}.weight"].T + weights[f"{prefix}.{number}.bias"]
        x = x.relu() if number != "5" else x
    return x[0]


def test_hpsv3_is_the_heads_mean_at_the_reward_token(args: dict[str, str], images: torch.Tensor) -> None:
    reward = genrl_rewards.load("hpsv3", args)
    scores = scored(reward, images=images, prompts=PROMPTS)
    for i, prompt in enumerate(("a red circle", "two < |Reward|> stars")):
        text = INSTRUCTION.replace("{text_prompt}", prompt) + reward_head.CLOSING
        own = by_hand([genrl_rewards.to_pil(images)[i]], text, head("rm_head", 1), "rm_head")
        assert scores.values[i] == pytest.approx(own[0].item(), abs=1e-4)
        assert scores.parts["sigma"][i] == pytest.approx(own[1].exp().item(), rel=1e-4)
        turned = by_hand([genrl_rewards.to_pil(images)[i]], text, head("rm_head", 1), "rm_head", rotary=True)
        assert abs(turned[0].item() - own[0].item()) > 1e-3, "the picture's own positions would give other scores"
    video = genrl_rewards.score(reward, images=images[None], prompts=[PROMPTS[0]]).values
    both = [genrl_rewards.score(reward, images=images[i : i + 1], prompts=[PROMPTS[0]]).values[0] for i in (0, 1)]
    assert video == pytest.approx([sum(both) / 2], abs=1e-4)


def test_editreward_is_the_mean_of_two_heads_and_texts(base: Path, images: torch.Tensor, tmp_path: Path) -> None:
    heads = head("rm_heads.head_0", 2) | head("rm_heads.head_1", 3)
    named = {f"model.{name}": value for name, value in backbone().state_dict().items()}  # since transformers 4.52
    save_file({k: v.contiguous() for k, v in (named | heads).items()}, tmp_path / "model.safetensors")
    (tmp_path / "prompts.py").write_text('FOLLOWING = """Follow {text_prompt}"""\nQUALITY = "Quality {text_prompt}"\n')
    texts = {"following": f"{tmp_path / 'prompts.py'}:FOLLOWING", "quality": f"{tmp_path / 'prompts.py'}:QUALITY"}
    reward = genrl_rewards.load("editreward", {"model": str(tmp_path), "base": str(base), "dtype": "float32", **texts})
    source = genrl_rewards.to_pil(images)[1]
    source.save(tmp_path / "s.png")
    columns = {"source_image": [str(tmp_path / "s.png")]}
    scores = scored(reward, images=images[:1], prompts=["add a hat"], columns=columns)
    pictures = [source, genrl_rewards.to_pil(images)[0]]
    own = [
        by_hand(pictures, f"{word} add a hat{reward_head.CLOSING}", heads, f"rm_heads.head_{i}")[0].item()
        for i, word in enumerate(("Follow", "Quality"))
    ]
    assert scores.values == pytest.approx([sum(own) / 2], abs=1e-4)
    assert [scores.parts["following"][0], scores.parts["quality"][0]] == pytest.approx(own, abs=1e-4)


def test_what_does_not_fit_is_refused(args: dict[str, str], checkpoint: Path, tmp_path: Path) -> None:
    def refused(words: str, **changes: str) -> None:
        with pytest.raises(ValueError, match=words):
            genrl_rewards.load("hpsv3", args | changes)

    refused("has no placeholder {text_prompt}", instruction="Rate it")
    refused("hpsv3: .* has no HPSv3.safetensors.*the folder is empty", model=str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llava"}')
    refused("is a 'llava' model; this reward needs 'qwen2_vl' or 'qwen2_5_vl'", base=str(tmp_path))
    held = {k: v.contiguous() for k, v in old_names(backbone()).items()}
    save_file(held, tmp_path / "HPSv3.safetensors")
    refused("has no scoring head: it lacks 0.weight, 3.weight, 5.weight", model=str(tmp_path))
    del held["model.layers.1.mlp.up_proj.weight"]
    save_file(held | head("rm_head", 1), tmp_path / "HPSv3.safetensors")
    refused("another architecture: it lacks 1 weights .language_model.layers.1.mlp.up_proj", model=str(tmp_path))
    save_file({"a": torch.zeros(1)}, tmp_path / "HPSv3.safetensors")
    refused("is not a reward model of this kind: it has a", model=str(tmp_path))

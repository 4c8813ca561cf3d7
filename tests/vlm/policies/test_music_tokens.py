"""MusicGen as a policy: what it samples is what it scores, recomputed place by place, and what transformers samples."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from genrl.config import ConfigError, check_files, load, load_located
from genrl.vlm.config import rules
from genrl.vlm.policies import codes
from genrl.vlm.policies.codes import CodePolicy, shape_codec, views
from genrl.vlm.policies.folder import load_trained
from genrl.vlm.policies.music_tokens import MusicPolicy
from genrl.vlm.policies.processor import Prompt
from genrl.vlm.policies.shape_decoder import ShapeDecoder, load_decoder
from genrl.vlm.train import train
from genrl_rewards.models.checkpoints import transformers
from tests.run_folders import rows
from tests.vlm import tiny_checkpoints, tiny_musicgen

TEXTS = ("a low rising tune", "a high tune")
STEPS = 9
FORMATS = {"mono": {}, "stereo": {"channels": 2}, "one_width": {"hidden": 16}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    place = tmp_path_factory.mktemp("musicgen")
    return {name: str(tiny_musicgen.save(place / name, **settings)) for name, settings in FORMATS.items()}


def encoded(policy: MusicPolicy) -> list:
    return [policy.encode(Prompt((text,), where=text)) for text in TEXTS]


def naive(policy: MusicPolicy, text: str, codes: Tensor, temperature: float) -> Tensor:
    """log-probabilities [K, F] of codes [K, F]: for each code a pass of transformers' own model over what is before
    it, written out from the paper's delays, with its guidance on whole logits."""
    model, books = policy.model, policy.model.decoder.num_codebooks
    pad, channels = model.decoder.config.pad_token_id, model.decoder.config.audio_channels
    late = [book // channels for book in range(books)]
    inputs = policy.processor(text=[text], return_tensors="pt")
    result = torch.zeros(codes.shape)
    for book in range(books):
        for frame in range(codes.shape[1]):
            step = frame + late[book]  # codes of steps before this one are known
            read = torch.full((books, step + 1), pad)
            for other in range(books):
                for before in range(codes.shape[1]):
                    if before + late[other] < step:
                        read[other, before + late[other] + 1] = codes[other, before]
            mask = inputs.attention_mask
            guided = model(input_ids=inputs.input_ids, attention_mask=mask, decoder_input_ids=read).logits[book, -1]
            empty = (torch.zeros(1, mask.shape[1], model.text_encoder.config.hidden_size),)
            free = model(encoder_outputs=empty, attention_mask=0 * mask, decoder_input_ids=read).logits[book, -1]
            logits = free + policy.guidance * (guided - free)
            result[book, frame] = (logits / temperature).log_softmax(-1)[codes[book, frame]]
    return result


class TestScores:
    @pytest.mark.parametrize("kind", list(FORMATS))
    def test_each_code_given_those_of_the_steps_before(self, folders: dict[str, str], kind: str) -> None:
        policy = MusicPolicy(folders[kind], STEPS)
        prompts = encoded(policy)
        sampled = policy.sample(prompts, 2, 0.9, [(0, text) for text in TEXTS])
        group = torch.tensor([0, 0, 1, 1])
        scored = policy.log_probs(prompts, sampled.tokens, sampled.mask, group=group, temperature=0.9, entropy=True)
        assert policy.guidance == 3.0 and scored.log_prob.dtype == torch.float32
        assert torch.allclose(scored.log_prob, sampled.log_prob, atol=2e-5)
        with torch.no_grad():
            for row, number in ((0, 0), (3, 1)):
                wanted = naive(policy, TEXTS[number], policy.codes(sampled.tokens)[row], 0.9)
                mine = policy.codes(torch.arange(wanted.numel())[None])[0]
                assert torch.allclose(scored.log_prob[row][mine], wanted, atol=2e-5)
        rows = policy.code_rows([prompts[k] for k in group], sampled.tokens, 0.9)
        picked = rows.gather(-1, policy.things(sampled.tokens)[..., None])[..., 0]
        assert torch.allclose(picked, scored.log_prob, atol=1e-6)
        assert torch.allclose(-(rows.exp() * rows).sum(-1), scored.entropy, atol=1e-5)


class TestSamples:
    def test_what_is_saved_plays_with_the_guidance_it_was_trained_with(self, folders, tmp_path) -> None:
        policy = MusicPolicy(folders["mono"], STEPS, guidance=2.0)
        policy.model.save_pretrained(tmp_path)
        policy.processor.save_pretrained(tmp_path)
        assert MusicPolicy(str(tmp_path), STEPS).guidance == 2.0 and MusicPolicy(folders["mono"], STEPS).guidance == 3.0
        inputs = policy.processor(text=list(TEXTS), padding=True, return_tensors="pt")
        made = transformers.MusicgenForConditionalGeneration.from_pretrained(tmp_path)
        theirs = made.generate(**inputs, do_sample=False, max_new_tokens=STEPS)
        sounds = torch.stack(policy.sample(encoded(policy), 1, 0.0, [(0,), (0,)]).made["audio"])
        assert torch.allclose(sounds.view(theirs.shape), theirs, atol=1e-5)
        settings = json.loads((tmp_path / "generation_config.json").read_text())
        (tmp_path / "generation_config.json").write_text(json.dumps(settings | {"guidance_scale": None}))
        assert MusicPolicy(str(tmp_path), STEPS).guidance == 1.0

    @pytest.mark.parametrize("kind", list(FORMATS))
    def test_the_most_probable_codes_are_those_of_transformers(self, folders: dict[str, str], kind: str) -> None:
        policy = MusicPolicy(folders[kind], STEPS)
        sampled = policy.sample(encoded(policy), 1, 0.0, [(0,), (0,)])
        inputs = policy.processor(text=list(TEXTS), padding=True, return_tensors="pt")
        theirs = policy.model.generate(**inputs, do_sample=False, max_new_tokens=STEPS)
        sounds = torch.stack(sampled.made["audio"])
        assert torch.allclose(sounds.view(theirs.shape), theirs, atol=1e-5)
        assert sampled.made["rate"] == [tiny_musicgen.RATE] * 2

    def test_a_piece_depends_on_its_own_text_and_key(self, folders: dict[str, str]) -> None:
        policy = MusicPolicy(folders["mono"], STEPS)
        both = policy.sample(encoded(policy), 2, 1.0, [(0,), (1,)]).tokens
        alone = policy.sample(encoded(policy)[1:], 2, 1.0, [(1,)]).tokens
        assert torch.equal(both[2:], alone) and not torch.equal(both[0], both[1])


def test_decoder_and_projection_learn_alone_and_encodec_stays_in_float32(folders: dict[str, str]) -> None:
    policy = MusicPolicy(folders["mono"], STEPS, dtype=torch.bfloat16)
    sampled = policy.sample(encoded(policy), 1, 1.0, [(0,), (1,)])
    assert {p.dtype for p in policy.model.audio_encoder.parameters()} == {torch.float32}
    assert {p.dtype for p in policy.model.decoder.parameters()} == {torch.bfloat16}
    assert sampled.log_prob.dtype == torch.float32 and sampled.made["audio"][0].dtype == torch.float32
    policy.log_probs(encoded(policy), sampled.tokens, sampled.mask, group=torch.arange(2)).log_prob.sum().backward()
    moved = {name.split(".")[0] for name, p in policy.model.named_parameters() if p.grad is not None}
    assert moved == {"decoder", "enc_to_dec_proj"}


def test_what_cannot_be_is_refused(folders: dict[str, str], tmp_path: Path) -> None:
    for steps in (5, 33):
        with pytest.raises(ValueError, match="takes 6 to 32"):
            MusicPolicy(folders["mono"], steps)
    with pytest.raises(ValueError, match="it is a 'llama' model; vlm.output: music takes a MusicGen"):
        MusicPolicy(str(Path(__file__).resolve().parents[3] / "assets" / "tiny-tunes"), STEPS)
    with pytest.raises(ValueError, match="row 3: MusicGen reads one text"):
        MusicPolicy(folders["mono"], STEPS).encode(Prompt(("a",), system="be", where="row 3"))
    model = transformers.MusicgenForConditionalGeneration.from_pretrained(folders["mono"])
    kept = {name: value for name, value in model.state_dict().items() if "lm_heads.2" not in name}
    model.save_pretrained(tmp_path, state_dict=kept)
    transformers.MusicgenProcessor.from_pretrained(folders["mono"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="lacks 1 weights"):
        MusicPolicy(str(tmp_path), STEPS)


# -- ShapeLLM-Omni's format: a VQVAE by its published names, a Qwen2.5-VL whose vocabulary holds its codes
RECIPE = Path(__file__).parents[3] / "configs" / "vlm" / "shapellm_omni_7b_hi_grpo.yaml"
LENGTH = 16  # of codes of four cells each: 4 x 4 x 4 cells, 16 x 16 x 16 voxels


def vqvae(widths: tuple[int, ...] = (16, 8, 4), latent: int = 8, cells: int = 4, codes: int = 24) -> dict[str, Tensor]:
    """The published file in small: as many blocks, fewer channels and codes."""
    torch.manual_seed(0)
    result = {"vq.embeddings.weight": torch.randn(codes, latent * cells), "Encoder.input_layer.bias": torch.zeros(4)}

    def conv(name: str, into: int, out: int, scale: float = 1.0) -> None:
        result[f"Decoder.{name}.weight"] = scale * torch.randn(out, into, 3, 3, 3) / (27 * into) ** 0.5
        result[f"Decoder.{name}.bias"] = 0.1 * torch.randn(out)

    def norm(name: str, width: int) -> None:
        result[f"Decoder.{name}.weight"] = 1 + 0.1 * torch.randn(width)
        result[f"Decoder.{name}.bias"] = 0.1 * torch.randn(width)

    def block(name: str, width: int) -> None:
        for part in ("1", "2"):
            norm(f"{name}.norm{part}", width)
            conv(f"{name}.conv{part}", width, width)

    conv("input_layer", latent, widths[0])
    for number in range(2):
        block(f"middle_block.{number}", widths[0])
    place = 0
    for level, width in enumerate(widths):
        for _ in range(2):
            block(f"blocks.{place}", width)
            place += 1
        if level + 1 < len(widths):
            conv(f"blocks.{place}.conv", width, 8 * widths[level + 1])
            place += 1
    norm("out_layer.0", widths[-1])
    conv("out_layer.2", widths[-1], 1, scale=3.0)
    return result


def by_hand(weights: dict[str, Tensor], codes: Tensor) -> Tensor:
    """The decoder once more, in functions and loops. codes [K] -> logits [G, G, G]."""

    def conv(x: Tensor, name: str) -> Tensor:
        return F.conv3d(x, weights[f"Decoder.{name}.weight"], weights[f"Decoder.{name}.bias"], padding=1)

    def norm(x: Tensor, name: str) -> Tensor:
        mean, var = x.mean(1, keepdim=True), x.var(1, unbiased=False, keepdim=True)
        scale, shift = (weights[f"Decoder.{name}.{part}"][None, :, None, None, None] for part in ("weight", "bias"))
        return (x - mean) / (var + 1e-5).sqrt() * scale + shift

    def block(x: Tensor, name: str) -> Tensor:
        hidden = conv(F.silu(norm(x, f"{name}.norm1")), f"{name}.conv1")
        return x + conv(F.silu(norm(hidden, f"{name}.norm2")), f"{name}.conv2")

    latent = weights["Decoder.input_layer.weight"].shape[1]
    vectors = weights["vq.embeddings.weight"][codes].reshape(-1, latent)  # a cell after the other
    side = round(len(vectors) ** (1 / 3))
    x = torch.empty(1, latent, side, side, side)
    for number, vector in enumerate(vectors):
        x[0, :, number // side**2, number // side % side, number % side] = vector
    x = conv(x, "input_layer")
    for number in range(2):
        x = block(x, f"middle_block.{number}")
    place = 0
    while f"Decoder.blocks.{place}.norm1.weight" in weights or f"Decoder.blocks.{place}.conv.weight" in weights:
        if f"Decoder.blocks.{place}.norm1.weight" in weights:
            x = block(x, f"blocks.{place}")
        else:
            wide = conv(x, f"blocks.{place}.conv")[0]
            x = torch.empty(1, len(wide) // 8, *(2 * size for size in wide.shape[1:]))
            for number, channel in enumerate(wide):  # 8 c + 4 z + 2 y + x
                x[0, number // 8, number // 4 % 2 :: 2, number // 2 % 2 :: 2, number % 2 :: 2] = channel
        place += 1
    return conv(F.silu(norm(x, "out_layer.0")), "out_layer.2")[0, 0]


def test_it_decodes_as_published() -> None:
    weights = vqvae()
    decoder = ShapeDecoder(weights, "it")
    codes = torch.randint(24, (3, LENGTH), generator=torch.Generator().manual_seed(1))
    logits = decoder.logits(codes)
    assert decoder.cells == 4 and logits.shape == (3, 16, 16, 16)
    for row, own in zip(logits, codes, strict=True):
        torch.testing.assert_close(row, by_hand(weights, own), rtol=1e-4, atol=1e-4)
    assert 0.05 < float((logits > 0).float().mean()) < 0.95
    (solid,) = decoder.solid(codes[:1])
    x, y, z = (int(place) for place in (logits[0] > 0).nonzero()[0])
    assert solid[15 - y, 15 - z, 15 - x] == 1 and int(solid.sum()) == int((logits[0] > 0).sum())


def test_other_weights_are_refused() -> None:
    with pytest.raises(ValueError, match="it holds no VQVAE of ShapeLLM-Omni"):
        ShapeDecoder({"a": torch.zeros(1)}, "it")
    weights = vqvae()
    del weights["Decoder.blocks.0.conv2.bias"]
    with pytest.raises(ValueError, match=r"lacks 1 weights \(blocks.0.conv2.bias"):
        ShapeDecoder(weights, "it")


def test_what_is_farther_is_darker() -> None:
    solid = torch.zeros(1, 4, 4, 4, dtype=torch.uint8)
    solid[0, 1, 0, 0], solid[0, 3, 0, 1] = 1, 1
    palette = torch.tensor([[255, 255, 255], [255, 255, 255]], dtype=torch.uint8)
    front, back = views(solid, palette, scale=1, fade=0.4)[0, :2]
    assert front[0, 0, :3].tolist() == pytest.approx([0.9, 0.7, 1.0])  # of three fourths .7, of nothing the background
    assert back[0, 0, 2:].tolist() == pytest.approx([1.0, 0.8])


@pytest.fixture(autouse=True)
def small_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (codes, rules):
        monkeypatch.setattr(module, "BODY", LENGTH)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2.5-VL that has the marks and 24 codes, and the VQVAE beside it."""
    folder = tiny_checkpoints.save("qwen2_5_vl", tmp_path_factory.mktemp("shapellm"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<mesh-start>", *(f"<mesh{number}>" for number in range(24)), "<mesh-end>"])
    model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer) + 6)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    torch.save(vqvae(), folder / "3DVQVAE.bin")
    return folder


def changes(checkpoint: Path, output: Path) -> list[str]:
    codec = f"vlm.codec={checkpoint}"
    return [
        *(f"vlm.path={checkpoint}", codec, "vlm.dtype=float32"),
        *("task={name: bodies}", "rewards=[{name: sharpness, views: max}, {name: saturation, views: sum}]"),
        "generation={prompts_per_iteration: 2, group_size: 4, max_new_tokens: 42}",
        *("trainer.micro_batch=8", "evaluation.every=0", "trackers=[]", "iterations=1", f"output={output}"),
    ]


def test_what_is_drawn_is_what_is_scored(checkpoint: Path) -> None:
    policy = CodePolicy(str(checkpoint), codec=shape_codec(str(checkpoint), 42))
    asked = [policy.encode(Prompt((text,), where=text)) for text in ("a red circle", "a tall blue chair")]
    assert policy.longest == 42 and policy.codec.thoughts == 3
    sampled = policy.sample(asked, 2, 1.0, [(0, 0), (0, 1)])
    group = torch.tensor([0, 0, 1, 1])
    scored = policy.log_probs(asked, sampled.tokens, sampled.mask, group=group)
    torch.testing.assert_close(scored.log_prob.detach(), sampled.log_prob, rtol=0, atol=2e-5)
    assert sampled.made["images"].shape == (4, 2, 6, 3, 32, 32)
    things = policy.things(sampled.tokens)
    assert things.shape == (4, 2, LENGTH) and "<mesh-start><mesh" in sampled.texts[0].replace(" ", "")
    decoder: Any = policy.codec.table
    assert torch.equal(decoder.solid(things[0]).bool().flip(1, 2, 3).permute(0, 3, 1, 2), decoder.logits(things[0]) > 0)
    assert all("visual" not in name for name, p in policy.model.named_parameters() if p.requires_grad)
    with pytest.raises(ValueError, match="15 codes of 4 cells are no cube"):
        load_decoder(str(checkpoint), 15)


def test_the_recipe_trains(checkpoint: Path, tmp_path: Path) -> None:
    config = load(RECIPE, changes(checkpoint, tmp_path / "run"))
    run = train(config)
    (row,) = rows(run)
    assert row["updates"] == 1 and row["grad_norm"] > 0 and row["ratio/max"] == 1.0
    trained: Any = load_trained(config, run)
    assert isinstance(trained.codec.table, ShapeDecoder) and any(p.any() for p in trained.parameters[1::2])


def test_a_codec_that_cannot_be_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    own = changes(checkpoint, tmp_path / "run")
    with pytest.raises(ConfigError, match="two bodies of 16 codes .* leave no token for thoughts; write"):
        load(RECIPE, [*own, "generation.max_new_tokens=36"])
    with pytest.raises(ConfigError, match="write voxels, or null"):
        load(RECIPE, [*own, "vlm.output=audio", "trainer={preset: grpo}"])
    with pytest.raises(ConfigError, match="has no 3DVQVAE.bin or 3DVQVAE.safetensors"):
        check_files(*load_located(RECIPE, [*own, f"vlm.codec={tmp_path}"]))

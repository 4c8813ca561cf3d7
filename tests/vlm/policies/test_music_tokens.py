"""MusicGen as a policy: what it samples is what it scores, recomputed place by place, and what transformers samples."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from genrl.vlm.policies.music_tokens import MusicPolicy
from genrl.vlm.policies.processor import Prompt
from genrl_rewards.models.checkpoints import transformers
from genrl_rewards.models.musicgen import delayed
from tests.vlm import tiny_musicgen

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
    told = policy.processor(text=[text], return_tensors="pt")
    found = torch.zeros(codes.shape)
    for book in range(books):
        for frame in range(codes.shape[1]):
            step = frame + late[book]  # codes of steps before this one are known
            read = torch.full((books, step + 1), pad)
            for other in range(books):
                for before in range(codes.shape[1]):
                    if before + late[other] < step:
                        read[other, before + late[other] + 1] = codes[other, before]
            mask = told.attention_mask
            guided = model(input_ids=told.input_ids, attention_mask=mask, decoder_input_ids=read).logits[book, -1]
            empty = (torch.zeros(1, mask.shape[1], model.text_encoder.config.hidden_size),)
            free = model(encoder_outputs=empty, attention_mask=0 * mask, decoder_input_ids=read).logits[book, -1]
            logits = free + policy.guidance * (guided - free)
            found[book, frame] = (logits / temperature).log_softmax(-1)[codes[book, frame]]
    return found


class TestScores:
    @pytest.mark.parametrize("kind", list(FORMATS))
    def test_each_code_given_those_of_the_steps_before(self, folders: dict[str, str], kind: str) -> None:
        policy = MusicPolicy(folders[kind], STEPS)
        prompts = encoded(policy)
        drawn = policy.sample(prompts, 2, 0.9, [(0, text) for text in TEXTS])
        group = torch.tensor([0, 0, 1, 1])
        scored = policy.log_probs(prompts, drawn.tokens, drawn.mask, group=group, temperature=0.9, entropy=True)
        assert policy.guidance == 3.0 and scored.log_prob.dtype == torch.float32
        assert torch.allclose(scored.log_prob, drawn.log_prob, atol=2e-5)
        with torch.no_grad():
            for row, number in ((0, 0), (3, 1)):
                wanted = naive(policy, TEXTS[number], policy.codes(drawn.tokens)[row], 0.9)
                mine = policy.codes(torch.arange(wanted.numel())[None])[0]
                assert torch.allclose(scored.log_prob[row][mine], wanted, atol=2e-5)
        rows = policy.code_rows([prompts[k] for k in group], drawn.tokens, 0.9)
        picked = rows.gather(-1, policy.things(drawn.tokens)[..., None])[..., 0]
        assert torch.allclose(picked, scored.log_prob, atol=1e-6)
        assert torch.allclose(-(rows.exp() * rows).sum(-1), scored.entropy, atol=1e-5)

    def test_a_code_changes_those_of_later_steps_alone(self, folders: dict[str, str]) -> None:
        """The delays: what a code of book k and frame f changes is at least a step later, padding is never scored."""
        policy = MusicPolicy(folders["mono"], STEPS)
        prompts, group = encoded(policy)[:1], torch.zeros(1, dtype=torch.int64)
        tokens = policy.sample(prompts, 1, 1.0, [(0,)]).tokens
        step = torch.arange(4)[:, None] + torch.arange(policy.frames)
        number = policy.codes(torch.arange(24)[None])[0]
        before = policy.log_probs(prompts, tokens, tokens, group=group).log_prob
        for book, frame in ((0, 0), (2, 1), (3, 5)):
            changed = tokens.clone()
            at = number[book, frame]
            changed[0, at] = (changed[0, at] + 1) % tiny_musicgen.CODES
            moved = (policy.log_probs(prompts, changed, changed, group=group).log_prob != before)[0][number]
            moved[book, frame] = False
            assert not bool(moved[step <= step[book, frame]].any())
            assert bool(moved.any()) == (step[book, frame] < step.max())


class TestGuidance:
    def test_what_is_saved_plays_with_the_guidance_it_was_trained_with(
        self, folders: dict[str, str], tmp_path: Path
    ) -> None:
        policy = MusicPolicy(folders["mono"], STEPS, guidance=2.0)
        policy.model.save_pretrained(tmp_path)
        policy.processor.save_pretrained(tmp_path)
        assert MusicPolicy(str(tmp_path), STEPS).guidance == 2.0 and MusicPolicy(folders["mono"], STEPS).guidance == 3.0
        told = policy.processor(text=list(TEXTS), padding=True, return_tensors="pt")
        made = transformers.MusicgenForConditionalGeneration.from_pretrained(tmp_path)
        theirs = made.generate(**told, do_sample=False, max_new_tokens=STEPS)
        sounds = torch.stack(policy.sample(encoded(policy), 1, 0.0, [(0,), (0,)]).made["audio"])
        assert torch.allclose(sounds.view(theirs.shape), theirs, atol=1e-5)
        settings = json.loads((tmp_path / "generation_config.json").read_text())
        (tmp_path / "generation_config.json").write_text(json.dumps(settings | {"guidance_scale": None}))
        assert MusicPolicy(str(tmp_path), STEPS).guidance == 1.0


class TestSamples:
    @pytest.mark.parametrize("kind", list(FORMATS))
    def test_the_most_probable_codes_are_those_of_transformers(self, folders: dict[str, str], kind: str) -> None:
        policy = MusicPolicy(folders[kind], STEPS)
        drawn = policy.sample(encoded(policy), 1, 0.0, [(0,), (0,)])
        told = policy.processor(text=list(TEXTS), padding=True, return_tensors="pt")
        theirs = policy.model.generate(**told, do_sample=False, max_new_tokens=STEPS)
        sounds = torch.stack(drawn.made["audio"])
        assert torch.allclose(sounds.view(theirs.shape), theirs, atol=1e-5)
        assert drawn.made["rate"] == [tiny_musicgen.RATE] * 2

    def test_a_piece_depends_on_its_own_text_and_key(self, folders: dict[str, str]) -> None:
        policy = MusicPolicy(folders["mono"], STEPS)
        both = policy.sample(encoded(policy), 2, 1.0, [(0,), (1,)]).tokens
        alone = policy.sample(encoded(policy)[1:], 2, 1.0, [(1,)]).tokens
        assert torch.equal(both[2:], alone) and not torch.equal(both[0], both[1])

    def test_codes_and_tokens(self, folders: dict[str, str]) -> None:
        """Tokens are in the order of steps; by book and frame, delayed, they are the grid that the decoder reads."""
        policy = MusicPolicy(folders["mono"], 6)
        codes = policy.codes(torch.arange(12)[None])
        assert codes[0].tolist() == [[0, 1, 3], [2, 4, 6], [5, 7, 9], [8, 10, 11]]
        pad = tiny_musicgen.CODES
        wanted = [[pad, 0, 1, 3, pad, pad, pad], [pad, pad, 2, 4, 6, pad, pad]]
        wanted += [[pad, pad, pad, 5, 7, 9, pad], [pad, pad, pad, pad, 8, 10, 11]]
        assert delayed(policy.model.decoder, codes)[0].tolist() == wanted


class TestTraining:
    def test_decoder_and_projection_learn_and_nothing_else(self, folders: dict[str, str]) -> None:
        policy = MusicPolicy(folders["mono"], STEPS)
        drawn = policy.sample(encoded(policy), 1, 1.0, [(0,), (1,)])
        policy.log_probs(encoded(policy), drawn.tokens, drawn.mask, group=torch.arange(2)).log_prob.sum().backward()
        moved = {name.split(".")[0] for name, p in policy.model.named_parameters() if p.grad is not None}
        assert moved == {"decoder", "enc_to_dec_proj"}

    def test_encodec_stays_in_float32(self, folders: dict[str, str]) -> None:
        policy = MusicPolicy(folders["mono"], STEPS, dtype=torch.bfloat16)
        drawn = policy.sample(encoded(policy), 1, 1.0, [(0,), (1,)])
        assert {p.dtype for p in policy.model.audio_encoder.parameters()} == {torch.float32}
        assert {p.dtype for p in policy.model.decoder.parameters()} == {torch.bfloat16}
        assert drawn.log_prob.dtype == torch.float32 and drawn.made["audio"][0].dtype == torch.float32


def test_what_cannot_be_is_refused(folders: dict[str, str], tmp_path: Path) -> None:
    for steps in (5, 33):
        with pytest.raises(ValueError, match="takes 6 to 32"):
            MusicPolicy(folders["mono"], steps)
    with pytest.raises(ValueError, match="it is a 'llama' model; vlm.output: music takes a MusicGen"):
        MusicPolicy(str(Path(__file__).resolve().parents[3] / "assets" / "tiny-tunes"), STEPS)
    with pytest.raises(ValueError, match="row 3: MusicGen reads a text"):
        MusicPolicy(folders["mono"], STEPS).encode(Prompt(("a",), system="be", where="row 3"))
    model = transformers.MusicgenForConditionalGeneration.from_pretrained(folders["mono"])
    kept = {name: value for name, value in model.state_dict().items() if "lm_heads.2" not in name}
    model.save_pretrained(tmp_path, state_dict=kept)
    transformers.MusicgenProcessor.from_pretrained(folders["mono"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="lacks 1 weights"):
        MusicPolicy(str(tmp_path), STEPS)

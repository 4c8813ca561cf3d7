"""Whole tiny runs of a MusicGen: MusicRL with all weights and with a LoRA, the reward model of preferences."""

import json
import math
import wave
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import genrl_rewards
from genrl.cli.app import app
from genrl.config import load
from genrl.config.errors import ConfigError
from genrl.runtime.loop.process import Process
from genrl.runtime.show.compare.page import as_wav
from genrl.vlm.common import Headed
from genrl.vlm.methods.music_preference import train as music_preference
from genrl.vlm.methods.music_preference.train import loss, piece, recorded
from genrl.vlm.methods.music_rl import train as music_rl
from genrl.vlm.policies.folder import load_trained
from genrl.vlm.policies.music_tokens import MusicPolicy
from genrl.vlm.rollout.rollout import totals
from genrl.vlm.train import train
from genrl_rewards.models.checkpoints import transformers
from genrl_rewards.models.musicgen import MusicgenReward, read_wav, with_reward_head
from tests.rewards.tiny_clap import save_tiny_clap
from tests.run_folders import rows
from tests.vlm import tiny_musicgen, vlm_runs

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "vlm"
LORA = {"lora": {"rank": 2, "targets": ["q_proj", "out_proj"]}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_musicgen.save(tmp_path_factory.mktemp("musicgen") / "tiny"))


def config(place: Path, model: str, preset: str, vlm: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A reward that needs nothing of the sound but its samples."""
    place.mkdir(parents=True, exist_ok=True)
    rule = place / "rule.py"
    rule.write_text("def loud(audio):\n    return [float(sound.square().mean()) for sound in audio]\n")
    settings = {
        "vlm": {"path": model, "output": "music", **(vlm or {})},
        "task": {"name": "tunes"},
        "generation": {"prompts_per_iteration": 2, "group_size": 3, "max_new_tokens": 7},
        "rewards": [{"name": f"{rule}:loud"}],
        "trainer": {"preset": preset},
        "iterations": 2,
    }
    return vlm_runs.config(place, **{**settings, **changes})


def pairs(place: Path, model: str, number: int = 12) -> dict[str, Any]:
    """Files of pairs of codes, of which that with the larger ones was preferred, and the sections that name them."""
    generator = torch.Generator().manual_seed(0)
    place.mkdir(parents=True, exist_ok=True)
    for split in ("train", "eval"):
        lines = []
        for _ in range(number):
            two = torch.randint(tiny_musicgen.CODES // 2, (2, 4, 5), generator=generator)
            columns = {"preferred": (two[0] + tiny_musicgen.CODES // 2).tolist(), "other": two[1, :, :4].tolist()}
            lines.append(json.dumps({"prompt": "a low tune", **columns}))
        (place / f"{split}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return {
        "vlm": {"path": model, "output": "music_reward"},
        "task": {"name": None, "train": str(place / "train.jsonl"), "eval": str(place / "eval.jsonl")},
        "trainer": {"algorithm": "music_preference", "batch_size": 8, "micro_batch": 3},
        "optimizer": {"lr": 3e-3},
        "evaluation": {"every": 1, "questions": number},
        "rewards": None,
        "generation": None,
    }


class TestMusicRL:
    def test_a_run_keeps_its_sounds_and_a_model_of_transformers(self, model: str, tmp_path: Path) -> None:
        """And its first loss is that of values of nothing."""
        settings = config(tmp_path, model, "music_rl", iterations=1, evaluation={"every": 1, "questions": 2})
        run = train(settings)
        (first,) = [row for row in rows(run) if "loss" in row]
        square = first["reward/total_mean"] ** 2 + first["reward/total_std"] ** 2
        assert first["kl"] == pytest.approx(0.0, abs=1e-6) and first["sampler/gap_mean"] < 1e-5
        assert first["loss/value"] == pytest.approx(square, rel=1e-4) and first["grad_norm/baseline"] > 0
        assert first["loss"] == pytest.approx(first["loss/policy"] + first["loss/value"], rel=1e-5)
        with wave.open(str(run / "samples" / "step-000001-00.wav")) as kept:
            assert (kept.getframerate(), kept.getnframes()) == (tiny_musicgen.RATE, 4 * tiny_musicgen.FRAME)
        made = transformers.MusicgenForConditionalGeneration.from_pretrained(run / "model")
        inputs = transformers.AutoProcessor.from_pretrained(run / "model")(text=["a low tune"], return_tensors="pt")
        assert made.generate(**inputs, max_new_tokens=7).shape == (1, 1, 4 * tiny_musicgen.FRAME)
        for name, value in load_trained(settings, run).model.state_dict().items():
            assert torch.equal(value, made.state_dict()[name])

    @pytest.mark.parametrize("vlm", [None, LORA])
    def test_the_loss_of_the_value_trains_the_value_alone(self, vlm: dict[str, Any] | None, model, tmp_path) -> None:
        with vlm_runs.opened(config(tmp_path, model, "music_rl", vlm)) as run:
            baseline, own = run.heads["baseline"], dict(run.policy.body.named_parameters())
            if vlm:
                for name, parameter in baseline.body.named_parameters():
                    assert (parameter is own[name]) == ("lora_" not in name)
                trained = [p for p in baseline.parameters() if p.requires_grad]
                assert len(trained) == 2 + sum("lora_" in name for name in own)
            torch.nn.init.normal_(baseline.head.weight)  # at 0 nothing below the head has a gradient
            for _ in run.loop.iterations():
                answers, _ = run.draw()
                reward = totals(run.config, answers.scores).float()
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(music_rl, "totals", lambda *_, r=reward: torch.full_like(r, torch.nan))
                    assert "kl" not in music_rl.learn(run, run.config.trainer, answers)  # a tune without a score
                given = music_rl.recorded(run, answers, torch.arange(len(reward)), reward, 1.0)
                result = music_rl.loss(run.config.trainer, Headed(run.policy, run.heads), given)
                result["value_loss"].backward()
                break
            assert [name for name, p in run.policy.model.named_parameters() if p.grad is not None] == []
            body = [float(p.grad.norm()) for p in baseline.body.parameters() if p.grad is not None]
            assert body and max(body) > 0

    def test_a_merged_lora_plays_as_the_adapted_model(self, model: str, tmp_path: Path) -> None:
        settings = config(tmp_path, model, "music_rl", LORA, iterations=1, optimizer={"lr": 1e-2})
        run = train(settings)
        result = CliRunner().invoke(app, ["export", str(run), "--full", "--out", str(tmp_path / "out")])
        assert result.exit_code == 0, result.output
        adapted, merged = load_trained(settings, run), MusicPolicy(str(tmp_path / "out"), 7)
        prompt = [merged.encode(vlm_runs.first_question(settings))]
        tunes = merged.sample(prompt, 2, 1.0, [(0,)])
        group = torch.zeros(2, dtype=torch.int64)
        scores = [one.log_probs(prompt, tunes.tokens, tunes.mask, group=group).log_prob for one in (adapted, merged)]
        assert torch.allclose(*scores, atol=1e-5)
        before = MusicPolicy(model, 7).log_probs(prompt, tunes.tokens, tunes.mask, group=group).log_prob
        assert not torch.allclose(before, scores[0], atol=1e-4)

    def test_the_recipe_for_the_published_model_runs_on_a_tiny_one(self, model: str, tmp_path: Path) -> None:
        captions = tmp_path / "captions.jsonl"
        captions.write_text("\n".join(json.dumps({"caption": f"a {word} tune"}) for word in ("low", "high", "steady")))
        changes = [f"vlm.path={model}", f"task.train={captions}", "task.eval=null", "evaluation.every=0"]
        changes += ["checkpoint.every=1", "generation={prompts_per_iteration: 3, max_new_tokens: 7}", "iterations=1"]
        changes += [f"rewards.0.args.model={save_tiny_clap(tmp_path / 'clap')}", f"output={tmp_path / 'run'}"]
        run = train(load(CONFIGS / "musicgen_small.yaml", changes))
        (row,) = [row for row in rows(run) if "loss" in row]
        assert math.isfinite(row["loss"]) and row["grad_norm"] > 0 and -1 <= row["reward/clap_mean"] <= 1


class TestRewardModel:
    def test_it_learns_and_scores_sounds(self, model: str, tmp_path: Path) -> None:
        whole = train(vlm_runs.config(tmp_path, **pairs(tmp_path / "data", model), iterations=12))
        logged = [row for row in rows(whole) if "loss" in row]
        assert logged[0]["loss"] == pytest.approx(math.log(2)) and logged[0]["pairs/accuracy"] == 0.5  # all scores 0
        assert logged[-1]["loss"] < 0.6 and logged[-1]["pairs/accuracy"] > 0.8
        judged = [row for row in rows(whole) if "eval/accuracy_mean" in row]
        assert judged[0]["eval/accuracy_mean"] == 0.5 and judged[-1]["eval/accuracy_mean"] > 0.7
        weights = load_file(whole / "model" / "model.safetensors")
        before = load_file(Path(model) / "model.safetensors")
        moved = {name.split(".")[0] for name in before if not torch.equal(before[name], weights[name])}
        assert moved == {"decoder", "enc_to_dec_proj"} and bool((weights["reward_head.weight"] != 0).all())
        # as a reward: the score of a sound is that of the codes which EnCodec hears in it
        reward = genrl_rewards.load("music_preference", {"model": str(whole / "model")})
        held = with_reward_head(str(whole / "model"))
        sounds = [torch.randn(frames * tiny_musicgen.FRAME) / 3 for frames in (5, 3)]
        scores = reward(sounds, [tiny_musicgen.RATE] * 2, ["a low tune", "a tune"])
        ids = transformers.AutoTokenizer.from_pretrained(model)(["a low tune"], return_tensors="pt")
        with torch.no_grad():
            codes = [held.heard(sounds[0], tiny_musicgen.RATE)]
            wanted = held.scores(ids.input_ids, ids.attention_mask, codes)
        assert codes[0].shape == (4, 5) and scores[0] == pytest.approx(float(wanted), abs=1e-5)

    def test_the_loss_is_that_of_bradley_and_terry_over_the_update(self, model: str, tmp_path: Path) -> None:
        settings = vlm_runs.config(tmp_path, **pairs(tmp_path / "data", model))
        with vlm_runs.opened(settings) as run:
            torch.nn.init.normal_(run.policy.model.reward_head.weight)
            given = recorded(run.policy, [run.questions[k] for k in range(3)], 8)
            actual = loss(settings.trainer, run.policy, given)
            wanted = -torch.nn.functional.logsigmoid(actual["margin"]).sum() / 8
        assert torch.allclose(actual["loss"].detach(), wanted) and actual["loss"].requires_grad

    def test_a_process_without_held_out_pairs_has_none_right(self, model, tmp_path, monkeypatch) -> None:
        monkeypatch.setattr(Process, "share", lambda self, number: range(0))
        with vlm_runs.opened(vlm_runs.config(tmp_path, **pairs(tmp_path / "data", model))) as run:
            assert music_preference.evaluate(run)["eval/accuracy_mean"] == 0

    def test_padding_and_neighbours_change_no_score(self, model: str) -> None:
        held: MusicgenReward = with_reward_head(model)
        torch.nn.init.normal_(held.reward_head.weight)
        ids, mask = torch.tensor([[0, 3, 4, 1], [3, 5, 6, 1]]), torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
        codes = [torch.randint(tiny_musicgen.CODES, (4, frames)) for frames in (3, 6)]
        with torch.no_grad():
            both = held.scores(ids, mask, codes)
            alone = held.scores(ids[:1, 1:], mask[:1, 1:], codes[:1])
        assert both[0] == pytest.approx(float(alone), abs=1e-5)

    def test_a_piece_is_codes_or_a_file_beside_the_data(self, model: str, tmp_path: Path) -> None:
        sound = 0.5 * torch.randn(5 * tiny_musicgen.FRAME).clamp(-1, 1)
        (tmp_path / "a.wav").write_bytes(as_wav(sound, tiny_musicgen.RATE))
        kept, rate = read_wav(tmp_path / "a.wav")
        assert rate == tiny_musicgen.RATE and torch.allclose(kept, sound, rtol=0, atol=0.51 / 32767)
        line = {"prompt": "a tune", "preferred_path": "a.wav", "other": [[1] * 5] * 4}
        for split in ("train", "eval"):
            (tmp_path / f"{split}.jsonl").write_text("\n".join([json.dumps(line)] * 8), encoding="utf-8")
        names = {"name": None, **{split: str(tmp_path / f"{split}.jsonl") for split in ("train", "eval")}}
        with vlm_runs.opened(vlm_runs.config(tmp_path, **{**pairs(tmp_path / "d", model), "task": names})) as run:
            row = run.questions[0]
            held = run.policy.model.heard(kept, rate)
            assert torch.equal(piece(run.policy, row, "preferred"), held)
            assert piece(run.policy, row, "other").tolist() == [[1] * 5] * 4

    def test_pairs_that_are_none_are_refused_with_their_row(self, model, tmp_path) -> None:
        for changed, text in (
            ({"preferred": [[1]] * 4}, "train.jsonl:2: .* a piece is 4 lists of 3 or more codes"),
            ({"preferred": [[1] * 3, [1] * 3, [1] * 3, [8] * 3]}, "codes are 0 to 7, found 1 to 8"),
            ({"preferred": None}, "columns: preferred, other"),
            ({"preferred": None, "preferred_path": "b.wav"}, "2 channels; this model hears one channel of 800"),
            ({"preferred": None, "preferred_path": "c.wav"}, "train.jsonl:2: .* of 119 samples; .* hears 120 or more"),
        ):
            sections = pairs(tmp_path / "data", model)
            (tmp_path / "data" / "b.wav").write_bytes(as_wav(torch.zeros(2, 80), tiny_musicgen.RATE))
            (tmp_path / "data" / "c.wav").write_bytes(as_wav(torch.zeros(119), tiny_musicgen.RATE))
            file = tmp_path / "data" / "train.jsonl"
            lines = file.read_text().splitlines()
            lines[1] = json.dumps({**json.loads(lines[1]), **changed})
            file.write_text("\n".join(lines), encoding="utf-8")
            with pytest.raises(ValueError, match=text):
                train(vlm_runs.config(tmp_path, **sections))
            assert not (tmp_path / "run" / "metrics.jsonl").exists()

    def test_what_does_not_fit_is_refused(self, model: str, tmp_path: Path) -> None:
        for changes, text in (
            ({"vlm": {"output": "music"}}, "write output: music_reward"),
            ({"vlm": {"output": "music_reward", **LORA}}, "trained whole"),
            ({"rewards": [{"name": "exact"}]}, "pairs say what is better"),
            ({"economy": {"keep": 2}, "generation": {"group_size": 4}}, "economy.keep.*reads whole groups"),
        ):
            sections = pairs(tmp_path / "data", model)
            merged = {**sections, **changes, "vlm": {**sections["vlm"], **changes.get("vlm", {})}}
            with pytest.raises(ConfigError, match=text):
                vlm_runs.config(tmp_path, **merged)

"""Make the embedded MusicGen: a T5 encoder, a decoder of two codebooks, and an EnCodec, in transformers' format.

    python assets/build_tiny_musicgen.py     # assets/tiny-musicgen, about three minutes of one core

Its world is that of `genrl/playground/tasks/making.py`, a note to a frame. The first codebook is the note: silence, or
one of twelve pitches. The second is how it is played: pure or noisy, in four loudnesses. EnCodec's decoder learns the
sounds of these codes, and its encoder to find the codes of sounds. The decoder of codes is taught by lessons of which
many are wrong, as in `build_tiny_codes.py`, with loudness at random; a tenth of them has no text, for guidance.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from genrl.mdp.noise import derive_seed
from genrl.playground.tasks import making
from genrl_rewards.models.checkpoints import transformers
from genrl_rewards.models.musicgen import delayed, pattern, text_states

ASSETS = Path(__file__).resolve().parent
CODES, BOOKS, WIDTH = 16, 2, 32
PIECES, UNHEARD = 64, 0.1
WRONG, NOISY, GAP = 0.5, 0.5, 0.1
LOUDNESS = (0.25, 0.5, 0.75, 1.0)


def sounds() -> Tensor:
    """What each pair of codes sounds like, [16, 16, 800]: note by how it is played; codes above wrap around."""
    notes = torch.from_numpy(making.frames())
    table = torch.zeros(CODES, CODES, making.SAMPLES)
    for note in range(1, making.PITCHES + 1):
        for way in range(CODES):
            table[note, way] = LOUDNESS[way // 2 % 4] * notes[1 + 2 * (note - 1) + way % 2]
    return table


def lesson(rng: np.random.Generator) -> tuple[str, list[list[int]]]:
    """A prompt, and the codes [2][9] of a tune."""

    def random_tune() -> tuple[str, str]:
        return making.REGISTERS[rng.integers(2)], making.COURSES[rng.integers(3)]

    register, course = random_tune()
    played = random_tune() if rng.random() < WRONG else (register, course)
    pitches = making.pitches(rng, played[1], played[0])
    notes = [0 if rng.random() < GAP else 1 + pitch for pitch in pitches]
    ways = [2 * int(rng.integers(4)) + int(rng.random() < NOISY) for _ in notes]
    return f"a {register} {course} tune", [notes, ways]


def tokenizer() -> transformers.T5Tokenizer:
    words = ["a", "tune", *making.COURSES, *making.REGISTERS]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((f"▁{word}", -1.0) for word in words)]
    return transformers.T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=64)


def model(vocabulary: int) -> transformers.MusicgenForConditionalGeneration:
    text = transformers.T5Config(
        vocab_size=vocabulary, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=1, num_heads=4, dropout_rate=0.0
    )
    audio = transformers.EncodecConfig(
        target_bandwidths=[BOOKS * 4 * 0.01],
        sampling_rate=making.RATE,
        hidden_size=WIDTH,
        num_filters=6,
        upsampling_ratios=[5, 5, 4, 8],
        kernel_size=3,
        last_kernel_size=7,
        use_causal_conv=False,
        num_lstm_layers=1,
        codebook_size=CODES,
    )
    decoder = transformers.MusicgenDecoderConfig(
        vocab_size=CODES,
        max_position_embeddings=64,
        num_hidden_layers=2,
        ffn_dim=128,
        num_attention_heads=4,
        hidden_size=64,
        dropout=0.0,
        num_codebooks=BOOKS,
        pad_token_id=CODES,
        bos_token_id=CODES,
    )
    made = transformers.MusicgenForConditionalGeneration(
        transformers.MusicgenConfig(text_encoder=text, audio_encoder=audio, decoder=decoder)
    )
    with torch.no_grad():
        for parameter in [*made.decoder.parameters(), *made.enc_to_dec_proj.parameters()]:
            if parameter.dim() == 2:
                parameter.mul_(4.0)  # the usual spread of .02 is for thousands of channels
        for layer, size in zip(made.audio_encoder.quantizer.layers, (2.0, 1.0), strict=True):
            layer.codebook.embed.copy_(size * torch.randn(CODES, WIDTH))  # the second book refines the first
    made.generation_config.guidance_scale = 3.0  # as published
    made.generation_config.do_sample = True
    made.generation_config.max_length = making.NOTES + BOOKS
    made.generation_config.pad_token_id = made.generation_config.bos_token_id = CODES
    made.generation_config.decoder_start_token_id = CODES
    return made


def fit(name: str, parameters: Iterable[Tensor], loss: Callable[[int], Tensor], steps: int, rate: float) -> None:
    held = list(parameters)
    optimizer, started = torch.optim.AdamW(held, lr=rate, betas=(0.9, 0.95), weight_decay=0.0), time.process_time()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min((step + 1) / 40, 1.02 - step / steps)
        value = loss(step)
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(held, 1.0)
        optimizer.step()
        if (step + 1) % 200 == 0:
            print(f"{name} {step + 1}: {float(value.detach()):.4f}, {time.process_time() - started:.0f} s", flush=True)


def teach_sounds(codec: transformers.EncodecModel, steps: int) -> None:
    table = sounds()

    def random_codes(step: int) -> tuple[Tensor, Tensor]:
        codes = torch.randint(CODES, (4, BOOKS, making.NOTES), generator=torch.Generator().manual_seed(step))
        return codes, table[codes[:, 0], codes[:, 1]].flatten(1)

    def decoding(step: int) -> Tensor:
        codes, sound = random_codes(step)
        return F.mse_loss(codec.decode(codes[None], [None]).audio_values[:, 0], sound) / sound.var()

    def encoding(step: int) -> Tensor:
        codes, _ = random_codes(step)
        heard = codes[:, 0].clamp(max=making.PITCHES + 1) % (making.PITCHES + 1)  # those that can be told apart
        codes = torch.stack([heard, torch.where(heard > 0, codes[:, 1] % 8, 0)], 1)
        with torch.no_grad():
            sound = codec.decode(codes[None], [None]).audio_values
            wanted = codec.quantizer.decode(codes.transpose(0, 1))
        return F.mse_loss(codec.encoder(sound), wanted)

    fit("decoder of sounds", codec.decoder.parameters(), decoding, steps, 3e-3)
    fit("encoder of sounds", codec.encoder.parameters(), encoding, steps, 3e-3)


def teach_tunes(made: transformers.MusicgenForConditionalGeneration, words: transformers.T5Tokenizer) -> None:
    lessons = [lesson(np.random.default_rng(derive_seed("tiny-musicgen", 0, k))) for k in range(4000)]
    ids = words([text for text, _ in lessons], return_tensors="pt").input_ids
    codes = torch.tensor([tune for _, tune in lessons])
    places = pattern(made.decoder, making.NOTES)[:, 1:]

    def loss(step: int) -> Tensor:
        rng = torch.Generator().manual_seed(step)
        rows = torch.randint(len(ids), (PIECES,), generator=rng)
        heard = (torch.rand(PIECES, generator=rng) >= UNHEARD).long()[:, None].expand(-1, ids.shape[1])
        grid = delayed(made.decoder, codes[rows])
        logits = made.decoder(
            input_ids=grid[..., :-1].flatten(0, 1),
            encoder_hidden_states=text_states(made, ids[rows], heard),
            encoder_attention_mask=heard,
        ).logits.view(PIECES, BOOKS, -1, CODES)
        return F.cross_entropy(logits[:, places].flatten(0, 1), grid[..., 1:][:, places].flatten())

    fit("tunes", [p for n, p in made.named_parameters() if not n.startswith("audio_encoder")], loss, 800, 3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ASSETS / "tiny-musicgen")
    parser.add_argument("--steps", type=int, default=1400, help="of EnCodec's decoder")
    args = parser.parse_args()
    torch.manual_seed(0)
    words = tokenizer()
    made = model(len(words))
    print(f"{sum(p.numel() for p in made.parameters()):,} numbers", flush=True)
    teach_sounds(made.audio_encoder, args.steps)
    teach_tunes(made, words)
    features = transformers.EncodecFeatureExtractor(sampling_rate=making.RATE)
    transformers.MusicgenProcessor(features, words).save_pretrained(args.out)
    made.save_pretrained(args.out, state_dict={name: value.half() for name, value in made.state_dict().items()})


if __name__ == "__main__":
    main()

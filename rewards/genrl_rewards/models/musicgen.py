"""MusicGen's text states and delay pattern, and a MusicGen with a score in place of its codes (MusicRL's preferences).

A piece of F frames has K codes a frame, a book of codes to each. They are predicted in F + K - 1 steps: book k is k
steps late (of a stereo model the pairs of books), and what is before or after it is padding. Steps are counted as
`generate(max_new_tokens=F + K - 1)` does; step 0 of a grid is the start token.
"""

from __future__ import annotations

import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from genrl_rewards.models.checkpoints import transformers


def delays(decoder: Any) -> int:
    """How many steps the last book is late, K - 1, of a stereo model K / 2 - 1."""
    books = int(decoder.num_codebooks)
    return books // (2 if decoder.config.audio_channels == 2 else 1) - 1


def fewest(decoder: Any) -> int:
    """Frames that a piece has at least; for fewer the model makes no delay pattern."""
    return max(delays(decoder), 1)


def pattern(decoder: Any, frames: int) -> Tensor:
    """Which places of a grid hold codes: bool [K, frames + delays + 1], by the model's own rule."""
    start = torch.full((decoder.num_codebooks, 1), decoder.config.pad_token_id)
    _, mask = decoder.build_delay_pattern_mask(start, decoder.config.pad_token_id, frames + delays(decoder) + 1)
    places: Tensor = mask == -1
    return places


def delayed(decoder: Any, codes: Tensor) -> Tensor:
    """Codes int64 [B, K, F] as the grid [B, K, F + delays + 1] that the decoder reads, start and padding included."""
    places = pattern(decoder, codes.shape[-1]).to(codes.device)
    grid = codes.new_full((len(codes), *places.shape), decoder.config.pad_token_id)
    grid[:, places] = codes.flatten(1)
    return grid


def text_states(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """What the decoder attends to, [B, L, H]: states of the text, 0 where masked. A row that is masked wholly is
    MusicGen's unconditional one."""
    states = model.text_encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    if hasattr(model, "enc_to_dec_proj"):
        states = model.enc_to_dec_proj(states)
    hidden: Tensor = states * mask[..., None]
    return hidden


def read_wav(file: str | Path, *, header: bool = False) -> tuple[Tensor, int]:
    """A .wav file of 16 bits: the waveform in [-1, 1], [S] or [channels, S], and its rate. header: of the waveform the
    shape alone, a tensor on the device "meta". Raises ValueError for any other file."""
    try:
        with wave.open(str(file), "rb") as stream:
            if stream.getsampwidth() != 2:
                raise ValueError(f"{file} has {8 * stream.getsampwidth()} bits; write it with 16")
            rate, channels, number = stream.getframerate(), stream.getnchannels(), stream.getnframes()
            if header:
                return torch.empty((number,) if channels == 1 else (channels, number), device="meta"), rate
            data = stream.readframes(number)
    except (wave.Error, EOFError, OSError) as error:
        raise ValueError(f"{file} is no .wav file that can be read: {error}") from error
    sound = torch.from_numpy(np.frombuffer(data, dtype="<i2") / np.float32(32767))
    return (sound if channels == 1 else sound.view(-1, channels).T), rate


_Musicgen: Any = transformers.MusicgenForConditionalGeneration  # its signatures are typed in part only


class MusicgenReward(_Musicgen):  # type: ignore[misc]
    """A MusicGen with a linear head that gives one number to a text and the codes of a piece."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.reward_head = torch.nn.Linear(config.decoder.hidden_size, 1)
        self.post_init()

    def scores(self, ids: Tensor, mask: Tensor, codes: Sequence[Tensor]) -> Tensor:
        """Scores of texts [B, L] and pieces int64 [K, F], which may differ in length: [B] in float32.

        The mean over a piece's steps of the decoder's states, through the head. Steps after a piece's end are padding,
        which no step before them sees.
        """
        device, pad = self.device, self.decoder.config.pad_token_id
        grids = [delayed(self.decoder, code[None].to(device))[0] for code in codes]
        steps = max(grid.shape[1] for grid in grids)
        read = torch.stack([F.pad(grid, (0, steps - grid.shape[1]), value=pad) for grid in grids])
        states = self.decoder.model(
            input_ids=read.flatten(0, 1),
            encoder_hidden_states=text_states(self, ids.to(device), mask.to(device)),
            encoder_attention_mask=mask.to(device),
            use_cache=False,
        ).last_hidden_state
        last = torch.tensor([grid.shape[1] for grid in grids], device=device)[:, None]
        valid = (torch.arange(steps, device=device) < last)[..., None]
        mean = (states * valid).sum(1) / last
        scores: Tensor = self.reward_head(mean.to(self.reward_head.weight.dtype))[:, 0].float()
        return scores

    def check_sound(self, sound: Tensor, rate: int) -> None:
        """Raises ValueError for a waveform that this model does not hear: stereo, of another rate, or too short."""
        own_rate, least = (
            int(self.config.sampling_rate),
            fewest(self.decoder) * int(self.audio_encoder.config.hop_length),
        )
        if rate != own_rate or sound.ndim != 1:
            kind = f"{rate} samples per second" if rate != own_rate else f"{len(sound)} channels"
            raise ValueError(f"a sound of {kind}; this model hears one channel of {own_rate}: resample it first")
        if len(sound) < least:
            raise ValueError(f"a sound of {len(sound)} samples; this model hears {least} or more")

    @torch.no_grad()
    def heard(self, sound: Tensor, rate: int) -> Tensor:
        """The codes int64 [K, F] of a waveform [S], by its own EnCodec. Raises ValueError as `check_sound`, and where
        EnCodec has other books than the decoder."""
        self.check_sound(sound, rate)
        codes = self.audio_encoder.encode(sound.to(self.device).float()[None, None]).audio_codes
        if codes.shape[0] != 1 or codes.shape[2] != self.decoder.num_codebooks:
            books = f"{codes.shape[0]} chunks of {codes.shape[2]} books"
            raise ValueError(f"EnCodec gives {books}, and the decoder reads one of {self.decoder.num_codebooks}")
        codes_heard: Tensor = codes[0, 0]
        return codes_heard


def with_reward_head(path: str) -> MusicgenReward:
    """A reward model as it was saved, or a MusicGen with a head of zeros, its parameters without gradients. Raises
    ValueError where weights are missing."""
    model, report = MusicgenReward.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    missing = sorted(report["missing_keys"])
    if set(missing) == {"reward_head.weight", "reward_head.bias"}:
        for parameter in model.reward_head.parameters():
            torch.nn.init.zeros_(parameter)
    elif missing:
        raise ValueError(f"{path!r} lacks {len(missing)} weights of a MusicGen ({', '.join(missing[:3])}...)")
    reward_model: MusicgenReward = model.eval().requires_grad_(False)
    return reward_model

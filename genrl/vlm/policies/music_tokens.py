"""MusicGen as a policy: texts in, the codes of all books and their log-probabilities out.

The decoder predicts a code of each book at every step, book k being k steps late (`genrl_rewards.models.musicgen`).
What the delay pattern pads is no choice and no token: an answer's tokens are its K F codes, in the order in which they
are sampled, by step and then by book. With classifier-free guidance of scale s the distribution of a code is
`softmax((u + s (c - u)) / temperature)`, c its logits after the text and u without one. The same guided logits are
sampled from and scored. Text encoder and EnCodec stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.config.sections import VLMLoRA
from genrl.vlm.policies.contract import Sampled, chosen, left_padded, uniforms
from genrl.vlm.policies.loading import Adapted, with_lora
from genrl.vlm.policies.log_probs import TokenScores
from genrl.vlm.policies.policy import Encoded, dtype_of
from genrl.vlm.policies.processor import Prompt, Tokens
from genrl_rewards.models.accounts import accounted
from genrl_rewards.models.checkpoints import pretrained, transformers
from genrl_rewards.models.musicgen import delayed, delays, fewest, pattern, text_states, with_reward_head

LANGUAGE = ("text_encoder", "decoder", "enc_to_dec_proj")
"""Parts of a MusicGen in the run's precision. EnCodec is no language model and stays in float32."""
TOGETHER = 16
"""Pieces whose sound is decoded side by side."""


class MusicPolicy(Adapted):
    """A MusicGen and its processor.

    steps: of the decoder, as `generate(max_new_tokens=steps)` counts them; of K books a piece has steps + 1 - K frames;
    None = the fewest.
    guidance: scale s, None = the model's own (`generation_config.guidance_scale`, none where that is null); 1 = no
    guidance, and half the work.
    Raises ValueError where the checkpoint is no MusicGen, or cannot be read, and for steps that are no piece.
    """

    sees: ClassVar[bool] = False
    greedy: ClassVar[bool] = False
    samples: int | None = None
    output: ClassVar[str] = "music"
    trained: ClassVar[tuple[str, ...]] = ("decoder", "enc_to_dec_proj")
    """Parts whose weights are trained without a LoRA; a LoRA is in the decoder."""

    @classmethod
    def open(cls, config: VLMConfig, device: str | torch.device, path: str) -> Self:
        """The model in `path` as a run trains it."""
        generation, lora, dtype = config.generation, config.vlm.lora, dtype_of(config)
        steps, guidance = generation.max_new_tokens, generation.guidance_scale
        return cls(path, steps, guidance=guidance, lora=lora, dtype=dtype, device=device, seed=config.seed)

    def __init__(
        self,
        path: str,
        steps: int | None,
        *,
        guidance: float | None = None,
        lora: VLMLoRA | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        seed: int = 0,
    ) -> None:
        try:
            kind = transformers.AutoConfig.from_pretrained(path).model_type
            if kind != "musicgen":
                raise ValueError(f"it is a {kind!r} model; vlm.output: {self.output} takes a MusicGen")
            with accounted(f"the processor of {path!r}"):
                self.processor: Any = transformers.MusicgenProcessor.from_pretrained(path)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{path!r} is no checkpoint of a MusicGen with its processor: {error}") from error
        self.tokenizer: Any = self.processor.tokenizer
        self.model = self.loaded(path)
        for name, part in self.model.named_modules():
            if name in LANGUAGE:
                part.to(dtype)
            if name in self.trained and lora is None:
                part.requires_grad_(True)
        self.peft = None if lora is None else with_lora(self.model, lora, seed)
        self.model.to(device).eval()
        self.device = torch.device(device)
        decoder = self.model.decoder
        config = self.model.generation_config
        self.guidance = float(guidance or config.guidance_scale or 1.0)
        config.guidance_scale = self.guidance  # what is saved plays as it was trained
        least, most = delays(decoder) + fewest(decoder), decoder.config.max_position_embeddings
        steps = least if steps is None else steps
        if not least <= steps <= most:
            text = f"of {decoder.num_codebooks} books the decoder takes {least} to {most} steps"
            raise ValueError(f"generation.max_new_tokens: {steps}; {text}")
        self.steps, self.frames = steps, steps - delays(decoder)
        self._places = pattern(decoder, self.frames).to(device)
        number = torch.full(self._places.shape, -1, device=device)
        number[self._places] = torch.arange(int(self._places.sum()), device=device)
        self._order = number.T[self._places.T]
        """Of each token, its number among the codes by book and frame."""
        self._read = [places.nonzero()[:, 0] - 1 for places in self._places]
        """Of each book, the steps whose states predict its codes."""

    def loaded(self, path: str) -> Any:
        """The model, its parameters without gradients."""
        return pretrained(transformers.MusicgenForConditionalGeneration, path, types=(), reward="policy")

    def encode(self, prompt: Prompt) -> Encoded:
        """A text's tokens with the end token, as the model's processor makes them. ValueError for one with pictures."""
        if any(not isinstance(part, str) for part in prompt.pieces) or prompt.system is not None or prompt.before:
            raise ValueError(f"{prompt.where}: MusicGen reads one text, no picture, system message or conversation")
        text = " ".join(str(part) for part in prompt.parts)
        ids = self.tokenizer(text, return_tensors="pt")["input_ids"][0]
        return Encoded(Tokens(ids, {}, {}), torch.arange(len(ids)), len(ids), prompt.where)

    def check_room(self, prompts: Sequence[Encoded], new_tokens: int) -> None:
        """Raises ValueError where `new_tokens` are not the steps that the policy was made for."""
        if new_tokens != self.steps:
            raise ValueError(f"generation.max_new_tokens: {new_tokens}; this policy was opened for {self.steps}")

    def text(self, prompts: Sequence[Encoded], *, guided: bool) -> tuple[Tensor, Tensor]:
        """What the decoder attends to, and the mask of it; guided: below, the same rows without text."""
        ids, mask = (rows.to(self.device) for rows in left_padded(prompts, self.tokenizer.pad_token_id))
        states = text_states(self.model, ids, mask)
        if not guided:
            return states, mask
        # As transformers' `generate` makes the rows without a text.
        return torch.cat([states, torch.zeros_like(states)]), torch.cat([mask, torch.zeros_like(mask)])

    def codes(self, tokens: Tensor) -> Tensor:
        """Codes of answers int64 [B, T], by book and frame: int64 [B, K, F]."""
        codes_out = torch.empty_like(tokens)
        codes_out[:, self._order] = tokens
        return codes_out.view(len(tokens), -1, self.frames)

    def _states(self, text: tuple[Tensor, Tensor], codes: Tensor, body: Any = None) -> Tensor:
        """Hidden states [B', steps, H], each of which predicts the codes of the next step; B' as the text has it."""
        # The last step's codes are predicted, and predict nothing.
        grid = delayed(self.model.decoder, codes)[..., :-1]
        ids = grid.repeat(len(text[0]) // len(grid), 1, 1).flatten(0, 1)
        hidden: Tensor = (body or self.body)(
            input_ids=ids, encoder_hidden_states=text[0], encoder_attention_mask=text[1], use_cache=False
        ).last_hidden_state
        return hidden

    def _log_rows(self, states: Tensor, book: int, temperature: float) -> Tensor:
        """Guided log-softmax rows [B, S, V] of a book, in float32 or more, of states [B', S, H]."""
        logits = self.model.decoder.lm_heads[book](states)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.guidance != 1.0:
            conditional, free = logits.chunk(2)
            logits = free + self.guidance * (conditional - free)
        rows: Tensor = (logits / temperature).log_softmax(-1)
        return rows

    def log_probs(
        self,
        prompts: Sequence[Encoded],
        tokens: Tensor,
        mask: Tensor,
        *,
        group: Tensor,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> TokenScores:
        """Scores of answers `tokens` int64 [B, T], row b to prompts[group[b]]: log_prob [B, T] float32, and entropies.

        One pass over the codes, and with guidance a second one beside it. Logits exist for one book at a time, in the
        backward pass too.
        """
        codes = self.codes(tokens.to(self.device))
        text = self.text([prompts[number] for number in group.tolist()], guided=self.guidance != 1.0)
        states = self._states(text, codes)

        def scored(some: Tensor, own: Tensor, book: int) -> tuple[Tensor, Tensor]:
            rows = self._log_rows(some, book, temperature)
            return rows.gather(-1, own[..., None])[..., 0], -(rows.exp() * rows).sum(-1).detach()

        parts = [
            checkpoint(scored, states[:, steps], codes[:, book], book, use_reentrant=False)
            for book, steps in enumerate(self._read)
        ]
        log_prob, spread = (torch.cat([part[k] for part in parts], 1)[:, self._order] for k in (0, 1))
        return TokenScores(log_prob, spread if entropy else None)

    @property
    def body(self) -> Any:
        """What has the hidden states, of which MusicRL's value function is a copy."""
        return self.model.decoder.model

    def choices(self, tokens: Tensor) -> Tensor:
        """Which of the tokens [B, T] are codes: all."""
        return torch.ones_like(tokens, dtype=torch.bool)

    def code_rows(self, prompts: Sequence[Encoded], tokens: Tensor, temperature: float) -> Tensor:
        """log softmax [B, T, V] over the codes of its book at each token of answers int64 [B, T]."""
        states = self._states(self.text(prompts, guided=self.guidance != 1.0), self.codes(tokens))
        rows = [self._log_rows(states[:, steps], book, temperature) for book, steps in enumerate(self._read)]
        return torch.cat(rows, 1)[:, self._order]

    def things(self, tokens: Tensor) -> Tensor:
        """The tokens as places in the rows of `code_rows`, int64 [B, T]."""
        return tokens

    def states(self, prompts: Sequence[Encoded], tokens: Tensor, model: Any = None) -> Tensor:
        """Hidden states [B, T, H] that predict the tokens of answers, after the text, by another body. The text's own
        states are the policy's, and constants here: what is learnt with this body does not train the policy."""
        text, mask = self.text(prompts, guided=False)
        hidden = self._states((text.detach(), mask), self.codes(tokens), model)
        return hidden[:, torch.cat(self._read)[self._order]]

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Encoded], n: int, temperature: float, keys: Sequence[Sequence[int | str]]
    ) -> Sampled:
        """n pieces for each text; `made`: "audio", B waveforms [S] ([2, S] of a stereo model), and their "rate".

        keys: one per prompt; the sample's number is added to it. A piece is a function of the weights, its text and its
        key. temperature 0: the most probable code each time, with the log-probabilities of temperature 1.
        """
        rows = [prompt for prompt in prompts for _ in range(n)]
        text, places = self.text(rows, guided=self.guidance != 1.0), self._places
        uniform = uniforms(keys, n, self.steps, len(places)).to(self.device)
        pad = self.model.decoder.config.pad_token_id
        grid = torch.full((len(rows), *places.shape), pad, device=self.device)
        log_probs = torch.zeros(grid.shape, device=self.device)
        config = self.model.decoder.config
        cache = transformers.EncoderDecoderCache(*(transformers.DynamicCache(config=config) for _ in range(2)))
        for step in range(self.steps):
            states = self.body(
                input_ids=grid[..., step : step + 1].repeat(len(text[0]) // len(rows), 1, 1).flatten(0, 1),
                encoder_hidden_states=text[0],
                encoder_attention_mask=text[1],
                past_key_values=cache,
                use_cache=True,
            ).last_hidden_state
            for book in places[:, step + 1].nonzero()[:, 0].tolist():
                log_p = self._log_rows(states, book, temperature or 1.0)[:, 0]
                code = chosen(log_p, None if temperature == 0 else uniform[:, step, book])
                grid[:, book, step + 1] = code
                log_probs[:, book, step + 1] = log_p.gather(1, code[:, None])[:, 0]
        codes, scored = (of[:, places] for of in (grid, log_probs))
        sounds = self.sounds(codes.view(len(rows), -1, self.frames))
        tokens = codes[:, self._order]
        mask, cut = torch.ones(tokens.shape, dtype=torch.bool), torch.zeros(len(rows), dtype=torch.bool)
        texts = [" ".join(map(str, row)) for row in tokens.tolist()]
        outputs = {"audio": sounds, "rate": [int(self.model.config.sampling_rate)] * len(sounds)}
        return Sampled(tokens.cpu(), mask, scored[:, self._order].cpu(), cut, texts, outputs)

    @torch.no_grad()
    def sounds(self, codes: Tensor) -> list[Tensor]:
        """Codes int64 [B, K, F] -> waveforms float32 [S] in about [-1, 1], [2, S] of a stereo model."""
        waveforms = []
        for some in codes.split(TOGETHER):
            stereo = self.model.decoder.config.audio_channels == 2
            # Books of a stereo model are the left and the right one's in turn.
            sides = (some[:, ::2], some[:, 1::2]) if stereo else (some,)
            heard = [self.model.audio_encoder.decode(side[None], [None] * len(side)).audio_values for side in sides]
            waveforms += list(torch.cat(heard, 1).squeeze(1).float().cpu())
        return waveforms


class MusicRewardPolicy(MusicPolicy):
    """A MusicGen that scores pieces in place of predicting codes: what MusicRL's preferences are learnt with."""

    output: ClassVar[str] = "music_reward"
    trained: ClassVar[tuple[str, ...]] = ("decoder.model", "enc_to_dec_proj", "reward_head")

    @classmethod
    def open(cls, config: VLMConfig, device: str | torch.device, path: str) -> Self:
        """The model in `path` as a run trains it; pieces of any length are scored."""
        return cls(path, None, dtype=dtype_of(config), device=device)

    def loaded(self, path: str) -> Any:
        return with_reward_head(path)

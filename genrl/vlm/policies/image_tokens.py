"""A model that makes pictures by tokens (Janus) as a policy: captions in, codes and their log-probabilities out.

The language model predicts one code of the picture after the other; with classifier-free guidance of scale s the
distribution of a code is `softmax((u + s (c - u)) / temperature)`, c its logits after the caption and u after a prompt
whose words are padding. The same guided logits are sampled from and scored, so the policy that is trained is the one
that samples: log-probabilities of the plain c would be another policy's. The decoder from codes to pixels and the
half of the model that looks at pictures stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
import transformers
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.config.sections import VLMLoRA
from genrl.vlm.policies.contract import Sampled, chosen, left_padded, uniforms
from genrl.vlm.policies.loading import Adapted, with_lora
from genrl.vlm.policies.log_probs import TokenScores
from genrl.vlm.policies.policy import Encoded, dtype_of
from genrl.vlm.policies.processor import Prompt, Tokens, load_processor, written
from genrl_rewards.models.checkpoints import pretrained

TRAINED = ("language_model", "generation_embeddings", "generation_aligner", "generation_head")
"""Parts of a Janus that make pictures; without a LoRA all of their weights are trained, and no others."""


class ImagePolicy(Adapted):
    """A Janus and its processor.

    guidance: scale s, None = the model's own (`generation_config.guidance_scale`); 1 = no guidance, and half the work.
    Raises ValueError where the checkpoint is no Janus, or cannot be read.
    """

    sees: ClassVar[bool] = False
    greedy: ClassVar[bool] = False
    samples: int | None = None

    @classmethod
    def open(cls, config: VLMConfig, device: str | torch.device, path: str) -> Self:
        """The model in `path` as a run trains it."""
        guidance, lora, dtype = config.generation.guidance_scale, config.vlm.lora, dtype_of(config)
        return cls(path, guidance=guidance, lora=lora, dtype=dtype, device=device, seed=config.seed)

    def __init__(
        self,
        path: str,
        *,
        guidance: float | None = None,
        lora: VLMLoRA | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        seed: int = 0,
    ) -> None:
        try:
            kind = transformers.AutoConfig.from_pretrained(path).model_type
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{path!r} is no checkpoint of a transformers model: {error}") from error
        if kind != "janus":
            raise ValueError(
                f"{path!r} is a {kind!r} model; pictures are made by tokens with a Janus (vlm.output: image)"
            )
        self.processor = load_processor(path, kind)
        self.tokenizer: Any = self.processor.tokenizer
        self.model = pretrained(
            transformers.JanusForConditionalGeneration, path, types=(), reward="policy", dtype=dtype
        )
        self.peft = None
        if lora is None:
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(name.split(".")[1] in TRAINED)
        else:
            self.peft = with_lora(self.model, lora, seed)
        self.model.to(device).eval()
        self.device = torch.device(device)
        settings = self.model.generation_config
        # 5 is what Janus's own program samples with.
        self.guidance = float(guidance or settings.guidance_scale or 5.0)
        self.length = int(self.model.config.vision_config.num_image_tokens)
        """Codes of a picture, T."""
        self.room: int = self.model.config.get_text_config().max_position_embeddings
        self._kept = torch.tensor([settings.bos_token_id, settings.generation_kwargs["boi_token_id"]], device=device)
        self._pad = int(settings.pad_token_id)
        images = self.processor.image_processor
        self._mean, self._std = (
            torch.tensor(v, device=device)[:, None, None] for v in (images.image_mean, images.image_std)
        )

    def encode(self, prompt: Prompt) -> Encoded:
        """A caption's tokens, the mark at which a picture begins included. ValueError for a prompt with pictures."""
        if any(not isinstance(part, str) for part in prompt.pieces):
            raise ValueError(f"{prompt.where}: a caption is text; this one has a picture")
        text = written(prompt, self.processor)
        ids = self.processor(text=text, generation_mode="image", return_tensors="pt")["input_ids"][0]
        return Encoded(Tokens(ids, {}, {}), torch.arange(len(ids)), len(ids), prompt.where)

    def check_room(self, prompts: Sequence[Encoded], new_tokens: int) -> None:
        """Raises ValueError where `new_tokens` are not those of a picture, or do not fit behind a caption."""
        if new_tokens != self.length:
            raise ValueError(
                f"generation.max_new_tokens: {new_tokens}, but a picture of this model has {self.length} tokens"
            )
        for prompt in prompts:
            if prompt.length + new_tokens > self.room:
                raise ValueError(
                    f"{prompt.where}: {prompt.length} tokens of caption and {new_tokens} are over {self.room}"
                )

    def _asked(self, prompts: Sequence[Encoded]) -> tuple[Tensor, Tensor]:
        """Ids and attention mask [B, P], padded on the left; with guidance [2B, P], the rows without words below."""
        ids, mask = (rows.to(self.device) for rows in left_padded(prompts, self._pad))
        if self.guidance == 1.0:
            return ids, mask
        empty = torch.where(torch.isin(ids, self._kept), ids, self._pad)
        # The same mask, as in Janus's own sampling: the padding in place of the words is attended to.
        return torch.cat([ids, empty]), torch.cat([mask, mask])

    def _codes(self, tokens: Tensor) -> Tensor:
        """Embeddings of codes [B, T] -> [B, T, H], for both halves under guidance."""
        embeddings: Tensor = self.model.prepare_embeddings_for_image_generation(tokens)
        return embeddings if self.guidance == 1.0 else torch.cat([embeddings, embeddings])

    def _log_rows(self, states: Tensor, temperature: float) -> Tensor:
        """Guided log-softmax rows [N, V] in float32 or more, of states [2, N, H] (without guidance [1, N, H])."""
        logits = self.model.model.generation_head(states)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        guided = logits[0] if len(logits) == 1 else logits[1] + self.guidance * (logits[0] - logits[1])
        rows: Tensor = (guided / temperature).log_softmax(-1)
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
        chunk: int = 1024,
    ) -> TokenScores:
        """Scores of pictures `tokens` int64 [B, T], row b for prompts[group[b]]: log_prob float32 and entropies [B, T].

        One pass over caption and codes, and with guidance a second one beside it. Logits exist for `chunk` codes at a
        time, in the backward pass too.
        """
        tokens = tokens.to(self.device)
        ids, prompt_mask = self._asked([prompts[number] for number in group.tolist()])
        embedded = self._codes(tokens[:, :-1])
        attended = torch.cat(
            [prompt_mask, torch.ones(embedded.shape[:2], dtype=prompt_mask.dtype, device=self.device)], 1
        )
        states = self.model.model.language_model(
            inputs_embeds=torch.cat([self.model.get_input_embeddings()(ids), embedded], 1),
            attention_mask=attended,
            position_ids=(attended.cumsum(1) - 1).clamp(min=0),
            use_cache=False,
        ).last_hidden_state[:, -self.length :]
        flat = states.reshape(len(states) // len(tokens), tokens.numel(), -1)
        parts, entropies = [], []

        def scored(some: Tensor, chosen: Tensor) -> Tensor:
            return self._log_rows(some, temperature).gather(1, chosen[:, None])[:, 0]

        for start in range(0, tokens.numel(), chunk):
            some, chosen = flat[:, start : start + chunk], tokens.flatten()[start : start + chunk]
            parts.append(checkpoint(scored, some, chosen, use_reentrant=False))
            if entropy:
                with torch.no_grad():
                    rows = self._log_rows(some, temperature)
                    entropies.append(-(rows.exp() * rows).sum(-1))
        log_prob = torch.cat(parts).view(tokens.shape)
        return TokenScores(log_prob, torch.cat(entropies).view(tokens.shape) if entropy else None)

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Encoded], n: int, temperature: float, keys: Sequence[Sequence[int | str]]
    ) -> Sampled:
        """n pictures for each caption; `made["images"]` float32 [B, 3, H, W] in [0, 1].

        keys: one per prompt; the sample's number is added to it. A picture is a function of the weights, its caption
        and its key. temperature 0: the most probable code each time, with the log-probabilities of temperature 1.
        """
        rows = [prompt for prompt in prompts for _ in range(n)]
        uniform = uniforms(keys, n, self.length).to(self.device)
        ids, attended = self._asked(rows)
        embedded = self.model.get_input_embeddings()(ids)
        positions = (attended.cumsum(1) - 1).clamp(min=0)
        cache = transformers.DynamicCache(config=self.model.config.get_text_config())
        tokens, log_probs = [], []
        for step in range(self.length):
            output = self.model.model.language_model(
                inputs_embeds=embedded,
                attention_mask=attended,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
            log_p = self._log_rows(
                output.last_hidden_state[:, -1].view(-1, len(rows), embedded.shape[-1]), temperature or 1.0
            )
            token = chosen(log_p, None if temperature == 0 else uniform[:, step])
            tokens.append(token)
            log_probs.append(log_p.gather(1, token[:, None])[:, 0])
            embedded = self._codes(token[:, None])
            attended = torch.cat([attended, torch.ones_like(attended[:, :1])], 1)
            positions = positions[:, -1:] + 1
        codes = torch.stack(tokens, 1)
        images = torch.cat([self.pixels(codes[at : at + 64]) for at in range(0, len(codes), 64)]).cpu()
        mask = torch.ones_like(codes, dtype=torch.bool).cpu()
        texts = [" ".join(map(str, row)) for row in codes.tolist()]
        cut = torch.zeros(len(codes), dtype=torch.bool)
        return Sampled(codes.cpu(), mask, torch.stack(log_probs, 1).cpu(), cut, texts, {"images": images})

    @torch.no_grad()
    def pixels(self, tokens: Tensor) -> Tensor:
        """Codes int64 [B, T] -> pictures float32 [B, 3, H, W] in [0, 1]."""
        decoded: Tensor = self.model.model.vqmodel.decode(tokens)
        return (decoded.float() * self._std + self._mean).clamp(0.0, 1.0)

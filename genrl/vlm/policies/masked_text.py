"""A masked diffusion language model as a policy: prompts in, texts out of masks, and log-probabilities of two kinds.

The model is bidirectional and predicts what stands at masked places: LLaDA, Dream, or any `AutoModelForMaskedLM` of
transformers with a mask token (`masked_formats`). A row is the prompt, then L places of the completion, then padding.

`samples` None (JustGRPO): the completion is sampled from left to right, and the log-probability of place t is that of
its token with all later places masked, exactly. `samples` M (BGPO): it is sampled by confidence, some places in a
step (LLaDA's low-confidence remasking), and M estimates of the evidence lower bound stand for its log-probability:

    elbo_j = L / l_j  sum over the l_j masked places i of  log p(x_i | prompt, x without them),   l_j uniform in 1 .. L
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from genrl.mdp.noise import generator
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.policies.contract import Sampled, check_places, chosen, encode_text, uniforms
from genrl.vlm.policies.loading import Adapted
from genrl.vlm.policies.log_probs import IMPOSSIBLE, TokenScores
from genrl.vlm.policies.masked_formats import open_masked
from genrl.vlm.policies.policy import Encoded, dtype_of
from genrl.vlm.policies.processor import Prompt


class MaskedPolicy(Adapted):
    """A masked language model and its tokenizer; all weights are trained.

    length: places of a completion, L. samples: see above. steps: of drawing by confidence, L at most.
    Raises ValueError where the checkpoint is no masked language model, or has no mask token or chat template.
    """

    sees: ClassVar[bool] = False
    greedy: ClassVar[bool] = True
    peft = None
    processor = None

    @classmethod
    def open(cls, config: VLMConfig, device: str | torch.device, path: str) -> Self:
        """The model in `path` as a run trains it."""
        generation = config.generation
        return cls(
            path,
            length=generation.max_new_tokens,
            samples=generation.elbo_samples if "bound" in config.trainer.reads else None,
            steps=generation.denoising_steps,
            dtype=dtype_of(config),
            device=device,
        )

    def __init__(
        self,
        path: str,
        *,
        length: int,
        samples: int | None,
        steps: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        try:
            opened = open_masked(path, dtype)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{path!r} is no masked language model that transformers loads: {error}") from error
        self.model: Any = opened.model
        self.tokenizer: Any = opened.tokenizer
        self.ahead = opened.ahead
        missing = [
            n for n in ("mask_token", "eos_token", "pad_token", "chat_template") if not getattr(self.tokenizer, n)
        ]
        if missing:
            raise ValueError(f"{path!r}: its tokenizer has no {missing[0]}; set it and save the tokenizer")
        self.length, self.samples, self.steps = length, samples, min(steps or length, length)
        self.model.requires_grad_(True)
        self.model.to(device).eval()
        self.device = torch.device(device)
        self.room: int = self.model.config.max_position_embeddings
        self.mask_id, self.end_id, self.pad_id = (
            int(getattr(self.tokenizer, f"{name}_token_id")) for name in ("mask", "eos", "pad")
        )
        # LLaDA ends and pads with the same token: it must be possible to end
        self.forbidden = torch.tensor([self.mask_id, *{self.pad_id} - {self.end_id}], device=self.device)
        """Impossible in a completion, for the sampler and the trainer."""
        self.round: tuple[int | str, ...] = ()
        """Keys of the last sampling: which masks an iteration estimates its bounds by, before and after an update."""

    def encode(self, prompt: Prompt) -> Encoded:
        """A prompt's tokens. ValueError for one with pictures."""
        refusal = "a masked language model reads text; this prompt has a picture"
        return encode_text(self.tokenizer, prompt, refusal)

    def check_room(self, prompts: Sequence[Encoded], new_tokens: int) -> None:
        """Raises ValueError where a prompt and its completion are more than the model's positions."""
        check_places(prompts, new_tokens, self.room)

    def log_rows(
        self, prompts: Sequence[Encoded], filled: Tensor, temperature: float, at: Tensor | None = None
    ) -> Tensor:
        """log softmax at places of completions `filled` int64 [B, L], some of which are masks: [B, K, V] in float32 or
        more. at: int64 [B, K] numbers of the places, None = all. The output layer runs on those places alone."""
        longest = max(prompt.length for prompt in prompts) + self.length
        ids = torch.full((len(prompts), longest), self.pad_id, device=self.device)
        begins = torch.tensor([prompt.length for prompt in prompts], device=self.device)
        for row, prompt in enumerate(prompts):
            ids[row, : prompt.length] = prompt.tokens.ids
            ids[row, prompt.length : prompt.length + self.length] = filled[row]
        real = (torch.arange(longest, device=self.device) < begins[:, None] + self.length).long()
        places = torch.arange(self.length, device=self.device).expand(len(prompts), -1) if at is None else at
        index = (begins[:, None] + places - self.ahead).clamp(min=0)[..., None]

        def select(module: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (inputs[0].gather(1, index.expand(-1, -1, inputs[0].shape[-1])), *inputs[1:])

        # In front of the output layer: logits of prompts and of all places would be the largest tensor of a pass.
        hook = self.model.get_output_embeddings().register_forward_pre_hook(select)
        try:
            logits = self.model(input_ids=ids, attention_mask=real).logits
        finally:
            hook.remove()
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).index_fill(-1, self.forbidden, IMPOSSIBLE)
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
        """Scores of completions `tokens` int64 [B, L] to prompts[group[b]]: log_prob [B, L], or estimates [B, M].

        Each column is a pass of its own, which the backward pass computes again: memory does not grow with their
        number. entropy: of the left-to-right distributions; the bound has none.
        """
        rows = [prompts[number] for number in group.tolist()]
        tokens = tokens.to(self.device)
        if self.samples is not None:
            masked = self._masks(rows, tokens)
            columns = [_again(self._bound, rows, tokens, masked[:, j], temperature) for j in range(self.samples)]
            return TokenScores(torch.stack(columns, 1), None)
        scored, entropies = [], []
        for t in range(self.length):
            present = mask[:, t].bool().nonzero()[:, 0].tolist()
            column = torch.zeros(len(rows), device=self.device)
            spread = torch.zeros(len(rows), device=self.device)
            if present:
                bound = _again(self._place, rows, tokens, t, present, temperature)
                column = column.to(bound.dtype).index_put((torch.tensor(present, device=self.device),), bound[0])
                spread = spread.to(bound.dtype).index_put(
                    (torch.tensor(present, device=self.device),), bound[1].detach()
                )
            scored.append(column)
            entropies.append(spread)
        return TokenScores(torch.stack(scored, 1), torch.stack(entropies, 1) if entropy else None)

    def _place(self, rows: list[Encoded], tokens: Tensor, t: int, kept: list[int], temperature: float) -> Tensor:
        """(log-probability, entropy) [2, K] of place t in rows `kept`, all places from t on being masked."""
        filled = tokens[kept].clone()
        filled[:, t:] = self.mask_id
        at = torch.full((len(kept), 1), t, device=self.device)
        log_p = self.log_rows([rows[k] for k in kept], filled, temperature, at)[:, 0]
        return torch.stack([log_p.gather(1, tokens[kept, t, None])[:, 0], -(log_p.exp() * log_p).sum(-1)])

    def _bound(self, rows: list[Encoded], tokens: Tensor, masked: Tensor, temperature: float) -> Tensor:
        """One estimate [B] of the bound; masked bool [B, L]."""
        log_p = self.log_rows(rows, torch.where(masked, self.mask_id, tokens), temperature)
        token_log_prob = log_p.gather(-1, tokens[..., None])[..., 0]
        return (token_log_prob * masked).sum(1) * self.length / masked.sum(1)

    def _masks(self, rows: list[Encoded], tokens: Tensor) -> Tensor:
        """bool [B, M, L]: l places of each, l uniform in 1 to L. A function of the round, the prompt and the answer."""
        assert self.samples is not None
        masks = []
        for row, ids in zip(rows, tokens.tolist(), strict=True):
            source = generator(*self.round, "masks", row.where, *ids)
            number = torch.randint(1, self.length + 1, (self.samples, 1), generator=source)
            # The ranks of random numbers: of all sets of l places each is as likely.
            rank = torch.rand(self.samples, self.length, generator=source).argsort(1).argsort(1)
            masks.append(rank < number)
        return torch.stack(masks).to(self.device)

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Encoded], n: int, temperature: float, keys: Sequence[Sequence[int | str]]
    ) -> Sampled:
        """n completions of each prompt, a function of the weights, its prompt and its key each.

        mask: up to the first end token, with it (from left to right), or all L places (by confidence). temperature 0:
        the most probable token each time.
        """
        rows = [prompt for prompt in prompts for _ in range(n)]
        # Without the prompt's name: the round is that of all of an iteration's prompts.
        self.round = tuple(keys[0][:-1])
        uniform = uniforms(keys, n, self.length, self.length).to(self.device)
        scale = temperature or 1.0
        tokens = torch.full((len(rows), self.length), self.mask_id, device=self.device)
        log_prob = torch.zeros(len(rows), self.length)
        if self.samples is None:
            # Without a cache: attention in both directions changes the keys of earlier places with each new token.
            for t in range(self.length):
                log_p = self.log_rows(rows, tokens, scale, torch.full((len(rows), 1), t, device=self.device))[:, 0]
                tokens[:, t] = chosen(log_p, None if temperature == 0 else uniform[:, t, t])
                log_prob[:, t] = log_p.gather(1, tokens[:, t, None])[:, 0].cpu()
        else:
            self._by_confidence(rows, tokens, scale, None if temperature == 0 else uniform)
        ended = tokens == self.end_id
        answer = ended.cumsum(1) - ended.long() == 0
        texts = [
            self.tokenizer.decode(row[row_mask], skip_special_tokens=True)
            for row, row_mask in zip(tokens, answer, strict=True)
        ]
        mask = answer if self.samples is None else torch.ones_like(answer)
        cut = ~ended.any(1).cpu()
        # By confidence the probability of a place is that at its step, which the bound says nothing of.
        sampler = None if self.samples is not None else torch.where(mask.cpu(), log_prob, 0.0)
        return Sampled(tokens.cpu(), mask.cpu(), sampler, cut, texts, {})

    def _by_confidence(self, rows: list[Encoded], tokens: Tensor, temperature: float, uniform: Tensor | None) -> None:
        """Fills `tokens` in place: of each step's proposals the most probable stay, the same number at each step."""
        left = self.length
        for step in range(self.steps):
            log_p = self.log_rows(rows, tokens, temperature)
            flat = log_p.flatten(0, 1)
            proposed = chosen(flat, None if uniform is None else uniform[:, step].flatten()).view(tokens.shape)
            sure = log_p.gather(-1, proposed[..., None])[..., 0]
            sure = torch.where(tokens == self.mask_id, sure, -torch.inf)
            # Rounded up, so that no mask is left after the last step.
            number = -(-left // (self.steps - step))
            places = sure.topk(number, dim=1).indices
            tokens.scatter_(1, places, proposed.gather(1, places))
            left -= number


def _again(run: Callable[..., Tensor], *arguments: object) -> Tensor:
    """`run(*arguments)`, computed again in the backward pass; without gradients just run."""
    output: Tensor = checkpoint(run, *arguments, use_reentrant=False)
    return output

"""A causal language model whose vocabulary holds the codes of things, as a policy: shapes (Hi-GRPO), music (MusicRL).

An answer has `steps` steps. Each is a thought of at most `thoughts` words, the mark that begins a thing, its K codes,
and the mark that ends it:

    w1 .. wn  <begin>  c1 .. cK  <end>      n <= thoughts

What may stand at a place follows from what stands before it: a word or the beginning, a code, or a mark that is forced.
The sampler and the trainer normalise over the same ids; a forced mark is no choice and is left out of every loss. So
each answer can be decoded. The decoder is the file `codec.safetensors` beside the weights, a block of coloured voxels
or a frame of sound for each code; or the VQVAE of ShapeLLM-Omni (`vlm.codec`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
from transformers.utils.hub import cached_file

from genrl.vlm.config.names import BODY
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.config.sections import VLMLoRA
from genrl.vlm.policies.contract import Sampled, check_places, chosen, encode_text, left_padded, uniforms
from genrl.vlm.policies.loading import Adapted, with_lora
from genrl.vlm.policies.log_probs import IMPOSSIBLE, TokenScores, tokens_at_once
from genrl.vlm.policies.policy import Encoded, dtype_of
from genrl.vlm.policies.processor import Prompt
from genrl.vlm.policies.shape_decoder import ShapeDecoder, load_decoder
from genrl_rewards.models.checkpoints import pretrained, tokenizer_of

CODEC = "codec.safetensors"
FADE = 0.6
"""How much darker than the nearest the farthest voxel of a body is that has no colours."""
TURNED = (None, 2, 2, None, 1, None)
"""Axis of each view [B, rows, columns] that is turned round, so that none is a mirror image: who looks from behind has
the left on the right, who looks from the left has the front there, and seen from above the back is at the top."""
WORD, BEGIN, CODE, END, DONE = range(5)
"""What a place is for; BEGIN and END are forced."""


class Codec(NamedTuple):
    """kind "voxels" or "audio"; K codes of a thing, `steps` things of an answer, words of a thought at most; marks and
    codes as the tokenizer has them. table: uint8 blocks [N, b, b, b] of palette entries (0 = empty), float32 frames
    [N, S], or the decoder of bodies. palette uint8 [C, 3]; rate: samples per second."""

    kind: str
    length: int
    steps: int
    thoughts: int
    begin: str
    end: str
    codes: list[str]
    rate: int
    table: Tensor | ShapeDecoder
    palette: Tensor | None


def read_codec(path: str) -> Codec:
    """Codec of a model's folder or hub id. Raises ValueError where there is none."""
    file = Path(path) / CODEC
    if not Path(path).is_dir():
        cached = cached_file(path, CODEC, _raise_exceptions_for_missing_entries=False)
        file = Path(cached or CODEC)
    if not file.is_file():
        raise ValueError(f"{path!r} has no {CODEC}, so its codes cannot be decoded: see docs/sequence_policies.md")
    with safe_open(file, "pt") as stored:
        config = json.loads(stored.metadata()["codec"])
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 (no mapping)
    return Codec(**config, table=tensors["table"], palette=tensors.get("palette"))


def shape_codec(path: str, longest: int) -> Codec:
    """ShapeLLM-Omni's, with its decoder; bodies are grey. longest: tokens of an answer; what two bodies and the
    marks round them leave is of two thoughts."""
    decoder = load_decoder(path, BODY)
    thoughts = longest // 2 - BODY - 2
    codes = [f"<mesh{number}>" for number in range(len(decoder.table))]
    palette = torch.tensor([[255, 255, 255], [200, 200, 200]], dtype=torch.uint8)
    marks = ("<mesh-start>", "<mesh-end>")
    return Codec("voxels", BODY, 2, thoughts, *marks, codes, 0, decoder, palette)


class CodePolicy(Adapted):
    """A causal language model, its tokenizer and its codec. All weights are trained, or a LoRA; of one that also sees,
    the language model.

    codec: None = the one beside the weights. Raises ValueError where the checkpoint is no such model, has no codec, or
    its tokenizer lacks its tokens.
    """

    sees: ClassVar[bool] = False
    greedy: ClassVar[bool] = False
    samples: int | None = None
    processor = None

    @classmethod
    def open(cls, config: VLMConfig, device: str | torch.device, path: str) -> Self:
        """The model in `path` as a run trains it. Raises ValueError where it makes something else than the run asks."""
        codec = None if config.vlm.codec is None else shape_codec(config.vlm.codec, config.generation.max_new_tokens)
        policy = cls(path, codec=codec, lora=config.vlm.lora, dtype=dtype_of(config), device=device, seed=config.seed)
        if policy.codec.kind != config.vlm.output:
            raise ValueError(f"vlm.output: {config.vlm.output}, but {path} makes {policy.codec.kind}")
        return policy

    def __init__(
        self,
        path: str,
        *,
        codec: Codec | None = None,
        lora: VLMLoRA | None = None,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        seed: int = 0,
    ) -> None:
        self.codec = read_codec(path) if codec is None else codec
        try:
            self.tokenizer: Any = tokenizer_of(path, "policy")
            kind = transformers.AutoConfig.from_pretrained(path).model_type
            sees = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
            architecture = transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM
            self.model = pretrained(architecture, path, types=(), reward="policy", dtype=dtype)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(f"{path!r} is no causal language model that transformers loads: {error}") from error
        vocabulary, codec = self.tokenizer.get_vocab(), self.codec
        text = self.model.config.get_text_config()
        missing = [token for token in (codec.begin, codec.end, *codec.codes) if token not in vocabulary]
        if missing:
            raise ValueError(f"{path!r}: its tokenizer does not have {missing[0]!r}, which the codec names")
        self.peft = None
        if lora is None:
            for part in (self.model.get_decoder(), self.model.get_output_embeddings()):
                part.requires_grad_(True)
        else:
            self.peft = with_lora(self.model, lora, seed)
        self.model.to(device).eval()
        self.device = torch.device(device)
        if isinstance(codec.table, ShapeDecoder):
            codec.table.to(device)
        self.room: int = text.max_position_embeddings
        self.pad_id = int(self.tokenizer.pad_token_id)
        self.begin_id, self.end_id = vocabulary[codec.begin], vocabulary[codec.end]
        self.code_ids = torch.tensor([vocabulary[token] for token in codec.codes], device=self.device)
        self.longest = codec.steps * (codec.thoughts + codec.length + 2)
        """Tokens of the longest answer."""
        blocked = torch.full((5, text.vocab_size), IMPOSSIBLE, device=self.device)
        special = torch.tensor([self.end_id, *self.tokenizer.all_special_ids], device=self.device)
        blocked[WORD, : len(self.tokenizer)] = 0.0  # some models have more places than tokens
        blocked[WORD].index_fill_(0, torch.cat([special, self.code_ids]), IMPOSSIBLE)
        # Behind the special ids, of which the mark may be one.
        blocked[[WORD, BEGIN], self.begin_id] = 0.0
        blocked[CODE, self.code_ids] = 0.0
        blocked[END, self.end_id] = 0.0
        blocked[DONE, self.pad_id] = 0.0
        self._blocked = blocked
        """Added to logits at a place of each kind."""
        self._rows = torch.zeros(text.vocab_size, dtype=torch.long, device=self.device)
        self._rows[self.code_ids] = torch.arange(len(self.code_ids), device=self.device)

    def encode(self, prompt: Prompt) -> Encoded:
        """A prompt's tokens, by the chat template where there is one. ValueError for one with pictures."""
        return encode_text(self.tokenizer, prompt, "this model reads text; the prompt has a picture")

    def check_room(self, prompts: Sequence[Encoded], new_tokens: int) -> None:
        """Raises ValueError where `new_tokens` are not the longest answer's, or are too many behind a prompt."""
        if new_tokens != self.longest:
            raise ValueError(
                f"generation.max_new_tokens: {new_tokens}; an answer of this model has up to {self.longest}"
            )
        check_places(prompts, new_tokens, self.room)

    def kinds(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What each place of answers int64 [B, T] is for, and in which step it is; both int64 [B, T]."""
        kinds, steps = [], []
        for row in tokens.tolist():
            place, kind_ids = Place(), []
            for token in row:
                kind_ids.append((self._kind(place), place.step))
                place = self._after(place, token)
            kinds.append([kind for kind, _ in kind_ids])
            steps.append([step for _, step in kind_ids])
        return torch.tensor(kinds, device=self.device), torch.tensor(steps, device=self.device)

    def _kind(self, place: Place) -> int:
        if place.step == self.codec.steps:
            return DONE
        if place.codes is None:
            return BEGIN if place.words == self.codec.thoughts else WORD
        return CODE if place.codes < self.codec.length else END

    def _after(self, place: Place, token: int) -> Place:
        kind = self._kind(place)
        if kind == CODE:
            return place._replace(codes=(place.codes or 0) + 1)
        if kind == END:
            return Place(place.step + 1)
        if kind == DONE:
            return place
        return place._replace(codes=0) if token == self.begin_id else place._replace(words=place.words + 1)

    def states(self, prompts: Sequence[Encoded], tokens: Tensor, model: Any = None) -> Tensor:
        """Hidden states [B, T, H] that predict the answers `tokens` int64 [B, T], prompts[b] being row b's."""
        ids, real = (rows.to(self.device) for rows in left_padded(prompts, self.pad_id))
        # The last token is predicted, and predicts nothing.
        inputs = torch.cat([ids, tokens[:, :-1]], 1)
        real = torch.cat([real, torch.ones_like(tokens[:, :-1])], 1)
        hidden: Tensor = (model or self.body)(
            input_ids=inputs, attention_mask=real, position_ids=(real.cumsum(1) - 1).clamp(min=0), use_cache=False
        ).last_hidden_state[:, -tokens.shape[1] :]
        return hidden

    def log_rows(self, states: Tensor, kinds: Tensor, temperature: float) -> Tensor:
        """log softmax over the ids that may stand there, [..., V] in float32 or more; the others IMPOSSIBLE."""
        logits = self.model.get_output_embeddings()(states)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
        rows: Tensor = (logits + self._blocked[kinds]).log_softmax(-1)
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
        chunk: int | None = None,
    ) -> TokenScores:
        """Scores of answers `tokens` int64 [B, T], row b to prompts[group[b]]: log_prob [B, T] float32, 0 where masked.

        Logits exist for `chunk` tokens at a time, None = `tokens_at_once`, in the backward pass too.
        """
        chunk = tokens_at_once(self._blocked.shape[1]) if chunk is None else chunk
        tokens, valid = tokens.to(self.device), mask.to(self.device).bool()
        kinds, _ = self.kinds(tokens)
        states = self.states([prompts[number] for number in group.tolist()], tokens)[valid]
        ids, places = tokens[valid], kinds[valid]

        def scored(some: Tensor, place: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
            rows = self.log_rows(some, place, temperature)
            return rows.gather(1, own[:, None])[:, 0], -(rows.exp() * rows.clamp(min=-1e4)).sum(-1).detach()

        parts = [
            checkpoint(
                scored, states[at : at + chunk], places[at : at + chunk], ids[at : at + chunk], use_reentrant=False
            )
            for at in range(0, len(ids), chunk)
        ]
        empty = torch.zeros(tokens.shape, dtype=parts[0][0].dtype, device=self.device)
        log_prob = empty.masked_scatter(valid, torch.cat([part[0] for part in parts]))
        spread = empty.masked_scatter(valid, torch.cat([part[1] for part in parts])) if entropy else None
        return TokenScores(log_prob, spread)

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Encoded], n: int, temperature: float, keys: Sequence[Sequence[int | str]]
    ) -> Sampled:
        """n answers to each prompt, each a function of the weights, its prompt and its key. mask: the choices.

        made: "images" float32 [B, steps, 6, 3, H, W], the views of each step's shape; or "audio", B waveforms [S].
        temperature 0: the most probable token each time.
        """
        rows = [prompt for prompt in prompts for _ in range(n)]
        uniform = uniforms(keys, n, self.longest).to(self.device)
        ids, real = (part.to(self.device) for part in left_padded(rows, self.pad_id))
        # By what is there: the first word has position 0 however much padding stands before it.
        positions = (real.cumsum(1) - 1).clamp(min=0)
        cache = transformers.DynamicCache(config=self.model.config)
        places, tokens, log_probs, masks = [Place()] * len(rows), [], [], []
        for step in range(self.longest):
            kinds = torch.tensor([self._kind(place) for place in places], device=self.device)
            if bool((kinds == DONE).all()):
                break
            states = self.body(
                input_ids=ids, attention_mask=real, position_ids=positions, past_key_values=cache, use_cache=True
            ).last_hidden_state[:, -1]
            log_p = self.log_rows(states, kinds, temperature or 1.0)
            token = chosen(log_p, None if temperature == 0 else uniform[:, step])
            tokens.append(token)
            log_probs.append(log_p.gather(1, token[:, None])[:, 0])
            masks.append((kinds == WORD) | (kinds == CODE))
            places = [self._after(place, own) for place, own in zip(places, token.tolist(), strict=True)]
            ids, positions = token[:, None], positions[:, -1:] + 1
            real = torch.cat([real, torch.ones_like(real[:, :1])], 1)
        # As wide in every batch, so that those of an iteration can be put together.
        sequences = torch.nn.functional.pad(torch.stack(tokens, 1), (0, self.longest - len(tokens)), value=self.pad_id)
        short = (0, self.longest - len(tokens))
        mask = torch.nn.functional.pad(torch.stack(masks, 1), short)
        log_prob = torch.where(mask, torch.nn.functional.pad(torch.stack(log_probs, 1), short), 0.0)
        texts = [self.tokenizer.decode(row[row != self.pad_id]) for row in sequences]
        cut = torch.zeros(len(rows), dtype=torch.bool)
        return Sampled(sequences.cpu(), mask.cpu(), log_prob.cpu(), cut, texts, self._made(sequences))

    @property
    def body(self) -> Any:
        """What has the hidden states, of which MusicRL's value function is a copy."""
        return self.model.get_decoder()

    def choices(self, tokens: Tensor) -> Tensor:
        """Which of the tokens of answers int64 [B, T] are codes: bool [B, T]."""
        return self.kinds(tokens)[0] == CODE

    def code_rows(self, prompts: Sequence[Encoded], tokens: Tensor, temperature: float) -> Tensor:
        """log softmax [B, K, N] over the N codes at the K places of codes; nothing else may stand there."""
        kinds, _ = self.kinds(tokens)
        places = kinds == CODE
        rows = self.log_rows(self.states(prompts, tokens)[places], kinds[places], temperature)[:, self.code_ids]
        return rows.view(len(tokens), -1, len(self.code_ids))

    def things(self, tokens: Tensor) -> Tensor:
        """The codes of answers int64 [B, T], as rows of the codec's table: int64 [B, steps, K]."""
        kinds, _ = self.kinds(tokens)
        return self._rows[tokens[kinds == CODE]].view(len(tokens), self.codec.steps, self.codec.length)

    def _made(self, tokens: Tensor) -> dict[str, Any]:
        things, table, palette = self.things(tokens), self.codec.table, self.codec.palette
        if isinstance(table, Tensor) and self.codec.kind == "audio":
            sounds = list(table[things[:, -1].cpu()].flatten(1))
            return {"audio": sounds, "rate": [self.codec.rate] * len(sounds)}
        assert palette is not None
        if isinstance(table, Tensor):
            pictures = views(voxels(things.flatten(0, 1).cpu(), table), palette)
        else:
            pictures = views(table.solid(things.flatten(0, 1)).cpu(), palette, fade=FADE)
        return {"images": pictures.view(len(tokens), self.codec.steps, *pictures.shape[1:])}


class Place(NamedTuple):
    """Where an answer is: finished things, words of the running thought, codes of the running thing or None."""

    step: int = 0
    words: int = 0
    codes: int | None = None


def voxels(things: Tensor, blocks: Tensor) -> Tensor:
    """Codes int64 [B, K] -> palette entries [B, G, G, G] (depth, height, width): K = k^3 blocks [b, b, b], G = k b."""
    side, size = round(things.shape[1] ** (1 / 3)), blocks.shape[1]
    cut = blocks[things].view(-1, side, side, side, size, size, size)
    return cut.permute(0, 1, 4, 2, 5, 3, 6).reshape(-1, side * size, side * size, side * size)


def views(shapes: Tensor, palette: Tensor, *, scale: int = 2, fade: float = 0.0) -> Tensor:
    """Six pictures of shapes [B, G, G, G], from the front, back, left, right, above and below, along parallel lines:
    float32 [B, 6, 3, scale G, scale G] in [0, 1]. Each pixel has the colour of the first voxel that it meets, or entry
    0, the background. fade: how much darker the farthest voxel is than the nearest."""
    pictures: list[Tensor] = []
    light: list[Tensor] = []
    for axis in (1, 3, 2):
        for turned in (shapes, shapes.flip(axis)):
            solid = turned != 0
            first = solid.int().argmax(axis, keepdim=True)
            surface = turned.gather(axis, first).squeeze(axis)
            lit = torch.where(surface != 0, 1 - fade * first.squeeze(axis) / shapes.shape[axis], 1.0)
            for collected, part in ((pictures, surface), (light, lit)):
                upright = part.transpose(1, 2) if axis == 3 else part  # from the side: height by depth
                axis_turned = TURNED[len(collected)]
                collected.append(upright if axis_turned is None else upright.flip(axis_turned))
    colours = palette[torch.stack(pictures, 1).long()].float() / 255 * torch.stack(light, 1)[..., None]
    return colours.movedim(-1, 2).repeat_interleave(scale, -1).repeat_interleave(scale, -2)

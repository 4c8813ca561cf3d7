"""The model that rewrites prompts: sampling, log-probabilities, adapter (PromptRL, arXiv 2602.01382).

Any model that transformers' `AutoModelForCausalLM` or `AutoModelForImageTextToText` loads; one of the latter is shown
the pictures that the pipeline is given with a prompt. With a peft LoRA: switched off it is the model before training,
so there is never a second copy of the weights. Answers to one prompt are written together and one prompt at a time,
from a generator of their own: they are a function of the weights, the prompt and its key, whoever writes what else.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict
from PIL.Image import Image
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
)

from genrl.data.prompts import Prompt
from genrl.diffusion.config.sections import Rewriter as RewriterSettings
from genrl.mdp.noise import generator
from genrl.runtime.folder.run import write_atomic
from genrl.runtime.weights.low_rank import adapted
from genrl_rewards.models.accounts import accounted
from genrl_rewards.scorers.judges.vlm import Inputs, LocalVLM, sees

SETTINGS = "rewriter.json"
TAGS = ("<answer>", "</answer>")
"""What a new prompt is written between; an answer without them has format reward 0 and is not drawn."""


@dataclass(frozen=True)
class Written:
    """R answers to one prompt."""

    asked: Inputs
    """What the model was called with: ids [1, P], and of pictures what the model reads."""
    tokens: Tensor
    """What was written, int64 [R, L]; after an answer's end anything."""
    log_probs: Tensor
    """Of each token under the policy that wrote it, float32 [R, L]."""
    mask: Tensor
    """Which tokens belong to an answer, its end included, bool [R, L]."""
    texts: list[str]
    """The new prompts; the prompt itself in place of an answer that holds none."""
    well_formed: list[bool]
    """Whether the answer came to its end and has one new prompt between its tags that the text encoders take whole."""


class Rewriter:
    """The language model, its trainable adapter and its optimiser.

    Raises ValueError, naming the key, where the model, its tokenizer or its layers do not fit.
    """

    def __init__(self, settings: RewriterSettings, *, seed: int = 0, device: str | torch.device = "cpu") -> None:
        self.settings = settings
        self.tokenizer, base, self.see = load_base(settings)
        self.end = int(self.tokenizer.eos_token_id)
        self.forbidden = torch.tensor(_placeholders(base, self.tokenizer) if self.see else [], dtype=torch.int64)
        """Ids that stand for pictures or turns: never drawn, and left out of the normalisation of log-probabilities."""
        config = LoraConfig(
            r=16,
            lora_alpha=32,
            target_modules="all-linear",
            exclude_modules=_outside(base) if self.see else None,
            task_type="CAUSAL_LM",
        )
        self.model = adapted(base, config, seed)
        self.model.to(device).eval()  # dropout off: what is trained is what wrote
        self.optimizer = torch.optim.AdamW(self.parameters, lr=settings.lr, weight_decay=0.0)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def asked(self, prompt: str, pictures: Sequence[Image] = ()) -> dict[str, Tensor]:
        """The model's input for a prompt: the instruction in the chat template, or plain; input_ids int64 [1, P].

        pictures: shown before the instruction to a model that sees; others are told the text alone.
        """
        text = self.settings.instruction.replace("{prompt}", prompt)
        if self.see:
            asked = self.see([[*pictures, text]])
        else:
            if templated := bool(self.tokenizer.chat_template):
                chat = [{"role": "user", "content": text}]
                text = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            asked = self.tokenizer(
                text, add_special_tokens=not templated, return_tensors="pt", return_token_type_ids=False
            )
        floats = self.model.dtype
        return {k: v.to(self.model.device, floats if v.is_floating_point() else None) for k, v in asked.items()}

    def check_room(self, prompt: str, asked: Inputs) -> None:
        """Raise ValueError where the model has too few positions for what it is asked and a whole answer."""
        length, longest = asked["input_ids"].shape[1], self.settings.max_new_tokens
        room = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if room is not None and length + longest > room:
            raise ValueError(
                f"trainer.rewriter.max_new_tokens: {length} tokens of instruction and prompt and {longest} new "
                f"ones are more than the {room} positions of {self.settings.path}: {prompt!r}; use fewer"
            )

    @torch.no_grad()
    def write(
        self,
        prompt: str,
        count: int,
        key: Sequence[int | str],
        fits: Callable[[str], bool],
        pictures: Sequence[Image] = (),
    ) -> Written:
        """`count` answers, drawn from the policy by Gumbel noise of a generator seeded by `key`.

        fits: whether the text encoders take a text whole. Raises ValueError where the model has too few positions.
        """
        inputs = self.asked(prompt, pictures)
        self.check_room(prompt, inputs)
        draw = _Draw(self._log_softmax, generator(*key))
        tokens_out = self.model.generate(
            **_repeated(inputs, count),
            max_new_tokens=self.settings.max_new_tokens,
            logits_processor=LogitsProcessorList([draw]),
        )
        tokens = tokens_out[:, inputs["input_ids"].shape[1] :]
        # The tokenizer's padding is the end token itself, so only the first one is of the answer.
        mask = completion_mask(tokens, self.end)
        answers = [self._new_prompt(row[row_mask], fits) for row, row_mask in zip(tokens, mask, strict=True)]
        texts = [prompt if answer is None else answer for answer in answers]
        return Written(inputs, tokens, torch.stack(draw.log_probs, 1), mask, texts, [a is not None for a in answers])

    def _new_prompt(self, tokens: Tensor, fits: Callable[[str], bool]) -> str | None:
        """What one answer holds between its tags; None where it does not end, or holds not just one thing there."""
        if tokens[-1] != self.end:
            return None
        text = self.tokenizer.decode(tokens[:-1], skip_special_tokens=False)
        first, last = TAGS
        # With a tag twice, which text is drawn would be a matter of parsing, and policies learn to make use of that.
        if text.count(first) != 1 or text.count(last) != 1:
            return None
        between, closed, _ = text.partition(first)[2].partition(last)
        prompt = " ".join(between.split())
        # Not closed: the last tag stands before the first.
        return prompt if closed and prompt and fits(prompt) else None

    def log_probs(self, written: Written) -> Tensor:
        """Log-probability of each token under the present weights, float32 [R, L], with gradients; teacher forcing
        without a cache."""
        count, new = written.tokens.shape
        rows = _repeated(written.asked, count)
        del rows["attention_mask"]  # of one prompt, nothing is padded
        ids = rows["input_ids"]
        for name in [name for name in rows if name.endswith("token_type_ids")]:  # 0 is text
            rows[name] = torch.nn.functional.pad(rows[name], (0, new - 1))
        rows["input_ids"] = torch.cat([ids, written.tokens], 1)[:, :-1]
        logits: Tensor = self.model(**rows, use_cache=False, logits_to_keep=new).logits
        return self._log_softmax(logits).gather(2, written.tokens[..., None])[..., 0]

    def _log_softmax(self, logits: Tensor) -> Tensor:
        """Log-probabilities of what may be drawn, float32 [..., V]."""
        # In float32: the logarithm of a sum over 1e5 words in bfloat16 is off by more than a clip range. Masked before
        # the normalisation, in writing and in training alike, so that the ratio of both is of the same distribution.
        allowed = logits.float().index_fill(-1, self.forbidden.to(logits.device), -torch.inf)
        return allowed.log_softmax(-1)

    def rewrite(
        self,
        prompt: str,
        key: Sequence[int | str],
        fits: Callable[[str], bool] = lambda text: True,
        pictures: Sequence[Image] = (),
    ) -> str:
        """One new prompt, a function of the weights and `key`."""
        return self.write(prompt, 1, ("rewritten", *key), fits, pictures).texts[0]

    def state_dict(self) -> dict[str, Any]:
        return {
            "adapter": {key: p.detach() for key, p in get_peft_model_state_dict(self.model).items()},
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_peft_model_state_dict(self.model, state["adapter"])
        self.optimizer.load_state_dict(state["optimizer"])

    def save_pretrained(self, folder: Path) -> None:
        """The adapter as peft loads it, and how the model is asked (`rewriter.json`).

        Without the tokenizer: beside one `AutoPeftModelForCausalLM` resizes the model's vocabulary.
        """
        self.model.save_pretrained(str(folder))
        write_atomic(folder / SETTINGS, json.dumps(self.settings.model_dump(mode="json"), indent=1))


def load_rewriter(folder: Path, device: str | torch.device = "cpu") -> Rewriter:
    """The trained rewriter that a run left in `folder`. Raises ValueError where there is none."""
    if not (folder / SETTINGS).is_file():
        raise ValueError(
            f"{folder} holds no rewriter: it has no {SETTINGS}; a run of prompt_rl has one in RUN/rewriter"
        )
    settings = RewriterSettings.model_validate_json((folder / SETTINGS).read_text(encoding="utf-8"))
    rewriter = Rewriter(settings, device=device)
    weights = load_peft_weights(str(folder))
    # peft loads what fits and says nothing of the rest.
    lost = sorted(set(weights) ^ set(get_peft_model_state_dict(rewriter.model)))
    if lost:
        raise ValueError(f"{folder}: its adapter is of another model: {lost[0]} is in one of them only")
    set_peft_model_state_dict(rewriter.model, weights)
    return rewriter


def load_base(
    settings: RewriterSettings,
) -> tuple[Any, Any, Callable[[Sequence[Sequence[Image | str]]], Inputs] | None]:
    """(tokenizer, model, what prepares pictures and text), the last None where the model does not see.

    The model is frozen and without the generation defaults of its makers: an answer is a sample.
    """
    see = None
    try:
        with accounted("trainer.rewriter.path"):
            config = AutoConfig.from_pretrained(settings.path)
            if sees(config.model_type) and not getattr(config, "is_encoder_decoder", False):
                held = LocalVLM(settings.path, settings.dtype, reward="trainer.rewriter.path")
                tokenizer, model, see = held.tokenizer, held.model, held.inputs
            else:
                tokenizer = AutoTokenizer.from_pretrained(settings.path)
                model = AutoModelForCausalLM.from_pretrained(settings.path, dtype=getattr(torch, settings.dtype))
    except ValueError as error:
        raise ValueError(
            f"trainer.rewriter.path: {settings.path} cannot be loaded as a causal language model of transformers, or "
            f"one that sees: {error}"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"trainer.rewriter.path: the tokenizer of {settings.path} has no eos_token, so no answer would ever end; "
            "set tokenizer.eos_token to the token that ends a turn, and save it"
        )
    end = tokenizer.eos_token_id
    # Without it, the makers' temperature, top-p and repetition penalty would change what is drawn, but not the
    # log-probabilities that training computes. Not `do_sample`: the noise is added by `_Draw`, and the largest is
    # taken.
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end, do_sample=False)
    return tokenizer, model.requires_grad_(False), see


def _placeholders(model: Any, tokenizer: Any) -> list[int]:
    """Ids that only a template may write: an answer with one would ask for a picture that is not there."""
    named = {
        getattr(model.config, f"{kind}_token_{end}", None) for kind in ("image", "video") for end in ("id", "index")
    }
    return sorted({*tokenizer.all_special_ids, *named} - {tokenizer.eos_token_id, None})


def _outside(model: Any) -> list[str]:
    """Names of the linear layers outside of the language model: what sees is not trained."""
    inside = set(model.get_decoder().modules())
    return [name for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and m not in inside]


def _repeated(asked: Inputs, count: int) -> dict[str, Tensor]:
    """Repeat inputs for `count` rows: everything has its rows, or its pictures' patches, along dimension 0."""
    return {name: torch.cat([value] * count) for name, value in asked.items()}


class _Draw(LogitsProcessor):
    """Samples by its own noise: the largest of log p + Gumbel noise is a draw from p. Keeps its log-probabilities."""

    def __init__(self, log_softmax: Callable[[Tensor], Tensor], source: torch.Generator) -> None:
        self.log_softmax, self.source = log_softmax, source
        self.log_probs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        log_p = self.log_softmax(scores)
        # float64: below 1 a float32 comes no nearer than 2^-24, and noise would end at 16.6: no rarer word could be
        # drawn.
        uniform = torch.rand(log_p.shape, generator=self.source, dtype=torch.float64)
        noisy = log_p - uniform.log().neg().log().to(log_p)
        self.log_probs.append(log_p.gather(1, noisy.argmax(1, keepdim=True))[:, 0])
        return noisy


ANY = 1_000_000
"""Tokenizers without a limit say that theirs is larger than this."""


class TextRoom:
    """Whether a text fits into the longest of a pipeline's text encoders; the others cut it, as ever.

    The limit is the tokenizer's `model_max_length`, for those that take it (all but CLIP's) also `max_sequence_length`
    of the call.
    """

    def __init__(self, pipe: Any, arguments: Mapping[str, Any]) -> None:
        parameter = inspect.signature(type(pipe).__call__).parameters.get("max_sequence_length")
        called = arguments.get("max_sequence_length", parameter.default if parameter else None)
        self.name, self.tokenizer, self.limit = "", None, 0
        for name, part in sorted(pipe.components.items()):
            if not name.startswith("tokenizer") or part is None:
                continue
            limit = int(getattr(part, "model_max_length", ANY))
            if isinstance(called, int) and "CLIP" not in type(part).__name__:
                limit = min(limit, called)
            if limit > self.limit:
                self.name, self.tokenizer, self.limit = name, part, limit

    def length(self, text: str) -> int:
        """Number of its tokens, those of the beginning and the end included."""
        return len(self.tokenizer(text, verbose=False).input_ids) if self.tokenizer is not None else 0

    def __call__(self, text: str) -> bool:
        return self.tokenizer is None or self.limit >= ANY or self.length(text) <= self.limit

    def check(self, prompts: Iterable[Prompt], source: str | None, model: str) -> None:
        """Raise ValueError, with its line in `source`, for a prompt that the text encoders of `model` would cut."""
        for row in prompts:
            if not self(row.text):
                raise ValueError(
                    f"{source}:{row.line}: {self.length(row.text)} tokens, but {self.name} of {model} takes "
                    f"{self.limit}: what comes after would not be drawn; shorten the prompt, or raise "
                    "sampling.pipeline_args.max_sequence_length where the model has one"
                )


def completion_mask(tokens: Tensor, end: int) -> Tensor:
    """Which tokens were written, bool [B, L]: up to and including the first `end` (all, where there is none)."""
    ended = (tokens == end).long().cumsum(dim=1)
    return (ended - (tokens == end).long()) == 0

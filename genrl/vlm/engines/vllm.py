"""Answers drawn by vLLM, with the weights of the model that is trained: in this process, or on a server.

The engine has its own copy of the model, its own processor and its own numerics, so three things are watched. It is
given each question's ids with one token per image, and what it made of them must be the trainer's ids. It gets the
weights whenever an optimiser step was made, as a checkpoint has them (LoRA merged), forgets what it had cached under
the old ones, and must say that it drew with the new ones. What is left, rounding, is measured (`sampler/gap_*`) and
corrected by the weight `engine_mismatch`.

Run with vLLM 0.32 (`LLM`, `SamplingParams`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from genrl.mdp.noise import derive_seed
from genrl.runtime.loop.process import Process
from genrl.vlm.config.schema import VLMConfig
from genrl.vlm.engines.generation import Completions, Finish, Sampling
from genrl.vlm.engines.server import Asked, Completion, Engine, Reply, Server, Shared, Version
from genrl.vlm.policies.folder import Stream, stream_of
from genrl.vlm.policies.policy import Encoded, Policy
from genrl.vlm.policies.processor import unexpanded


class InProcess:
    """vLLM beside the trained model, on the same GPU. Asleep while the model trains, if so configured."""

    def __init__(self, config: VLMConfig, *, several: bool = False) -> None:
        """several: this is one of several processes, each of which makes an engine of its own at the same time."""
        # with the engine in this process, weights are handed over as they are
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        import vllm

        assert config.generation.vllm is not None, "it is what samples"
        args = {"gpu_memory_utilization": 0.4, "enable_sleep_mode": True} | config.generation.vllm.args
        self.params, self.forgets, self.asleep = vllm.SamplingParams, bool(args["enable_sleep_mode"]), False
        self.llm = vllm.LLM(
            model=config.vlm.path,
            dtype=config.vlm.dtype,
            seed=config.seed,
            # one engine in each of `torchrun`'s processes, which takes its device and leaves the process group as it is
            distributed_executor_backend="external_launcher" if several else None,
            load_format=_without_weights(),  # the trained ones come before the first question
            # on a CPU vLLM 0.32 fails at a question with a seed of which only a part fits into the batch
            enable_chunked_prefill=None if torch.cuda.is_available() else False,
            generation_config="vllm",  # not the makers' temperature and top-p
            logprobs_mode="processed_logprobs",  # after temperature and forbidden ids, as the trainer's
            **args,
        )

    def load(self, weights: Stream, version: Version) -> None:
        if self.asleep:
            self.llm.wake_up(tags=["weights"])
        names = self.llm.apply_model(lambda model: _names_for(model, weights.names))[0]
        renamed = ((names[name], value) for name, value in weights.tensors)
        # `weights_path` would leave the engine with that path as its model's, and the next question fails
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": renamed})
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False
        # keys and values of the old weights would answer for the new ones
        if not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM keeps keys and values of the old weights: its prefix cache was not reset")
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()  # the scheduler's list of what is encoded, too
        self.llm.update_weight_version(str(version))

    def answer(self, asked: Sequence[Asked]) -> list[Reply]:
        prompts: list[dict[str, Any]] = [{"prompt_token_ids": request.ids} for request in asked]
        for prompt, request in zip(prompts, asked, strict=True):
            if request.pictures:
                prompt["multi_modal_data"] = {"image": list(request.pictures)}
        outputs = self.llm.generate(prompts, [self.params(**request.sampling) for request in asked], use_tqdm=False)
        replies = []
        for output in outputs:
            answers = [
                Completion(
                    list(request.token_ids),
                    [
                        chances[token].logprob
                        for token, chances in zip(request.token_ids, request.logprobs, strict=True)
                    ],
                    {span.version for span in request.weight_versions or ()},
                )
                for request in sorted(output.outputs, key=lambda request: request.index)
            ]
            replies.append(Reply(list(output.prompt_token_ids), answers))
        return replies

    def rest(self) -> None:
        if self.forgets:
            self.llm.sleep(level=2)
            self.asleep = True


def _without_weights() -> str:
    """A `load_format` of vLLM's that reads nothing. Its own, "dummy", writes random numbers into buffers, too, such as
    the mean of pixels, which no checkpoint has."""
    from vllm.model_executor.model_loader import BaseModelLoader, register_model_loader

    class Blank(BaseModelLoader):  # type: ignore[misc]  # Any where vLLM is not installed
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: Any, model_config: Any) -> None:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()

    register_model_loader("genrl_blank")(Blank)
    return "genrl_blank"


def _names_for(model: Any, weights: Iterable[str]) -> dict[str, str]:
    """What the engine's own copy of the model calls the weights of a checkpoint."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)  # most models of one modality have none

    def mapped(name: str) -> str | None:
        return name if mapper is None else next(iter(mapper.apply_list([name])), None)

    return nested(weights, (name for name, _ in model.named_parameters()), mapped)


class Sampler:
    """Draws by an engine what `generation.generate` draws by transformers, always with the weights as they are.

    version: optimiser steps since this process began; `stepped` counts them.
    """

    def __init__(self, engine: Engine, policy: Policy) -> None:
        self.engine, self.policy = engine, policy
        self.steps, self.version = 0, cast(Version, 0)
        self.loaded: Version | None = None
        self._ready = False
        tokens = policy.tokenizer.convert_ids_to_tokens(policy.forbidden.tolist())
        self.never = [token for token in tokens if token is not None]

    @property
    def weights(self) -> Stream:
        """The weights that draw."""
        return stream_of(self.policy)

    def stepped(self) -> None:
        """The weights have changed."""
        self.steps += 1
        self.version = self.steps

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Within the block the engine is awake and has the weights; where there is none around it, each `generate` is
        one. All processes enter it together, since together they hand over the weights."""
        if self._ready:
            yield
            return
        if self.loaded != self.version:
            self.engine.load(self.weights, self.version)
            self.loaded = self.version
        self._ready = True
        try:
            yield
        finally:
            self._ready = False
            self.engine.rest()
            self.loaded = None if self.engine.forgets else self.loaded

    def generate(
        self, prompts: Sequence[Encoded], n: int, sampling: Sampling, keys: Sequence[Sequence[int | str]]
    ) -> Completions:
        """Sample as `generation.generate` does; only as far as its rounding is an answer a function of its key.

        Raises RuntimeError where the engine read other ids than the trainer has, drew with other weights, or returned
        another number of answers or one without an end.
        """
        requests = [self._asked(*answer, n, sampling) for answer in zip(prompts, keys, strict=True)]
        with self.ready():
            replies = self.engine.answer(requests)
        stop = {*self.policy.stop_ids, *sampling.stop_ids}
        answers = []
        for prompt, reply in zip(prompts, replies, strict=True):
            self._check(prompt, reply, n, stop, sampling.max_new_tokens)
            answers += reply.answers
        longest = max(len(answer.ids) for answer in answers)
        lengths = torch.tensor([len(answer.ids) for answer in answers])
        log_prob = torch.zeros(len(answers), longest)
        tokens = torch.full((len(answers), longest), self.policy.pad_id)
        for row, answer in enumerate(answers):
            tokens[row, : len(answer.ids)] = torch.tensor(answer.ids)
            log_prob[row, : len(answer.ids)] = torch.tensor(answer.log_prob)
        finish: list[Finish] = ["stop" if answer.ids[-1] in stop else "length" for answer in answers]
        texts = [self.policy.tokenizer.decode(answer.ids, skip_special_tokens=True) for answer in answers]
        mask, group = torch.arange(longest) < lengths[:, None], torch.arange(len(prompts)).repeat_interleave(n)
        device = self.policy.device
        return Completions(tokens.to(device), mask.to(device), log_prob.to(device), group.to(device), finish, texts)

    def _asked(self, prompt: Encoded, key: Sequence[int | str], n: int, sampling: Sampling) -> Asked:
        params = {
            "n": n,
            "seed": derive_seed(*key) >> 1,  # answer k has seed + k, which must not leave 63 bits
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_new_tokens,
            "stop_token_ids": sorted({*self.policy.stop_ids, *sampling.stop_ids}),
            "bad_words": self.never,
            "logprobs": 0,  # the chosen token's alone
        }
        return Asked(unexpanded(prompt.tokens, self.policy.processor), prompt.tokens.pictures, params)

    def _check(self, prompt: Encoded, reply: Reply, n: int, stop: set[int], most: int) -> None:
        ours, theirs = prompt.tokens.ids.tolist(), reply.prompt_ids
        if ours != theirs:
            raise RuntimeError(
                f"{prompt.where}: vLLM read other tokens ({len(theirs)}) than the trainer has ({len(ours)}): another "
                "processor, chat template or size of images. Give both the same model folder."
            )
        if len(reply.answers) != n:
            raise RuntimeError(f"{prompt.where}: {n} answers were asked of vLLM, it returned {len(reply.answers)}")
        for answer in reply.answers:
            if not answer.ids or (answer.ids[-1] not in stop and len(answer.ids) < most):
                raise RuntimeError(f"{prompt.where}: vLLM broke an answer off after {len(answer.ids)} tokens")
            if answer.versions - {str(self.version)}:
                raise RuntimeError(
                    f"{prompt.where}: vLLM drew with the weights of version {sorted(answer.versions)}, the trainer is "
                    f"at {self.version}: does another run use the same server?"
                )


class Given(Sampler):
    """Draws with weights that it is given, whatever the model has."""

    given: Mapping[str, Tensor]

    def give(self, weights: Mapping[str, Tensor], version: str) -> None:
        """Draw with these weights from now on, as a checkpoint has them."""
        self.given, self.version = weights, version

    @property
    def weights(self) -> Stream:
        return Stream(list(self.given), self.given.items())


def use_vllm(config: VLMConfig, policy: Policy, process: Process, optimizer: Optimizer) -> Sampler | None:
    """Let vLLM answer for this policy from here on, where `generation.vllm` says so; the optimiser's steps tell it of
    new weights, and so does a state that the optimiser is given, with which go weights of a checkpoint.

    Raises RuntimeError where there is no such server.
    """
    if (settings := config.generation.vllm) is None:
        return None
    accelerator = process.accelerator
    engine: Engine
    if settings.url is None:
        engine = InProcess(config, several=accelerator.num_processes > 1)
    else:
        folder = Path(settings.weights or process.run.folder / "weights")
        engine = server = Server(settings.url, folder, config.vlm.path)
        if accelerator.num_processes > 1:
            engine = Shared(server, accelerator)
    policy.sampler = sampler = Sampler(engine, policy)
    optimizer.register_step_post_hook(lambda *_: sampler.stepped())
    optimizer.register_load_state_dict_post_hook(lambda *_: sampler.stepped())
    return sampler


def nested(names: Iterable[str], engine: Iterable[str], mapped: Callable[[str], str | None]) -> dict[str, str]:
    """Each name of a checkpoint, with the levels added that the engine has besides.

    engine: names of its parameters; mapped: its own rule from a checkpoint's names to those, None for weights that it
    ignores. A level is added where a module of the engine has no child of the next name, and just one of its children
    has; what else the checkpoint has in that module goes there too, for the engine to leave out. All else is left to
    the engine, which splits and joins weights in its own ways (`q_proj` is in `qkv_proj`).
    """
    tree: dict[str, Any] = {}
    for name in engine:
        node = tree
        for part in name.split("."):
            node = node.setdefault(part, {})
    paths = {name: (mapped(name) or "").split(".") for name in names}
    levels: dict[tuple[str, ...], str] = {}
    for path in paths.values():
        _places(path, tree, levels)
    return {name: _with_levels(name, path, _places(path, tree, levels)) for name, path in paths.items()}


def _places(path: list[str], node: dict[str, Any], levels: dict[tuple[str, ...], str]) -> list[tuple[int, str]]:
    """Places in `path` before which a level is missing, with its name. Those found are kept in `levels` by module."""
    shown, at = [], tuple[str, ...]()
    for place, part in enumerate(path):
        if part not in node:
            inside = [level for level, children in node.items() if part in children]
            if at and len(inside) == 1:
                levels.setdefault(at, inside[0])
            if at not in levels:
                break
            shown.append((place, levels[at]))
            node, at = node[levels[at]], (*at, levels[at])
        if part not in node:
            break
        node, at = node[part], (*at, part)
    return shown


def _with_levels(name: str, path: list[str], places: list[tuple[int, str]]) -> str:
    """`name`, whose end is that of `path`: the engine's own rule changes beginnings."""
    parts = name.split(".")
    for place, level in reversed(places):
        at = len(parts) - (len(path) - place)
        if at < 1 or parts[at] != path[place]:
            return name
        parts.insert(at, level)
        path = [*path[:place], level, *path[place:]]
    return ".".join(parts)

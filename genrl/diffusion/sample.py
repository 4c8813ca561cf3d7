"""`genrl sample` and `genrl eval`: pictures and scores of any pipeline, with or without an adapter.

Sampling here is a plain pipeline call: prompt k of seed s is drawn, alone, from `torch.Generator().manual_seed(s + k)`,
so a script with diffusers alone gives the same picture.

As a program of its own it draws pictures on request: the data server of Syn-GRPO,

    python -m genrl.diffusion.sample assets/tiny-sd --num-inference-steps 20 --guidance-scale 4

which reads a line of JSON per picture from standard input, `{"id": ..., "description": ..., "seed": ...}`, and answers
each with a line on standard output, `{"id": ..., "png": base64}` or `{"id": ..., "error": ...}`, in their order. It
ends where its input does. A picture is a function of pipeline, description and seed: each is drawn alone.
"""

from __future__ import annotations

import argparse
import base64
import inspect
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

import torch
from PIL.Image import Image
from torch import Tensor

from genrl.data.picture_rows import SAMPLE_GRID, SAMPLE_LIST, sampled_pictures
from genrl.data.prompts import Prompt
from genrl.diffusion.config.sections import Model
from genrl.diffusion.evaluate import Evaluated, evaluate
from genrl.diffusion.policy.adapters import activate_all, add_frozen, load_lora
from genrl.diffusion.policy.decoding import spare_vae
from genrl.diffusion.policy.interfaces import Pipeline
from genrl.diffusion.policy.loading import check_call_arguments, load_pipeline
from genrl.diffusion.policy.policy import Policy, Untouched
from genrl.diffusion.policy.rewriter import Rewriter, TextRoom
from genrl.diffusion.rollout.scoring import Scorers, check_rows, not_finite
from genrl.runtime.folder.run import write_atomic
from genrl.runtime.show.pictures import grid, save_png, to_pil
from genrl.runtime.weights.devices import default_device


def load(model: Model, lora: str | None) -> Pipeline:
    """A pipeline and, where given, its adapter (a folder or hub id), on the best device at hand."""
    pipe = load_pipeline(model)
    spare_vae(pipe, sliced=model.slice_vae, tiled=model.tile_vae)
    if lora:
        load_lora(pipe, lora)
        if model.lora is not None and model.lora.frozen:
            add_frozen(pipe, model.lora.frozen)
            activate_all(pipe)
    return pipe.to(default_device())


def sample(
    pipe: Pipeline,
    prompts: Sequence[str],
    out: Path,
    *,
    seed: int = 0,
    arguments: Mapping[str, Any] | None = None,
    inputs: Mapping[str, Sequence[Any]] = MappingProxyType({}),
    sizes: Sequence[Mapping[str, int]] = (),
    rewriter: Rewriter | None = None,
) -> list[Path]:
    """Draw one picture per prompt into `out` (00000.png, ..., prompts.json, grid.png); returns the pictures' paths.

    The pictures of an earlier call, which its prompts.json lists, are removed; no other files are. arguments: of the
    pipeline call (num_inference_steps, guidance_scale, height, ...); inputs: those with a value per prompt; sizes: each
    prompt's own. rewriter: what is drawn are the texts of `rewritten`. Raises ValueError for an argument that the
    pipeline does not take, and RuntimeError, when all are written, where one is not finite: it is a black file.
    """
    check_call_arguments(pipe, arguments or (), section=None)
    texts = list(prompts)
    if rewriter is not None:
        texts = rewritten(rewriter, pipe, prompts, seed, arguments or {}, inputs)
    out.mkdir(parents=True, exist_ok=True)
    for old in sampled_pictures(out):
        old.unlink(missing_ok=True)
    record = [{"file": f"{k:05d}.png", "prompt": prompt, "seed": seed + k} for k, prompt in enumerate(prompts)]
    if rewriter is not None:
        record = [{**row, "drawn": text} for row, text in zip(record, texts, strict=True)]
    # Before the pictures, so that those of a call that is cut short are listed, too, and removed by the next.
    write_atomic(out / SAMPLE_LIST, json.dumps(record, indent=1, ensure_ascii=False))
    paths, pictures = [], []
    try:
        for k, picture in enumerate(pictures_of(pipe, texts, seed, arguments or {}, inputs, sizes)):
            paths.append(save_png(picture, out / f"{k:05d}.png"))
            pictures.append(picture)
    finally:
        if pictures:
            save_png(grid(pictures[:64], texts[:64]), out / SAMPLE_GRID)
    return paths


def rewritten(
    rewriter: Rewriter,
    pipe: Pipeline,
    prompts: Sequence[str],
    seed: int,
    arguments: Mapping[str, Any],
    inputs: Mapping[str, Sequence[Any]] = MappingProxyType({}),
) -> list[str]:
    """The prompts as a language model rewrites them for the pipeline, prompt k by the key (seed + k,), shown its
    pictures where the model sees."""
    fits = TextRoom(pipe, arguments)
    inputs_of = [[values[k] for values in inputs.values()] for k in range(len(prompts))]
    return [rewriter.rewrite(prompt, (seed + k,), fits, inputs_of[k]) for k, prompt in enumerate(prompts)]


def pictures_of(
    pipe: Pipeline,
    texts: Sequence[str],
    seed: int,
    arguments: Mapping[str, Any],
    inputs: Mapping[str, Sequence[Any]] = MappingProxyType({}),
    sizes: Sequence[Mapping[str, int]] = (),
) -> Iterator[Image]:
    """One picture per text, each alone, text k from the noise of seed + k; of a video its frames side by side. Raises
    RuntimeError after the last where one was not finite: it is black."""
    broken = 0
    for sample in samples(pipe, texts, range(seed, seed + len(texts)), arguments, inputs, sizes):
        broken += not bool(sample.isfinite().all())
        yield to_pil(sample)
    if broken:
        raise RuntimeError(not_finite(broken, len(texts), pipe))


def samples(
    pipe: Pipeline,
    texts: Sequence[str],
    seeds: Sequence[int],
    arguments: Mapping[str, Any],
    inputs: Mapping[str, Sequence[Any]] = MappingProxyType({}),
    sizes: Sequence[Mapping[str, int]] = (),
) -> Iterator[Tensor]:
    """What the pipeline makes of each text, alone, from the noise of its seed, on the CPU: a picture [3, H, W] or video
    [F, 3, H, W] in [0, 1], or a sound [channels, S] in [-1, 1]. sizes: of each, which win over `arguments`."""
    settings = dict(getattr(pipe, "_progress_bar_config", {}))
    pipe.set_progress_bar_config(disable=True)  # one for each picture tells nothing
    for k, (text, seed) in enumerate(zip(texts, seeds, strict=True)):
        generator = torch.Generator().manual_seed(seed)
        call = {**arguments, **{name: values[k] for name, values in inputs.items()}, **(sizes[k] if sizes else {})}
        pictures = pipe(prompt=text, generator=generator, output_type="pt", return_dict=False, **call)[0][0]
        yield pictures.cpu()
    pipe.set_progress_bar_config(**settings)


def evaluate_pipeline(
    pipe: Pipeline,
    prompts: Sequence[Prompt],
    scorers: Scorers,
    *,
    batch_size: int = 8,
    seed: int = 1234,
    num_pictures: int = 16,
    arguments: Mapping[str, Any],
    inputs: Mapping[str, str] = MappingProxyType({}),
) -> Evaluated:
    """Score one picture per prompt, in the prompt's own size where it has one, by every reward: the evaluation of
    training, on any pipeline.

    arguments: of the pipeline call; the number of steps, where it is not among them, is the pipeline's own default.
    inputs: those that are pictures, with the columns that name the files, which the caller has checked.
    """
    check_call_arguments(pipe, [*arguments, *inputs, *(name for row in prompts for name in row.size)], section=None)
    if "num_inference_steps" not in arguments:
        arguments = {**arguments, "num_inference_steps": _default_steps(pipe)}
    check_rows(scorers.rewards, prompts, "prompts")
    untouched = Untouched(pipe)
    policy = Policy(pipe)
    policy.untouched = untouched
    try:
        return evaluate(
            policy,
            prompts,
            scorers,
            arguments,
            batch_size=batch_size,
            seed=seed,
            num_pictures=num_pictures,
            inputs=inputs,
        )
    finally:
        policy.release()


def _default_steps(pipe: Pipeline) -> int:
    """`num_inference_steps` as the pipeline's call has it where nobody says; ValueError where it has no default."""
    parameter = inspect.signature(type(pipe).__call__).parameters.get("num_inference_steps")
    if parameter is None or not isinstance(parameter.default, int):
        raise ValueError(f"{type(pipe).__name__} has no default number of steps: give num_inference_steps")
    return parameter.default


def serve(pipe: Any, arguments: dict[str, Any], requests: TextIO, answers: TextIO) -> None:
    """Answer every line of `requests`. What one picture makes fail is its own answer, and the next one is drawn."""
    pipe.set_progress_bar_config(disable=True)
    for line in requests:
        request = json.loads(line)
        try:
            generator = torch.Generator().manual_seed(request["seed"])
            with torch.no_grad():
                picture = pipe(prompt=request["description"], generator=generator, **arguments).images[0]
            stream = io.BytesIO()
            picture.convert("RGB").save(stream, "PNG")
            answer = {"png": base64.b64encode(stream.getvalue()).decode()}
        except (RuntimeError, ValueError, TypeError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps({"id": request["id"], **answer}) + "\n")
        answers.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", help="folder or hub id")
    parser.add_argument("--num-inference-steps", type=int, default=20)
    parser.add_argument("--guidance-scale", type=float, default=4.0)
    args = parser.parse_args()
    answers, sys.stdout = sys.stdout, sys.stderr  # what libraries print must not come between the answers
    pipe = load_pipeline(Model(path=args.pipeline))
    arguments = {"num_inference_steps": args.num_inference_steps, "guidance_scale": args.guidance_scale}
    check_call_arguments(pipe, arguments, section=None)
    pipe.to(default_device())
    serve(pipe, arguments, sys.stdin, answers)


if __name__ == "__main__":
    main()

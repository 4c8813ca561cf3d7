"""Draws pictures on request, as a process of its own: the data server of Syn-GRPO.

    python -m genrl.diffusion.data_server assets/tiny-sd --num-inference-steps 20 --guidance-scale 4

It reads a line of JSON per picture from standard input, `{"id": ..., "description": ..., "seed": ...}`, and answers
each with a line on standard output, `{"id": ..., "png": base64}` or `{"id": ..., "error": ...}`, in their order. It
ends where its input does. A picture is a function of pipeline, description and seed: each is drawn alone.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import sys
from typing import Any, TextIO

import torch

from genrl.diffusion.config.sections import Model
from genrl.diffusion.policy.loading import check_call_arguments, load_pipeline
from genrl.runtime.weights.devices import default_device


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

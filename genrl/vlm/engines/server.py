"""A server of vLLM's, for one process or several.

Run with vLLM 0.32 (`/inference/v1/generate` and the development routes).
"""

from __future__ import annotations

import base64
import io
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from accelerate import Accelerator
from PIL import Image
from safetensors.torch import save_file

from genrl.vlm.policies.folder import Stream


class Asked(NamedTuple):
    """A question for an engine: ids with one token per image, RGB images, arguments of vLLM's `SamplingParams`."""

    ids: list[int]
    pictures: tuple[Image.Image, ...]
    sampling: dict[str, Any]


class Completion(NamedTuple):
    """An answer: ids with the stop token, log-probability of each, versions of the weights that drew them."""

    ids: list[int]
    log_prob: list[float]
    versions: set[str]


class Reply(NamedTuple):
    """What an engine made of a question: the ids of the prompt, images expanded, and the answers in their order."""

    prompt_ids: list[int]
    answers: list[Completion]


Version = int | str
"""What an engine knows its weights by, as text."""


class Engine(Protocol):
    """forgets: the weights are gone after `rest`, and have to be loaded again."""

    forgets: bool

    def load(self, weights: Stream, version: Version) -> None:
        """Take these weights, and drop everything cached under others."""

    def answer(self, asked: Sequence[Asked]) -> list[Reply]:
        """Answers in the order of the questions."""

    def rest(self) -> None:
        """Nothing is asked for a while."""


TOGETHER = 256
"""Questions that a server works on at the same time."""
TIMEOUT_S = 600.0
"""Of a request to a server: drawing a group of answers, or loading weights."""
SERVE = "VLLM_SERVER_DEV_MODE=1 vllm serve {path} --enable-scale-out --logprobs-mode processed_logprobs"


class Server:
    """A server of vLLM's. New weights are handed over as a file in `folder`, which it has to see under that name.

    They have the names of the checkpoint that training began from. A server that loaded it at its start takes them.
    """

    forgets = False

    def __init__(self, url: str, folder: Path, path: str) -> None:
        self.url, self.folder = url.rstrip("/"), folder
        self.start = f"; start one with: {SERVE.format(path=path)}"
        self.model = self._call("/v1/models")["data"][0]["id"]

    def load(self, weights: Stream, version: Version) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: value.cpu().contiguous() for name, value in weights.tensors}
        save_file(tensors, self.folder / "model.safetensors")
        where = {"weights_path": str(self.folder.resolve())}
        self._call("/collective_rpc", {"method": "reload_weights", "kwargs": where})
        # Keys, values and encoded pictures of the old weights would answer for the new ones.
        if not self._call("/reset_prefix_cache", {})["success"]:
            raise RuntimeError(f"{self.url} keeps keys and values of the old weights: its prefix cache was not reset")
        self._call("/reset_mm_cache", {})
        self._call("/reset_encoder_cache", {})
        self._call("/update_weight_version", {"new_version": str(version)})

    def answer(self, asked: Sequence[Asked]) -> list[Reply]:
        with ThreadPoolExecutor(TOGETHER) as pool:
            return list(pool.map(self._one, asked))

    def rest(self) -> None:
        pass

    def _one(self, asked: Asked) -> Reply:
        request = {
            "model": self.model,
            "token_ids": asked.ids,
            "content_parts": [{"type": "image_url", "url": _as_url(picture)} for picture in asked.pictures] or None,
            "sampling_params": asked.sampling | {"output_kind": 2},  # all answers when the last one has ended
            "return_token_ids": True,
        }
        reply = self._call("/inference/v1/generate", request)
        answers = []
        for choice in sorted(reply["choices"], key=lambda choice: choice["index"]):
            chances = [position["logprob"] for position in choice["logprobs"]["content"]]
            versions = {span["version"] for span in choice.get("weight_versions") or ()}
            answers.append(Completion(choice["token_ids"], chances, versions))
        return Reply(reply["prompt_token_ids"], answers)

    def _call(self, route: str, content: dict[str, Any] | None = None) -> Any:
        """POST `content` as JSON, or GET without; the JSON of the reply, None where it is empty."""
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self.url + route, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
                text = reply.read()
        except urllib.error.HTTPError as error:
            details = error.read()[:300].decode("utf-8", "replace")
            raise RuntimeError(f"{self.url}{route} answers {error.code}: {details}{self.start}") from error
        except OSError as error:
            raise RuntimeError(f"no vLLM server answers at {self.url}{route}: {error}{self.start}") from error
        return json.loads(text) if text else None


def _as_url(picture: Image.Image) -> str:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")  # the same pixels
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


class Shared:
    """A server that draws for several processes: the first one hands the weights over, while the others wait."""

    forgets = False

    def __init__(self, server: Server, accelerator: Accelerator) -> None:
        self.server, self.accelerator = server, accelerator

    def load(self, weights: Stream, version: Version) -> None:
        self.accelerator.wait_for_everyone()  # until nobody draws with the old ones
        if self.accelerator.is_main_process:
            self.server.load(weights, version)
        else:
            for _ in weights.tensors:  # this process's part in gathering shards
                pass
        self.accelerator.wait_for_everyone()

    def answer(self, asked: Sequence[Asked]) -> list[Reply]:
        return self.server.answer(asked)

    def rest(self) -> None:
        self.server.rest()

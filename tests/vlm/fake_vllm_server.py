"""A stand-in for a server of vLLM's, on `fake_vllm`."""

import base64
import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from PIL import Image
from safetensors.torch import load_file

from tests.vlm import fake_vllm


class Handler(BaseHTTPRequestHandler):
    """The routes of a server that are used, before a `fake_vllm.LLM`."""

    llm: fake_vllm.LLM

    def log_message(self, *_: Any) -> None:
        pass

    def _reply(self, content: Any, status: int = 200) -> None:
        body = b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._reply({"data": [{"id": "tiny"}]} if self.path == "/v1/models" else None)

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        match self.path:
            case "/collective_rpc":
                weights = load_file(Path(given["kwargs"]["weights_path"]) / "model.safetensors")
                self.llm.collective_rpc(given["method"], {"weights_iterator": weights.items()})
                self._reply({"results": [None]})
            case "/reset_prefix_cache":
                self._reply({"success": self.llm.reset_prefix_cache()})
            case "/reset_mm_cache" | "/reset_encoder_cache":
                self._reply(None)
            case "/update_weight_version":
                self.llm.update_weight_version(given["new_version"])
                self._reply({"success": True})
            case "/inference/v1/generate":
                self._reply(self._generated(given))
            case _:
                self._reply({"error": "no such route"}, 404)

    def _generated(self, given: dict[str, Any]) -> dict[str, Any]:
        parts = given["content_parts"] or []
        pictures = [Image.open(io.BytesIO(base64.b64decode(part["url"].partition(",")[2]))) for part in parts]
        sampling = {name: value for name, value in given["sampling_params"].items() if name != "output_kind"}
        params = fake_vllm.SamplingParams(**sampling)
        prompt = {"prompt_token_ids": given["token_ids"], "multi_modal_data": {"image": pictures}}
        made = self.llm.one(prompt, params)
        choices = []
        for one in made.outputs:
            pairs = zip(one.token_ids, one.logprobs, strict=True)
            content = [{"token_id": token, "logprob": chance[token].logprob} for token, chance in pairs]
            sampled = {"index": one.index, "token_ids": one.token_ids, "logprobs": {"content": content}}
            spans = [{"version": self.llm.version, "start": 0, "end": len(content)}]
            choices.append(sampled | {"weight_versions": spans})
        return {"choices": choices, "prompt_token_ids": made.prompt_token_ids}


@contextmanager
def serving(model: Path) -> Iterator[str]:
    """The address of a server of this model, within the block."""
    Handler.llm = fake_vllm.LLM(str(model))
    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}"
    finally:
        listening.shutdown()
        listening.server_close()

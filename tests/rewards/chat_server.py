"""An OpenAI-compatible server on loopback that answers as the test says."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = Callable[[dict[str, Any], int], "tuple[int, bytes]"]


def text(content: str) -> tuple[int, bytes]:
    return 200, json.dumps({"choices": [{"message": {"content": content}}]}).encode()


def next_token(**log_probabilities: float) -> tuple[int, bytes]:
    top = [{"token": token, "logprob": value} for token, value in log_probabilities.items()]
    choice = {"message": {"content": "x"}, "logprobs": {"content": [{"top_logprobs": top}]}}
    return 200, json.dumps({"choices": [choice]}).encode()


@contextmanager
def serve(reply: Reply) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The server's URL and the requests it has got. `reply` gets the request and how many came before."""
    requests: list[dict[str, Any]] = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(requests)
                requests.append({"path": self.path, "headers": dict(self.headers), **body})
            status, answer = reply(body, number)
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

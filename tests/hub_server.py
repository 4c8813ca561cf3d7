"""As much of the hub's HTTP interface as uploads and downloads of small files use, on this machine."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

COMMIT = "c" * 40


class Hub(ThreadingHTTPServer):
    """Repositories as path -> content. refuse: the status with which uploads are refused, if any."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.refuse: int | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = urlsplit(self.path).path
        if not self.headers.get("Authorization"):
            return self._json({"error": "Invalid username or password."}, 401)
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if self.server.refuse is not None:
            return self._json({"error": "you may not write there"}, self.server.refuse)
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.server.repos.setdefault(name, {})
            self.server.private[name] = bool(asked.get("private")) or asked.get("visibility") == "private"
            return self._json({"url": f"{self.server.address}/{name}"})
        repo, action = _repo(path)
        if action == "preupload/main":
            files = json.loads(body)["files"]
            return self._json({"files": [_regular(one["path"]) for one in files]})
        if action == "commit/main":
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    self.server.repos[repo][line["value"]["path"]] = content
            url = f"{self.server.address}/{repo}/commit/{COMMIT}"
            return self._json({"success": True, "commitOid": COMMIT, "commitUrl": url, "hookOutput": ""})
        self._json({"error": f"no such address: {path}"}, 404)

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if path.startswith("/api/models/"):
            repo, action = _repo(path)
            if repo not in self.server.repos:
                return self._missing("RepoNotFound")
            files = [{"rfilename": name} for name in sorted(self.server.repos[repo])]
            if action.startswith("tree/"):
                files = [_entry(name, content) for name, content in sorted(self.server.repos[repo].items())]
                return self._json(files)
            return self._json({"id": repo, "sha": COMMIT, "siblings": files, "private": False, "tags": []})
        repo, _, rest = path[1:].partition("/resolve/")
        content = self.server.repos.get(repo, {}).get(rest.partition("/")[2])
        if content is None:
            return self._missing("EntryNotFound" if repo in self.server.repos else "RepoNotFound")
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
        self._body(content)

    do_HEAD = do_GET

    def _missing(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self._body(b"")

    def _json(self, value: Any, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self._body(json.dumps(value).encode())

    def _body(self, content: bytes) -> None:
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: pytest's output stays readable."""


def _repo(path: str) -> tuple[str, str]:
    """org/name and what is asked of it, from /api/models/org/name/action."""
    organisation, name, *rest = path.removeprefix("/api/models/").split("/")
    return f"{organisation}/{name}", "/".join(rest)


def _regular(path: str) -> dict[str, Any]:
    return {"path": path, "uploadMode": "regular", "shouldIgnore": False, "oid": None}


def _entry(path: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


@contextmanager
def reached(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[Hub]:
    """The stand-in as the hub of this process, where somebody is logged in; what it gives is kept in `cache`."""
    with hub() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.address)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants._HF_DEFAULT_ENDPOINT, running.address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", "hf_stand_in")
        yield running

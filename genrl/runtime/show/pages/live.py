"""What the live page asks for: state, charts, prompts and pictures of the runs that are watched, as JSON and bytes.

The local server of `genrl watch`: on loopback only, it reads and never writes.
"""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from genrl.runtime.loop.progress import duration
from genrl.runtime.show.pages import render, views
from genrl.runtime.show.pages.state import Followed, Pace, pace, state_of, warnings
from genrl.runtime.show.pictures import before_after

_AT_MOST_EVERY_S = 0.5
_RATES = {"images_per_s": "images/s", "tokens_per_s": "tokens/s", "env_steps_per_s": "steps/s"}
_HEADLINE = "headline:"


class Live:
    """Some runs, looked at together. Several pages may ask at once: one lock serves them in turn."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """folders: of runs, or where runs will begin. Raises ValueError for more than there are colours, for the same
        run twice, and for a folder that holds something else."""
        if len(folders) > views.COLOURS:
            raise ValueError(f"{len(folders)} runs are too many for one page: watch at most {views.COLOURS} at once")
        for i, folder in enumerate(folders):
            if folder.resolve() in [other.resolve() for other in folders[:i]]:
                raise ValueError(f"{folder} is given twice: give each run once")
            check_folder(folder)
        self.runs = [Followed(folder, name) for folder, name in zip(folders, names(folders), strict=True)]
        self.lock = threading.Lock()
        self._looked = -_AT_MOST_EVERY_S

    def page(self) -> str:
        """The HTML page, which asks for all else."""
        folders = [str(run.run.folder) for run in self.runs]
        return render("watch.html", {"names": [run.name for run in self.runs], "folders": folders})

    def state(self) -> dict[str, Any]:
        """All of the page but charts and prompts.

        `parts`: element id -> HTML. `pictures`: of each run its sheets, newest first. `rows` and `samples` change where
        charts and prompts have changed.
        """
        with self.lock:
            self._look()
            return {
                "parts": self._parts(),
                "pictures": [self._pictures(i) for i in range(len(self.runs))],
                "rows": " ".join(f"{run.rows}:{run.done}" for run in self.runs),
                "samples": " ".join(str(_changed(run.run.samples)) for run in self.runs),
            }

    def figures(self, keys: Sequence[str], hidden: Collection[int]) -> dict[str, str]:
        """Charts as HTML by the keys that `state` names; those that are unknown are left out. hidden: numbers of runs
        whose lines are not drawn."""
        with self.lock:
            self._look()
            # One without rows in the place of a hidden run: the others keep their colours.
            runs = [run if i not in hidden else Followed(run.run.folder, run.name) for i, run in enumerate(self.runs)]
            logged = {key for run in self.runs for key in run.columns}
            large = {f"{_HEADLINE}{i}": headline for i, headline in enumerate(views.headlines(self.runs))}
            charts = {}
            for key in keys:
                if key in large:
                    figure = views.headline_figure(runs, large[key])
                    charts[key] = render("chart_part.html", {"headline_of": figure, "figure_of": None})
                elif key in logged:
                    figure = views.figure(runs, key)
                    charts[key] = render("chart_part.html", {"headline_of": None, "figure_of": figure})
            return charts

    def prompts(self, number: int, find: str) -> dict[str, Any]:
        """`html`: the rows of a page of prompts; `number`: of the page that it is, from 0; `pages`; `prompts`: how many
        there are on all pages."""
        with self.lock:
            page = views.prompt_page(self.runs, number, find)
        rows = [
            (row.prompt, [[None if cell is None else self._cell(i, cell) for cell in cells]
                          for i, cells in enumerate(row.runs)])
            for row in page.rows
        ]  # fmt: skip
        values = {"rows": rows, "names": [run.name for run in self.runs]}
        html = render("prompts.html", values) if rows else ""
        return {"html": html, "number": page.number, "pages": page.pages, "prompts": page.prompts}

    def file(self, number: int, name: str) -> tuple[str, bytes] | None:
        """(ending, content) of a picture, film or sound of a run; None where there is none of this name."""
        if number >= len(self.runs):
            return None
        run = self.runs[number].run
        if name == "before-after":
            with self.lock:
                sheet = before_after(run.samples)
            if sheet is None:
                return None
            data = io.BytesIO()
            sheet.save(data, "PNG")
            return "png", data.getvalue()
        path = views.served(run, name)
        return None if path is None else (path.suffix[1:], path.read_bytes())

    def _look(self) -> None:
        if time.monotonic() - self._looked >= _AT_MOST_EVERY_S:
            for run in self.runs:
                run.look()
            self._looked = time.monotonic()

    def _parts(self) -> dict[str, str]:
        headlines = [f"{_HEADLINE}{i}" for i in range(len(views.headlines(self.runs)))]
        values = {
            "cards": [self._card(run) for run in self.runs],
            "headlines": headlines,
            "gains": views.gains(self.runs),
            "films": [
                [(path.stem, self._url(i, path)) for path in views.films(run.run)[:12]]
                for i, run in enumerate(self.runs)
            ],
            "sounds": [
                [(path.stem, self._url(i, path)) for path in views.sounds(run.run)[:12]]
                for i, run in enumerate(self.runs)
            ],
            "names": [run.name for run in self.runs],
            "sections": views.sections(self.runs),
            "timings": views.timings(self.runs),
            "differences": views.differences(self.runs),
        }
        ids = ("cards", "headlines", "gains", "media", "sections", "timings", "differences")
        return {part: render("watch_parts.html", values | {"part": part}) for part in ids}

    def _card(self, run: Followed) -> dict[str, Any]:
        state, rate = state_of(run), pace(run)
        return {
            "name": run.name,
            "state": state.word,
            "note": state.note,
            "done": run.done,
            "planned": run.planned,
            "share": min(1.0, run.done / run.planned) if run.planned else None,
            "pace": _in_words(run, rate, going=state.word in ("starting", "running", "hung")),
            "facts": views.facts(run),
            "warnings": list(warnings(run)),
        }

    def _pictures(self, number: int) -> list[dict[str, str]]:
        run = self.runs[number].run
        sheets = sorted(views.pictures(run), key=lambda sheet: not sheet.path.name.startswith("step-"))
        pictures = [{"name": name, "url": self._url(number, path)} for name, path in sheets
                 if views.served(run, f"samples/{path.name}")]  # fmt: skip
        if len(list(run.samples.glob("step-*/samples.json"))) > 1:
            pictures.append(
                {"name": "Before and after", "url": f"file/{number}/before-after?v={_changed(run.samples)}"}
            )
        return pictures

    def _cell(self, number: int, cell: tuple[int, Path, str]) -> dict[str, Any]:
        step, path, scores = cell
        return {"step": step, "url": self._url(number, path), "scores": scores}

    def _url(self, number: int, path: Path) -> str:
        """Address of a file with the time of its last change, so that browsers keep it until then."""
        inside = path.relative_to(self.runs[number].run.folder)
        return f"file/{number}/{quote(inside.as_posix())}?v={_changed(path)}"


def check_folder(folder: Path) -> None:
    """Raise ValueError for a folder that holds something else than a run; one that is empty, or not there yet in a
    folder that is, may become one."""
    if folder.is_dir():
        if Followed(folder).exists or not [path for path in folder.iterdir() if path.name != "run.lock"]:
            return
        what = "is not a run folder: it has neither config.yaml nor metrics.jsonl"
    elif folder.exists():
        what = f"is a file: give the run folder, {folder.parent}"
    elif folder.parent.is_dir():
        return
    else:
        what = "is not there, nor the folder that it would be in"
    from genrl.config.folders import runs_in

    raise ValueError(f"{folder} {what}{runs_in(folder if folder.is_dir() else folder.parent)}")


def names(folders: Sequence[Path]) -> list[str]:
    """What the runs are called: the last parts of their paths, as many as tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts), default=1) + 1):
        short = ["/".join(part[-count:]) for part in parts]
        if len(set(short)) == len(short):
            break
    return short


def _in_words(run: Followed, rate: Pace | None, *, going: bool) -> str:
    if rate is None:
        return ""
    phrases = [f"{rate.seconds:.3g} s per iteration"]
    for key, unit in _RATES.items():
        value = run.columns[key].last if key in run.columns else None
        if value is not None:
            phrases.append(f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}")
    if rate.left is not None and going:
        phrases.append(f"{duration(rate.left)} left")
    return ", ".join(phrases)


def _changed(path: Path) -> int:
    """When, in nanoseconds; 0 for what is not there."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


LOOPBACK = "127.0.0.1"
_HOSTS = ("127.0.0.1", "localhost")
_TYPES = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8", "json": "application/json",
          "png": "image/png", "gif": "image/gif", "wav": "audio/wav"}  # fmt: skip
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; img-src 'self' data:; media-src 'self'; "
    "connect-src 'self'"
)


class Server(ThreadingHTTPServer):
    """Serves a page of these runs at `url` once `serve_forever` is called; `server_close` ends it."""

    daemon_threads = True
    block_on_close = False  # a browser keeps connections that it does not use

    def __init__(self, live: Live, port: int = 0) -> None:
        """port: 0 for a free one. Raises ValueError where it is taken."""
        self.live = live
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ValueError(f"port {port} cannot be used: {error}. Give another one, or 0 for a free one.") from None

    @property
    def url(self) -> str:
        return f"http://{LOOPBACK}:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in _HOSTS:  # another site's name that leads here would let its scripts read the answer
            return self._answer("html", b"This page is for this machine only.", HTTPStatus.FORBIDDEN)
        url = urlsplit(self.path)
        response = self._find(url.path, parse_qs(url.query))
        if response is None:
            return self._answer("html", b"There is nothing here.", HTTPStatus.NOT_FOUND)
        self._answer(*response)

    def _find(self, path: str, query: dict[str, list[str]]) -> tuple[str, bytes] | None:
        """(kind, content) of what is asked for."""
        live = self.server.live
        routes: dict[str, Callable[[], Any]] = {
            "/state.json": live.state,
            "/figures.json": lambda: live.figures(query.get("key", []), set(map(_number, query.get("hide", [])))),
            "/prompts.json": lambda: live.prompts(_number(query.get("page", ["0"])[0]), query.get("find", [""])[0]),
        }
        if path == "/":
            return "html", live.page().encode()
        if path == "/watch.js":
            return "js", files("genrl.runtime.show.pages").joinpath("watch.js").read_bytes()
        if path in routes:
            return "json", json.dumps(routes[path]()).encode()
        kind, _, rest = path.removeprefix("/").partition("/")
        number, _, name = rest.partition("/")
        if kind != "file" or not number.isdecimal():
            return None
        return live.file(_number(number), unquote(name))

    def _answer(self, kind: str, content: bytes, status: HTTPStatus = HTTPStatus.OK) -> None:
        cache = "private, max-age=86400" if kind in ("png", "gif", "wav") else "no-store"
        headers = {
            "Content-Type": _TYPES[kind],
            "Content-Length": str(len(content)),
            "Content-Security-Policy": _POLICY,
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": cache,
        }
        try:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)
        except ConnectionError:
            self.close_connection = True  # the page was left

    def log_message(self, format: str, *arguments: Any) -> None:
        """Requests are not worth a line each; what goes wrong is printed with its traceback."""


def _number(text: str) -> int:
    """0 for what is no number."""
    return int(text) if text.isdecimal() and len(text) < 10 else 0

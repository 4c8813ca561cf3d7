"""One offline HTML page of a run: curves, pictures, prompts, timings, configuration. Also of a crashed or running one.

Everything that came from outside (prompts, configuration, names) is escaped. No script, no reference to a network.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from genrl.config.json_schemas import method_of
from genrl.config.method import MetricDoc, headings
from genrl.runtime.curves import Point, chart, is_constant
from genrl.runtime.metrics import METRICS, SECTIONS, document
from genrl.runtime.pictures import before_after, read_samples
from genrl.runtime.progress import duration
from genrl.runtime.run import Run, read_metrics, run_info, write_atomic

_PAGE_BYTES = 4_900_000
_WIDEST = 1640

Row = Mapping[str, Any]


def write_report(folder: Path) -> Path:
    """Write `report.html` into a run folder. Raises ValueError where it holds no run."""
    run = Run(folder)
    if not run.config.is_file() and not run.metrics.is_file():
        raise ValueError(f"{folder} holds no run: there is neither config.yaml nor metrics.jsonl in it")
    rows = read_metrics(run.metrics)
    config = run.config.read_text(encoding="utf-8") if run.config.is_file() else ""
    info = run_info(run)
    head = [_header(folder.resolve().name, rows, config, info), _headline(rows)]
    tail = [
        *_curves(rows, _sections(config)),
        _timings(rows),
        _prompts(run),
        _details("Configuration", f"<pre>{escape(config)}</pre>" if config else ""),
        _details("Versions", _table([["package", "version"], *map(list, info.get("versions", {}).items())], "plain")),
    ]
    room = _PAGE_BYTES - sum(len(part.encode()) for part in [*head, *tail, _STYLE])
    body = [*head, *_pictures(run, room), *tail]
    title = escape(folder.resolve().name)
    page = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}: genrl report</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head>\n<body><main>\n" + "\n".join(filter(None, body)) + "\n</main></body></html>\n"
    )
    write_atomic(run.report, page)
    return run.report


def _header(name: str, rows: Sequence[Row], config: str, info: Mapping[str, Any]) -> str:
    done = rows[-1]["step"] if rows else 0
    settings = yaml.safe_load(config) if config else None
    planned = settings.get("iterations") if isinstance(settings, dict) else None
    state = "finished" if planned is not None and done >= planned else "stopped or still running"
    facts = [f"{done} of {planned} iterations, {state}" if planned is not None else f"{done} iterations"]
    spent = _seconds(rows)
    if spent:
        facts.append(duration(spent))
    if "started" in info:
        facts.append(f"started {info['started'][:16].replace('T', ' ')} UTC")
    if "seed" in info:
        facts.append(f"seed {info['seed']}, {info['processes']} process{'es' if info['processes'] != 1 else ''}")
    if info.get("git_commit"):
        facts.append(f"commit {info['git_commit'][:10]}{'+' if info['git_commit'].endswith('+') else ''}")
    if info.get("resumed"):
        facts.append("resumed at step " + ", ".join(str(entry["step"]) for entry in info["resumed"]))
    lines = [f"<h1>{escape(name)}</h1>", f'<p class="facts">{escape(" · ".join(map(str, facts)))}</p>']
    if info.get("command"):
        lines.append(f'<pre class="command">{escape(" ".join(info["command"]))}</pre>')
    if not rows:
        lines.append("<p>No metrics were written yet.</p>")
    return "\n".join(lines)


def _headline(rows: Sequence[Row]) -> str:
    """The held-out rewards before and after, and the two curves that matter."""
    acts = any("eval/success_mean" in row or "rollout/success" in row for row in rows)
    keys = [key for key in _keys(rows) if key.startswith("eval/") and (key.endswith("_mean") or "/success/" in key)]
    keys = [key for key in keys if key != "eval/length_mean"]  # whose best is the least; its curve is below
    keys.sort(key=lambda key: (key not in ("eval/total_mean", "eval/success_mean"), key.removesuffix("_mean")))
    table = [["evaluation" if acts else "held-out reward", "before", "now", "change", "best"]]
    for key in keys:
        points = [(step, value) for step, value in _points(rows, key) if value is not None]
        if points:
            (first_step, first), (last_step, last) = points[0], points[-1]
            best_step, best = max(points, key=lambda point: point[1])
            name = key.removeprefix("eval/").removesuffix("_mean")
            table.append(
                [name, f"{first:.3f} (step {first_step:g})", f"{last:.3f} (step {last_step:g})", f"{last - first:+.3f}",
                 f"{best:.3f} (step {best_step:g})"]
            )  # fmt: skip
    shown = (("reward/total_mean", "training prompts"), ("eval/total_mean", "held-out prompts"))
    if acts:
        shown = (("rollout/success", "with exploration"), ("eval/success_mean", "evaluation"))
    series = [
        (label, _points(rows, key)) for key, label in shown if any(value is not None for _, value in _points(rows, key))
    ]
    parts = [f"<h2>{'Success' if acts else 'Reward'}</h2>"] if series or len(table) > 1 else []
    if series:
        names = "".join(f'<span class="key line-{i}">{escape(name)}</span>' for i, (name, _) in enumerate(series))
        parts.append(
            f'<figure class="wide"><figcaption>{"success rate" if acts else "total reward, mean"} {names}</figcaption>'
        )
        parts.append(chart(series, width=1080, height=300) + "</figure>")
    if len(table) > 1:
        parts.append(_table(table, "numbers"))
    return "\n".join(parts)


def _sections(config: str) -> dict[str, Mapping[str, MetricDoc]]:
    """The catalogue, and what a method from outside documents, where it is still there."""
    method = method_of(yaml.safe_load(config)) if config else None
    return {**({} if method is None else headings(method)), **SECTIONS}


def _curves(rows: Sequence[Row], sections: Mapping[str, Mapping[str, MetricDoc]]) -> list[str]:
    """Small charts by the sections of the catalogue; keys which never change are listed instead."""
    known = {id(doc): title for title, entries in sections.items() for doc in entries.values()}
    documented = {key: doc for entries in sections.values() for key, doc in entries.items()}
    parts: list[str] = []
    for section in [*sections, "Other"]:
        figures, constant = [], []
        for key in _keys(rows):
            doc = _document(key, documented)
            if known.get(id(doc), "Other") != section:
                continue
            points = _points(rows, key)
            values = [value for _, value in points if value is not None]
            if len(values) == len(points) and is_constant(values):
                constant.append(f"{key} = {values[0]:g}")
            else:
                figures.append(_figure(key, doc, points))
        if figures or constant:
            parts.append(f"<h2>{escape(section)}</h2>")
        if figures:
            parts.append('<div class="charts">' + "\n".join(figures) + "</div>")
        if constant:
            parts.append(f'<p class="constant">constant: {escape(", ".join(constant))}</p>')
    return parts


def _figure(key: str, doc: MetricDoc | None, points: Sequence[Point]) -> str:
    last = next((f"{value:.4g}" for _, value in reversed(points) if value is not None), "-")
    missing = sum(value is None for _, value in points)
    alarm = ' class="warn"' if missing == len(points) else ""  # some are without by design: a reward may answer None
    note = f" <b{alarm}>{missing} without a value</b>" if missing else ""
    hint = escape(f"{doc.formula}. {doc.reading}" if doc else "of another version, or of a method that is gone")
    head = f'<figcaption title="{hint}"><code>{escape(key)}</code>{note}<span class="last">{last}</span></figcaption>'
    return f"<figure>{head}{chart([(key, points)])}</figure>"


def _seconds(rows: Sequence[Row]) -> float:
    """Of iterations, evaluations and saves together."""
    keys = ("timing/iteration_s", "timing/eval_s", "timing/checkpoint_s")
    return math.fsum(row.get(key) or 0 for row in rows for key in keys)


def _timings(rows: Sequence[Row]) -> str:
    entries = [key for key in METRICS if key.startswith("timing/") and any(key in row for row in rows)]
    if not entries:
        return ""
    whole = _seconds(rows)
    table = [["phase", "times", "mean", "total", "share"]]
    for key in entries:
        spent = [row[key] for row in rows if row.get(key) is not None]
        total = math.fsum(spent)
        share = f"{total / whole:.0%}" if whole else "-"
        phase = key.removeprefix("timing/").removesuffix("_s")
        mean = f"{total / len(spent):.3g} s" if spent else "-"
        table.append([phase, str(len(spent)), mean, duration(total), share])
    return "<h2>Where the time went</h2>\n" + _table(table, "numbers")


def _pictures(run: Run, room: int) -> list[str]:
    """Before and after, best and worst, then the grids from the newest back, while there is room (bytes)."""
    parts = []
    pair = before_after(run.samples)
    grids = sorted(run.samples.glob("step-*.png"), key=lambda path: (path.stem[:11], -len(path.stem)), reverse=True)
    others = [path for path in sorted(run.samples.glob("*.png")) if path not in grids and path.stem != "before_after"]
    wanted: list[tuple[str, Image.Image]] = [("Before and after", pair)] if pair is not None else []
    for path in [*others, *grids]:
        try:
            with Image.open(path) as file:
                wanted.append((_picture_name(path.stem), file.convert("RGB")))
        except OSError:
            parts.append(f"<p>{escape(path.name)} cannot be read.</p>")
    for i, (name, image) in enumerate(wanted):
        kind, data = _encode(image)
        room -= len(data) * 4 // 3 + 500  # base64
        if room < 0:
            parts.append(f"<p>{len(wanted) - i} more pictures are in samples/.</p>")
            break
        source = f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"
        picture = f'<img src="{source}" alt="{escape(name)}" width="{image.width}">'
        parts.append(picture if i == 0 else f"<details><summary>{escape(name)}</summary>{picture}</details>")
    return ["<h2>Pictures</h2>", *parts, *_films(run, room)] if parts else []


def _films(run: Run, room: int) -> list[str]:
    """The gifs of the newest evaluation that has some, while there is room (bytes)."""
    folders = sorted(run.videos.glob("step-*"))
    parts = []
    for path in sorted(folders[-1].glob("*.gif")) if folders else []:
        data = base64.b64encode(path.read_bytes()).decode("ascii")
        room -= len(data) + 500
        if room < 0:
            parts.append(f"<p>More films are in {escape(str(folders[-1].relative_to(run.folder)))}/.</p>")
            break
        parts.append(f'<img class="film" src="data:image/gif;base64,{data}" alt="{escape(path.stem)}">')
    return parts


def _picture_name(stem: str) -> str:
    """`step-000020` and `step-000020-best-worst` in words."""
    step, _, what = stem.removeprefix("step-").partition("-")
    if not step.isdecimal():
        return stem.replace("_", " ").capitalize()
    return f"{what.replace('-', ' and ').capitalize() or 'Samples'} at step {int(step)}"


def _encode(image: Image.Image) -> tuple[str, bytes]:
    """(format, bytes): PNG where it is small, which it is for drawings, else JPEG."""
    if image.width > _WIDEST:
        image = image.resize((_WIDEST, round(image.height * _WIDEST / image.width)), Image.Resampling.LANCZOS)
    files = {}
    for kind, quality in (("png", {}), ("jpeg", {"quality": 85})):
        buffer = io.BytesIO()
        image.save(buffer, kind.upper(), **quality)
        files[kind] = buffer.getvalue()
    kind = "png" if len(files["png"]) < 2 * len(files["jpeg"]) else "jpeg"
    return kind, files[kind]


def _prompts(run: Run) -> str:
    """Every evaluation prompt with its rewards at the first and the last evaluation."""
    found = read_samples(run.samples)
    if not found:
        return ""
    first, last = found[0], found[-1]
    names = list(last.rewards)
    table = [["prompt", *(f"{name}, {word}" for name in names for word in ("before", "now"))]]
    for i, prompt in enumerate(last.prompts):
        cells = [prompt]
        for name in names:
            for samples in (first, last):
                scores = samples.rewards.get(name, [])
                value = scores[i] if i < len(scores) else None
                cells.append("no score" if value is None else f"{value:.3f}")
        table.append(cells)
    return _details("Prompts of the pictures", _table(table, "numbers prompts"))


def _details(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>" if content else ""


def _table(rows: Sequence[Sequence[str]], kind: str) -> str:
    """The first row is the head; every cell is escaped here."""
    if len(rows) < 2:
        return ""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f'<div class="scroll"><table class="{kind}"><tr>{head}</tr>{body}</table></div>'


def _keys(rows: Sequence[Row]) -> list[str]:
    return sorted({key for row in rows for key in row} - {"step"})


def _points(rows: Sequence[Row], key: str) -> list[Point]:
    return [(row["step"], row[key]) for row in rows if key in row]


def _document(key: str, own: Mapping[str, MetricDoc]) -> MetricDoc | None:
    """None for a key of another version of genrl, or of a method that is gone."""
    try:
        return document(key, own)
    except ValueError:
        return None


_STYLE = """
:root{--paper:#fff;--card:#f6f6f8;--ink:#1d1d22;--soft:#66666f;--rule:#e0e0e6;--line-0:#2f6fbf;--line-1:#d2691e;
--warn:#b3261e;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--paper:#17181c;--card:#202127;--ink:#e6e6ea;--soft:#9a9aa5;--rule:#34353d;
--line-0:#76a9ea;--line-1:#f0a060;--warn:#ff8a80}}
body{background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif;margin:0}
main{max-width:1180px;margin:0 auto;padding:24px}
h1{font-size:26px;margin:0}h2{font-size:18px;margin:32px 0 10px}
.facts,.constant,figcaption,.none{color:var(--soft)}.constant{font-size:13px}
code,pre{font:13px/1.45 ui-monospace,monospace}
pre{background:var(--card);padding:12px;border-radius:6px;overflow:auto;white-space:pre-wrap}.command{margin:8px 0}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(330px,1fr));gap:14px}
figure{margin:0;background:var(--card);border-radius:6px;padding:10px 12px 4px}.wide{margin-bottom:14px}
figcaption{display:flex;gap:10px;align-items:baseline;font-size:13px}
figcaption code{color:var(--ink);overflow-wrap:anywhere}
.last{margin-left:auto;font-variant-numeric:tabular-nums}.warn{color:var(--warn)}
svg{width:100%;height:auto;display:block}svg text{font:11px system-ui,sans-serif;fill:var(--soft)}
.wide svg text{font-size:12px}
.grid{stroke:var(--rule);fill:none}.axis{stroke:var(--soft);fill:none}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round}.raw{opacity:.35;stroke-width:1}
.line.line-0{stroke:var(--line-0)}.line.line-1{stroke:var(--line-1)}
.spot.line-0{fill:var(--line-0)}.spot.line-1{fill:var(--line-1)}
.dense{opacity:0}.spot:hover{opacity:1;stroke:var(--ink)}
.key::before{content:"";display:inline-block;width:14px;height:3px;margin-right:5px;vertical-align:middle}
.key.line-0::before{background:var(--line-0)}.key.line-1::before{background:var(--line-1)}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-size:14px;margin:6px 0}
th,td{text-align:left;padding:4px 14px 4px 0;border-bottom:1px solid var(--rule);vertical-align:top}
th{color:var(--soft);font-weight:500}.numbers td{font-variant-numeric:tabular-nums}
.numbers td+td,.numbers th+th{text-align:right}
.prompts td:first-child{overflow-wrap:anywhere;max-width:520px}
details{margin:12px 0}summary{cursor:pointer;font-weight:500}
img{max-width:100%;height:auto;border-radius:6px;display:block;margin:8px 0;background:#fff}
.film{display:inline-block;margin:8px 10px 8px 0}
""".strip()

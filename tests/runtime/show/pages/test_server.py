"""The local server: who may ask it, what it gives out of a run folder and what not, and how much of large runs."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from genrl.runtime.show.pages.live import Live, Server, names
from tests.browser import chromium
from tests.runtime.show.pages.folders import beat, log, make, samples


@contextmanager
def serving(*folders: Path) -> Iterator[Server]:
    server = Server(Live(folders))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask(server: Server, path: str, host: str = "127.0.0.1", method: str = "GET") -> tuple[int, bytes, dict[str, str]]:
    """(status, content, headers); the path goes out as it is written."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=20)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    result = answer.status, answer.read(), dict(answer.getheaders())
    connection.close()
    return result


def fetch(server: Server, path: str) -> Any:
    status, content, headers = ask(server, path)
    assert (status, headers["Content-Type"]) == (200, "application/json")
    return json.loads(content)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with two evaluations, beside a file that is nobody's business."""
    (tmp_path / "secret.png").write_bytes(b"secret")
    run = make(tmp_path / "run")
    log(run, ({"step": step, "loss": 1.0 / step, "lr": 0.1, "reward/total_mean": step / 10} for step in range(1, 6)))
    samples(run, 0, ["a star", "<b>two</b>"], [0.25, None])
    samples(run, 5, ["a star", "<b>two</b>"], [0.5, 1.0])
    (run / "samples" / "link.png").symlink_to(tmp_path / "secret.png")
    return run


def test_only_this_machine_is_answered_by_a_page_that_loads_nothing_from_elsewhere(folder: Path) -> None:
    with serving(folder) as server:
        assert server.socket.getsockname()[0] == "127.0.0.1"
        assert ask(server, "/", "localhost:8400")[0] == 200  # through an ssh tunnel
        for host in ("evil.example", f"evil.example:{server.server_address[1]}", "", "127.0.0.1.evil.example"):
            assert ask(server, "/state.json", host)[0] == 403
        assert ask(server, "/", method="POST")[0] == 501
        with socket.socket() as other:
            other.settimeout(5)
            assert other.connect_ex(("127.0.0.2", server.server_address[1])) != 0  # not even another loopback address
        status, content, headers = ask(server, "/")
        assert status == 200 and b"http://" not in content and b"https://" not in content
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        assert b"use strict" in ask(server, "/watch.js")[1]


def test_pictures_are_given_and_nothing_else_of_the_disk(folder: Path) -> None:
    with serving(folder) as server:
        given = fetch(server, "/state.json")["pictures"][0]
        assert [picture["name"] for picture in given] == ["Samples at step 5", "Samples at step 0", "Before and after"]
        for picture in given:
            status, content, headers = ask(server, f"/{picture['url']}")
            assert (status, content[:4], headers["Content-Type"]) == (200, b"\x89PNG", "image/png")
        assert ask(server, "/file/0/samples/link.png")[0] == 404
        assert ask(server, "/file/0/samples/step-000005/01.png")[0] == 200
        outside = ("../secret.png", "samples/../../secret.png", "/etc/passwd", "samples/..%2f..%2fsecret.png")
        within = ("config.yaml", "samples/step-000005/samples.json", "run.json", "", "\0.png")
        for name in (*outside, "..\\secret.png", *within):
            once = quote(name, safe="")
            for path in (name, once, quote(once)):
                if "\0" not in path:
                    assert ask(server, f"/file/0/{path}")[0] in (400, 404), path
        for path in ("/file/1/samples/step-000005.png", "/file/-1/x", "/file/x/y", "/file/", "/pages/watch.html"):
            assert ask(server, path)[0] == 404, path


def test_state_and_figures(folder: Path) -> None:
    with serving(folder) as server:
        state = fetch(server, "/state.json")
        assert "5 of 10 iterations" in state["parts"]["cards"] and ">stopped<" in state["parts"]["cards"]
        assert 'data-key="loss"' in state["parts"]["sections"] and "lr = 0.1" in state["parts"]["sections"]
        result = fetch(server, "/figures.json?key=loss&key=headline:0&key=no/such&key=lr")
        assert set(result) == {"loss", "headline:0", "lr"} and result["loss"].count("<circle") == 5
        assert "step 5: 0.2<" in result["loss"] and "step 5: 0.5<" in result["headline:0"]
        log(folder, [{"step": 6, "loss": 7.5}])
        time.sleep(0.6)
        assert fetch(server, "/state.json")["rows"] != state["rows"]
        assert "step 6: 7.5<" in fetch(server, "/figures.json?key=loss")["loss"]


def test_runs_are_overlaid_each_in_its_colour(tmp_path: Path) -> None:
    folders = [make(tmp_path / name, f"iterations: 10\nlr: {lr}\n") for name, lr in (("a", 1), ("b", 2), ("c", 3))]
    for k, folder in enumerate(folders):
        log(folder, ({"step": step, ("own" if k == 1 else "loss"): step + 10.0 * k} for step in range(3)))
    with serving(*folders, tmp_path / "later") as server:
        result = fetch(server, "/figures.json?key=loss")["loss"]
        assert "a, step 2: 2<" in result and "c, step 2: 22<" in result
        assert {k for k in range(4) if f'class="line line-{k}"' in result} == {0, 2}
        hidden = fetch(server, "/figures.json?key=loss&hide=0&hide=x9")["loss"]
        assert "c, step 2: 22<" in hidden and "a, step" not in hidden and 'class="line line-2"' in hidden
        parts = fetch(server, "/state.json")["parts"]
        assert parts["cards"].count(">stopped<") == 3 and "waiting" in parts["cards"]
        assert "<td>lr</td><td>1</td><td>2</td><td>3</td><td>-</td>" in parts["differences"]
        make(tmp_path / "later")
        log(tmp_path / "later", [{"step": 10, "loss": 1.0}])
        time.sleep(0.6)
        assert "finished" in fetch(server, "/state.json")["parts"]["cards"]


def test_text_of_runs_is_no_markup(tmp_path: Path) -> None:
    hostile = '<img src=x onerror="alert(1)">'
    folder = make(tmp_path / hostile.replace("/", "_"), f"iterations: 10\nnote: '{hostile}'\n")
    log(folder, [{"step": 1, hostile: 0.5}, {"step": 2, hostile: 0.7}])
    samples(folder, 0, [hostile], [0.5])
    samples(folder, 2, [hostile], [0.5])
    with serving(folder, make(tmp_path / "b")) as server:
        texts = [ask(server, "/")[1].decode(), *fetch(server, "/state.json")["parts"].values()]
        texts += [fetch(server, "/prompts.json")["html"]]
        texts += fetch(server, f"/figures.json?key={quote(hostile)}").values()
        assert sum("onerror" in text for text in texts) >= 4
        assert not any("<img src=x" in text for text in texts)


def test_what_is_no_run_is_refused_and_names_tell_runs_apart(tmp_path: Path) -> None:
    run = make(tmp_path / "runs" / "a")
    (tmp_path / "runs" / "empty").mkdir()
    neither = r"runs is not a run folder: it has neither config.yaml nor metrics.jsonl; runs in .*runs/a"
    for folders, message in (
        ([tmp_path / "runs"], neither),
        ([run / "config.yaml"], r"config.yaml is a file: give the run folder, .*runs/a"),
        ([tmp_path / "no" / "such"], "such is not there, nor the folder that it would be in"),
        ([run, run / ".." / "a"], "a is given twice"),
        ([tmp_path / "runs" / f"r{i}" for i in range(9)], "9 runs are too many for one page: watch at most 8"),
    ):
        with pytest.raises(ValueError, match=message):
            Live(folders)
    result = Live([run, tmp_path / "runs" / "empty", tmp_path / "runs" / "later"]).runs
    assert [run.exists for run in result] == [True, False, False]
    assert names([Path("/x/a"), Path("/x/b")]) == ["a", "b"]
    assert names([Path("/x/1/a"), Path("/x/2/a")]) == ["1/a", "2/a"]


def test_a_port_that_is_taken_and_a_run_folder_that_is_a_link(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(folder)
    with serving(tmp_path / "linked") as server:
        assert ask(server, f"/{fetch(server, '/state.json')['pictures'][0][0]['url']}")[0] == 200
        port = server.server_address[1]
        with pytest.raises(ValueError, match=f"port {port} cannot be used: .*Give another one, or 0 for a free one"):
            Server(Live([folder]), port)


# -- The page, clicked through in a browser while a run goes on
HOSTILE = "<img src=x onerror='window.hit = 1'><script>window.hit = 1</script>"
PROMPTS = [*(f"prompt {i}" for i in range(44)), f"prompt 44 {HOSTILE}"]
POINTS = "figure[data-key='loss'] circle.line-{} title"
SOON = 60_000  # of milliseconds: on a busy machine the page itself rests up to 20 seconds between two looks


def rows(first: int, last: int, scale: float) -> list[dict[str, float]]:
    return [{"step": step, "loss": scale * step, "reward/total_mean": scale / step} for step in range(first, last)]


def test_two_runs_of_which_one_goes_on(tmp_path: Path) -> None:
    going, done = make(tmp_path / "going"), make(tmp_path / "done")
    log(going, rows(1, 4, 1.0))
    log(done, rows(1, 11, 2.0))
    log(done, [{"step": 10, HOSTILE: 0.5}])
    beat(going, step=3, phase="training")
    for folder in (going, done):
        samples(folder, 0, PROMPTS, [0.25] * 45)
        samples(folder, 2, PROMPTS, [0.75] * 45)
    with serving(going, done) as server, chromium() as browser:
        page = browser.new_page(viewport={"width": 1200, "height": 300})
        troubles: list[str] = []
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(server.url)
        cards = page.locator(".card")
        cards.nth(1).get_by_text("10 of 10 iterations").wait_for()
        assert "running" in cards.nth(0).inner_text() and "training, iteration 4" in cards.nth(0).inner_text()
        assert "finished" in cards.nth(1).inner_text()
        assert not any("key=loss" in url for url in asked)  # it is below what is on the screen
        page.locator("figure[data-key='loss']").scroll_into_view_if_needed()
        page.locator(POINTS.format(1)).nth(9).wait_for(state="attached")
        assert page.locator(POINTS.format(0)).count() == 3
        log(going, rows(4, 6, 1.0))  # the run goes on, and the page with it
        beat(going, step=5, phase="sampling")
        page.locator(POINTS.format(0)).nth(4).wait_for(state="attached", timeout=SOON)
        assert "sampling, iteration 6" in cards.nth(0).inner_text()
        assert page.locator(POINTS.format(0)).nth(4).text_content() == "going, step 5: 5"
        page.get_by_role("checkbox").nth(1).uncheck()
        page.locator(POINTS.format(1)).first.wait_for(state="detached")
        assert page.locator(POINTS.format(0)).count() == 5 and page.locator(".sheet").nth(1).is_hidden()
        page.get_by_role("checkbox").nth(1).check()
        page.locator(POINTS.format(1)).nth(9).wait_for(state="attached")
        first, second = page.locator(".sheet img").nth(0), page.locator(".sheet img").nth(1)
        assert "step-000002.png" in (first.get_attribute("src") or "")
        samples(going, 5, PROMPTS, [0.8125] * 45)
        page.locator(".sheet img[src*='step-000005.png']").wait_for(timeout=SOON)
        page.get_by_label("Picture of going").select_option("Samples at step 0")
        samples(going, 6, PROMPTS, [0.8125] * 45)
        page.locator(".sheet option", has_text="Samples at step 6").first.wait_for(state="attached", timeout=SOON)
        assert "step-000000.png" in (first.get_attribute("src") or "")  # the newest is followed, a choice is kept
        for image in (first, second):
            image.scroll_into_view_if_needed()
            image.evaluate("image => image.decode()")  # raises where it is none
        assert page.locator("#place").inner_text() == "page 1 of 3, 45 prompts"
        page.get_by_role("button", name="next").click()
        page.get_by_text("prompt 20", exact=True).wait_for()
        assert page.locator(".prompt").count() == 20 and page.get_by_text("step 6: shapes 0.812").count() == 20
        page.get_by_label("Find in prompts").fill("prompt 44")
        page.get_by_text("page 1 of 1, 1 prompts").wait_for()
        page.get_by_label("Find in prompts").fill("<img")
        page.get_by_text(HOSTILE).nth(1).wait_for()  # the metric and the prompt
        assert page.evaluate("window.hit") is None
        page.set_viewport_size({"width": 390, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert all(url.startswith(server.url) or url.startswith("data:") for url in asked) and troubles == []
        server.shutdown()
        server.server_close()
        page.get_by_text("no answer: is genrl watch still running?").wait_for(timeout=SOON)

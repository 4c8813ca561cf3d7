"""The live page, clicked through in a browser while a run goes on."""

from pathlib import Path

from tests.browser import chromium
from tests.runtime.show.pages.folders import beat, log, make, samples
from tests.runtime.show.pages.test_server import serving

HOSTILE = "<img src=x onerror='window.hit = 1'><script>window.hit = 1</script>"
PROMPTS = [*(f"prompt {i}" for i in range(44)), f"prompt 44 {HOSTILE}"]
DRAWN = "figure[data-key='loss'] circle.line-{} title"


def rows(first: int, last: int, scale: float) -> list[dict[str, float]]:
    return [{"step": step, "loss": scale * step, "reward/total_mean": scale / step} for step in range(first, last)]


def test_two_runs_of_which_one_goes_on(tmp_path: Path) -> None:
    """Nothing that stands in their files is executed."""
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
        page.locator(DRAWN.format(1)).nth(9).wait_for(state="attached")
        assert page.locator(DRAWN.format(0)).count() == 3

        log(going, rows(4, 6, 1.0))  # the run goes on, and the page with it
        beat(going, step=5, phase="sampling")
        page.locator(DRAWN.format(0)).nth(4).wait_for(state="attached", timeout=8000)
        assert "sampling, iteration 6" in cards.nth(0).inner_text()
        assert page.locator(DRAWN.format(0)).nth(4).text_content() == "going, step 5: 5"

        page.get_by_role("checkbox").nth(1).uncheck()
        page.locator(DRAWN.format(1)).first.wait_for(state="detached")
        assert page.locator(DRAWN.format(0)).count() == 5 and page.locator(".sheet").nth(1).is_hidden()
        page.get_by_role("checkbox").nth(1).check()
        page.locator(DRAWN.format(1)).nth(9).wait_for(state="attached")

        first, second = page.locator(".sheet img").nth(0), page.locator(".sheet img").nth(1)
        assert "step-000002.png" in (first.get_attribute("src") or "")
        samples(going, 5, PROMPTS, [0.8125] * 45)
        page.locator(".sheet img[src*='step-000005.png']").wait_for(timeout=8000)
        page.get_by_label("Picture of going").select_option("Samples at step 0")
        samples(going, 6, PROMPTS, [0.8125] * 45)
        page.locator(".sheet option", has_text="Samples at step 6").first.wait_for(state="attached", timeout=8000)
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
        page.get_by_text("no answer: is genrl watch still running?").wait_for(timeout=8000)

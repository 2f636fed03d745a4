"""The viewer in a real browser: every page opened, sorted, filtered, searched, a sample reached by
keyboard alone; no error on the console and no request to another machine.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
from support.view_runs import HOSTILE, copy_of_golden, make_run

NUM_GPUS = 0
ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = next(
    (
        path
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (path := shutil.which(name))
    ),
    None,
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium here: apt-get install chromium"
)
sync_api = pytest.importorskip("playwright.sync_api", reason="pip install 'slime-rl[test]'")


@pytest.fixture
def viewer(tmp_path):
    """The address that `slime view` prints, over a recording and two runs."""
    copy_of_golden(tmp_path / "all" / "recorded")
    make_run(tmp_path / "all" / "hostile", HOSTILE)
    make_run(tmp_path / "all" / "other", rollouts=5)
    command = [
        sys.executable,
        "-m",
        "slime.cli",
        "view",
        tmp_path / "all",
        "--no-browser",
        "--port",
        "0",
    ]
    process = subprocess.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait(timeout=10)


@pytest.fixture
def page(viewer):
    """A page with the token, and what went wrong in it."""
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.set_default_timeout(20_000)
        page.problems, page.requested = [], set()
        page.on("console", lambda m: page.problems.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("request", lambda request: page.requested.add(request.url.split("/")[2]))
        page.goto(viewer)
        yield page
        browser.close()


def test_every_page_works_in_a_browser(page):
    base = page.url.rstrip("/")
    assert "token" not in page.url
    # all runs, and the curves of two of them
    for name in ("hostile", "other"):
        page.get_by_label(f"overlay all/{name}").check()
    page.get_by_role("button", name="overlay the curves").click()
    page.wait_for_selector("#charts[data-ready] canvas")
    reward = page.locator("figure.chart", has_text="reward").first
    assert "reward: all sampled ends at NaN" in reward.locator("[role=img]").get_attribute(
        "aria-label"
    )
    reward.get_by_text("values").click()
    reward.locator("td", has_text="NaN").first.wait_for()
    # by keyboard alone: from the runs to a token of a sample
    page.goto(f"{base}/run/all~recorded")
    for key in ("j", "j", "Enter"):
        page.keyboard.press(key)
    page.wait_for_url("**/rollout/rollout-1")
    page.keyboard.press("/")
    page.keyboard.type("tool")
    with page.expect_response(re.compile("q=tool")):
        page.keyboard.press("Enter")
    rows = page.locator("#table [data-row]")
    sync_api.expect(rows).to_have_count(4)
    page.locator("h1").click()
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/sample/0*")
    page.keyboard.press("]")
    page.wait_for_url("**/sample/1*")
    page.locator("#tokens span").first.focus()
    page.keyboard.press("ArrowRight")
    assert "log-prob" in page.locator("#modes").inner_text()
    assert "trainer" in page.locator("#token").inner_text()
    page.get_by_label("advantage").check()
    link = page.get_by_role("link", name="link to this token").get_attribute("href")
    assert "view=advantage" in page.url and link.endswith("#t1")
    # sorted and filtered without a new page, and back
    page.goto(f"{base}/run/all~recorded/rollout/rollout-1")
    page.get_by_role("link", name="length tokens").click()
    page.wait_for_selector('th[aria-sort="descending"]')
    page.get_by_label("filter").fill("length > 20")
    page.get_by_role("button", name="apply").click()
    sync_api.expect(rows).not_to_have_count(29)
    assert page.locator('th[aria-sort="descending"]').count() == 1
    # the trace on its canvas, and an audit that is asked for and waited for
    page.goto(f"{base}/run/all~hostile/timeline")
    page.wait_for_selector("#timeline[data-ready]")
    page.locator("canvas").press("+")
    page.goto(f"{base}/run/all~recorded/audit")
    page.get_by_text("evidence").first.wait_for(timeout=90_000)
    # texts of a run are texts
    for row in range(len(HOSTILE)):
        page.goto(f"{base}/run/all~hostile/rollout/rollout-0/sample/{row}")
        assert (
            page.title().endswith("slime view")
            and page.locator("main img, main a[href^=javascript]").count() == 0
        )
    # themes and a narrow screen
    page.get_by_role("button", name="theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.set_viewport_size({"width": 390, "height": 800})
    rollout = "/run/all~recorded/rollout/rollout-1"
    for path in ("/", "/run/all~recorded", rollout, f"{rollout}/schedule", f"{rollout}/gate"):
        page.goto(base + path)
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0, f"{path} is {wide} px wider than the screen"
    assert page.problems == []
    assert page.requested == {base.split("/")[2]}


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__, *sys.argv[1:]]))

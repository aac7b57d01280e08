"""The report as a browser shows it: in light and dark, wide and narrow, with and without its script.

Where there is no Chromium these tests are skipped. `check_page.js` measures what is on the screen; that it
would notice a page that is wrong is pinned here, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proof.torture.report import write_report
from tests.torture.browser import NAMES, Browser, find_browser
from tests.torture.facts import save
from tests.torture.made_up import MadeUp

CHECKS = Path(__file__).with_name("check_page.js").read_text(encoding="utf-8")
LAPTOP, LARGE_LAPTOP, TELEPHONE = 1280, 1440, 390
#: What WCAG asks of text of this size.
CONTRAST = 4.5


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser for all tests of this file."""
    program = find_browser()
    if program is None:
        pytest.skip(f"no browser: install Chromium, so that one of {', '.join(NAMES)} is on PATH")
    with Browser(program, tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run with everything in it."""
    folder = tmp_path_factory.mktemp("report")
    history = save(
        folder / "history.jsonl", MadeUp(workers=40, resources=[f"order:{n}" for n in range(25)]).records()
    )
    write_report(history, folder / "report.html")
    return folder / "report.html"


def measure(browser: Browser, what: str) -> Any:
    """Run one of the checks of `check_page.js`."""
    return browser.run(f"(() => {{ {CHECKS}\nreturn ({what})(); }})()")


@pytest.mark.parametrize("width", [TELEPHONE, LAPTOP, LARGE_LAPTOP])
def test_a_page_fits_its_window(browser: Browser, page: Path, width: int) -> None:
    """Nothing is wider than the window, nothing has to be scrolled sideways, and text is not tiny."""
    browser.open(page, width=width)
    assert measure(browser, "tooWide") == []
    assert measure(browser, "smallestText") >= 11


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_can_be_read(browser: Browser, page: Path, dark: bool) -> None:
    """Light is light, dark is dark, and every text stands out from what is behind it, on bars too."""
    browser.open(page, width=LAPTOP, height=12_000, dark=dark)
    luminance = measure(browser, "paper")
    assert luminance < 0.02 if dark else luminance > 0.9
    texts = measure(browser, "contrasts")
    assert len(texts) > 100
    assert {"letter", "on-flag", "on-fault"} <= {look for text in texts for look in text["look"].split()}
    assert [text for text in texts if text["contrast"] < CONTRAST] == []


def test_a_page_asks_for_nothing_and_complains_of_nothing(browser: Browser, page: Path) -> None:
    """One request, for the page itself; and an empty console, so that its policy fits what is on it."""
    browser.open(page, width=LAPTOP)
    assert [url for url in browser.requests() if not url.startswith("data:")] == [page.as_uri()]
    assert browser.complaints() == []
    assert browser.run("document.documentElement.classList.contains('live')")


def test_the_timeline_is_there(browser: Browser, page: Path) -> None:
    """Leases, refused writes and faults have a size on the screen, also at the width of a telephone."""
    for width in (TELEPHONE, LAPTOP):
        browser.open(page, width=width)
        for mark in ("rect.hold", "use.refused", "rect.fault", "rect.tread", "path.p50", ".names text"):
            assert measure(browser, f"visible.bind(null, '{mark}')") > 0, mark


def test_a_chart_obeys_the_keyboard(browser: Browser, page: Path) -> None:
    """Zoom makes bars wider and names other times; stepping shows the facts of marks; 0 undoes it."""
    browser.open(page, width=LAPTOP)
    browser.run("document.querySelector('#moment-1-chart').focus()")
    before = measure(browser, "firstChart")
    browser.press("+")
    zoomed = measure(browser, "firstChart")
    assert zoomed["width"] == pytest.approx(1.6 * before["width"], rel=0.01)
    assert zoomed["ticks"] != before["ticks"]
    browser.press("0")
    assert measure(browser, "firstChart") == before
    browser.press("]")
    facts = browser.run("document.querySelector('#facts:not([hidden])').textContent")
    assert "token" in facts or "of node" in facts
    browser.press("Escape")
    assert browser.run("document.querySelector('#facts').hidden")
    assert browser.complaints() == []


def test_a_page_is_whole_without_its_script(browser: Browser, page: Path) -> None:
    """Bars, axes and the browser's own tooltips are there; what needs the script is not spoken of."""
    browser.without_scripts(disabled=True)
    try:
        browser.open(page, width=LAPTOP)
        assert measure(browser, "visible.bind(null, 'rect.hold')") > 0
        assert measure(browser, "visible.bind(null, '.ticks text')") > 0
        assert measure(browser, "visible.bind(null, '.scripted')") == 0
        assert browser.run("document.querySelectorAll('rect.hold > title').length") > 0
    finally:
        browser.without_scripts(disabled=False)


def test_these_checks_notice_a_page_that_is_wrong(browser: Browser, page: Path, tmp_path: Path) -> None:
    """Control: something too wide, too pale, from elsewhere, and a script that is not ours."""
    wrong = tmp_path / "wrong.html"
    added = (
        '<hr width="2000"><font color="#c8c8c8">pale</font>'
        '<img src="https://elsewhere.invalid/picture.png" alt=""><script>alert(1)</script>'
    )
    wrong.write_text(page.read_text(encoding="utf-8").replace("<main>", f"<main>{added}"), encoding="utf-8")
    browser.open(wrong, width=LAPTOP, height=12_000)
    assert measure(browser, "tooWide")
    assert [text["words"] for text in measure(browser, "contrasts") if text["contrast"] < CONTRAST] == [
        "pale"
    ]
    assert len(browser.complaints()) >= 2

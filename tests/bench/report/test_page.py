"""The HTML page in a real browser: filters, sorting, details, links, hostile strings, no network.

Needs playwright (requirements-dev.txt) and a Chromium of the system: apt-get install chromium.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.errors import UsageError
from bench.files.records import submission_text, unit_id
from bench.files.store import read_submission
from bench.report.html import page as page_module
from bench.report.html.data import PageData, gather
from bench.report.html.page import interpreter, vendored, write_page
from conftest import RunIt, committed_results

ROOT = Path(__file__).resolve().parents[3]
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))),
    None,
)
MARKUP = '"><img src=x onerror=alert(1)><script>alert(2)</script>'
READY = "body[data-ready=yes]"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="no playwright: pip install -r requirements-dev.txt"
    )
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page over the committed results."""
    output = tmp_path_factory.mktemp("site") / "index.html"
    assert write_page(committed_results(), output, None) == []
    return output


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for what the page does next; its policy forbids playwright's own waiting."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the page did not get there"
        time.sleep(0.05)


class Open:
    """A page with everything that it said or asked for."""

    def __init__(self, browser: Any, path: Path, **options: Any):
        options.setdefault("viewport", {"width": 1300, "height": 900})
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.said.append("dialog"), dialog.dismiss()))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector(READY)

    def count(self) -> int:
        return int(re.match(r"(\d+) of", self.page.locator("#count").inner_text()).group(1))  # type: ignore[union-attr]

    def check(self) -> None:
        """Nothing on the console, nothing asked for but the page itself."""
        assert self.said == []
        outside = [url for url in self.asked if not url.startswith(("file:", "data:", "blob:"))]
        assert outside == []
        self.context.close()


@pytest.fixture
def opened(browser: Any, site: Path) -> Iterator[Open]:
    result = Open(browser, site)
    yield result
    result.check()


def test_the_answers_come_first_and_every_chart_is_drawn(opened: Open) -> None:
    page = opened.page
    headings = page.locator("h2").all_inner_texts()
    assert headings[0] == "The answers"
    assert "is stock biased?" in page.locator("#answers").inner_text()
    assert "eager-stored +0.22 ulp" in page.locator("#answers").inner_text()
    for name in ("bias", "leak", "ladder", "curves"):
        assert page.locator(f"#{name} svg").count() == 1, name
        assert len(page.locator(f"#{name}-words").inner_text()) > 40
    assert page.locator("#same .letter").count() > 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_filters_narrow_everything_and_live_in_the_address(opened: Open) -> None:
    page, total = opened.page, opened.count()
    page.select_option("#f-case", "bias/leak")
    page.select_option("#f-fix", "delta_fp32")
    until(lambda: "delta_fp32" in page.url)
    assert 0 < opened.count() < total
    until(lambda: "bias/bf16_addition" not in page.locator("#rows").inner_text())
    cells = page.locator("#rows .tabulator-row").all_inner_texts()
    assert all("bias/leak" in cell and "delta_fp32" in cell for cell in cells)
    assert all("bias/leak" in line for line in page.locator("#matrix .tabulator-row").all_inner_texts())
    assert "Not measured by any row" in page.locator("#ladder").inner_text()
    left = opened.count()
    page.reload()
    page.wait_for_selector(READY)
    assert opened.count() == left
    page.fill("#f-text", "no such words")
    until(lambda: opened.count() == 0)
    page.click("#reset")
    until(lambda: opened.count() == total)


def test_rows_sort_by_value(opened: Open) -> None:
    page = opened.page
    page.select_option("#f-case", "crash/ladder")
    heading = page.locator("#rows .tabulator-col[tabulator-field=value]")

    def first() -> float:
        return float(
            page.locator("#rows .tabulator-row").first.inner_text().split()[1 - 1].lstrip("●○ ").split("±")[0]
        )

    heading.click()
    page.wait_for_selector("#rows .tabulator-col[aria-sort=ascending]")
    low = first()
    heading.click()
    page.wait_for_selector("#rows .tabulator-col[aria-sort=descending]")
    until(lambda: first() > low)


def test_a_row_opens_with_its_file_and_the_command_that_repeats_it(opened: Open, site: Path) -> None:
    page = opened.page
    page.select_option("#f-case", "crash/ladder")
    until(lambda: "crash/ladder" in page.locator("#rows").inner_text())

    def opens() -> bool:
        """With the keyboard; a table that is still being drawn loses the focus."""
        page.locator("#rows .cell").first.press("Enter")
        return page.locator("dialog[open] svg").count() > 0

    until(opens)
    text = page.locator("dialog").inner_text()
    for words in ("Launch facts", "Digests (sha256)", "mantissa_bits", "Curves", "w_q_norm_0"):
        assert words in text, words
    link = page.locator("dialog a").get_attribute("href")
    path, _, line = link.partition("#L")
    file = (site.parent / path).resolve()
    row = json.loads(file.read_text().splitlines()[int(line) - 1].rstrip(","))
    command = page.locator("dialog pre").inner_text()
    submission, _ = read_submission(file)
    ids = {unit_id(r): r for r in submission.rows}
    name = re.fullmatch(r"python runner.py run configs/ladder-cpu.yaml --unit (\w+) --results rerun", command)
    assert name is not None
    assert ids[name.group(1)].kernel == row["kernel"]
    assert row["digests"]["loss"] in text
    page.keyboard.press("Escape")
    assert page.locator("dialog[open]").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_are_readable(browser: Any, site: Path, scheme: str) -> None:
    opened = Open(browser, site, color_scheme=scheme)
    measure = """() => {
      const light = (c) => { const [r, g, b] = c.match(/\\d+/g).map((v) => (v / 255) ** 2.2); return .2126 * r + .7152 * g + .0722 * b; };
      const bg = light(getComputedStyle(document.body).backgroundColor);
      return [...document.querySelectorAll('h1, .words, .cell, td, .tabulator-col-title, a')].filter((e) => !e.classList.contains('letter'))
        .map((e) => { const f = light(getComputedStyle(e).color); return (Math.max(f, bg) + .05) / (Math.min(f, bg) + .05); });
    }"""
    assert min(opened.page.evaluate(measure)) > 4.5  # WCAG AA
    assert opened.page.evaluate("document.documentElement.dataset.theme") == scheme
    opened.page.click("#theme")
    assert opened.page.evaluate("document.documentElement.dataset.theme") != scheme
    opened.page.wait_for_selector("#bias svg")
    opened.check()


def test_a_phone_needs_no_sideways_scrolling(browser: Any, site: Path) -> None:
    opened = Open(browser, site, viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True)
    assert opened.page.evaluate("document.documentElement.scrollWidth <= 390")
    assert "does training crash?" in opened.page.locator("#answers").inner_text()
    opened.check()


def test_without_javascript_the_answers_are_there(browser: Any, site: Path) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(site.as_uri())
    assert "eager-stored +0.22 ulp" in page.locator("noscript, main").first.inner_text()
    context.close()


def test_a_printed_page_has_its_tables_and_charts(browser: Any, site: Path) -> None:
    opened = Open(browser, site)
    opened.page.emulate_media(media="print")
    assert opened.page.locator(".filters").is_hidden()
    assert opened.page.locator("#bias svg").is_visible()
    assert len(opened.page.pdf()) > 10_000
    opened.check()


def hostile_site(run_tiny: RunIt, tmp_path: Path) -> Path:
    """A page over a file with markup in every text that a page may show, in a folder of such a name."""
    path = run_tiny().path
    submission, _ = read_submission(path)
    for row in submission.rows:
        row.verdict, row.launch["x"] = MARKUP[:80], MARKUP
        row.params["p"] = row.options["o"] = MARKUP
        row.metrics["m"] = float("nan")
    submission.rows[0].status, submission.rows[0].reason = "error", MARKUP
    submission.rows[0].verdict = ""
    submission.machine.os["s"] = submission.machine.versions["v"] = submission.volatile["written"] = MARKUP
    submission.machine.backends["cpu"]["accelerator"] = MARKUP
    folder = path.parent / "a<img src=x onerror=alert(3)>"
    folder.mkdir()
    (folder / "java script:alert(4)'\".json").write_text(submission_text(submission))
    (folder / "<b>bad.json").write_text(MARKUP)
    path.unlink()
    output = tmp_path / "site" / "index.html"
    output.parent.mkdir()
    problems = write_page([tmp_path / "results"], output, None)
    assert len(problems) == 1
    return output


def test_hostile_strings_stay_text(browser: Any, run_tiny: RunIt, tmp_path: Path) -> None:
    opened = Open(browser, hostile_site(run_tiny, tmp_path))
    page = opened.page
    assert "<img src=x onerror=alert(1)>" in page.locator("#rows").inner_text()
    page.locator("#rows .cell").last.click()
    page.wait_for_selector("dialog[open]")
    assert "<script>alert(2)</script>" in page.locator("dialog").inner_text()
    assert page.locator("img").count() == 0
    assert all(
        not href.startswith("java")
        for href in page.evaluate("[...document.links].map((a) => a.getAttribute('href'))")
    )
    assert "<b>bad.json" in page.locator("#left-out").inner_text()
    opened.check()


def test_the_page_forbids_any_other_script(browser: Any, site: Path) -> None:
    opened = Open(browser, site)
    opened.page.evaluate(
        "() => { const s = document.createElement('script'); s.textContent = 'window.ran = 1'; document.body.append(s); }"
    )
    assert opened.page.evaluate("window.ran") is None
    assert any("Content Security Policy" in text for text in opened.said)
    opened.context.close()


# Without a browser


def test_the_page_holds_everything(site: Path) -> None:
    text = site.read_text()
    assert not re.search(r"<(?:script|link|img|iframe)\b[^>]* (?:src|href)=(?!\"data:)", text)
    assert "url(http" not in text


def test_only_the_reviewed_libraries_are_inlined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "vendor"
    shutil.copytree(page_module.VENDOR, copy)
    (copy / "vega.min.js").write_text("alert(1)")
    monkeypatch.setattr(page_module, "VENDOR", copy)
    vendored.cache_clear()
    try:
        with pytest.raises(ValueError, match="not the file that SHA256SUMS names"):
            vendored("vega.min.js")
    finally:
        vendored.cache_clear()
    assert "window.vegaInterpreter = expression" in interpreter()


def test_details_end_at_the_budget(run_tiny: RunIt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = run_tiny().path
    shutil.copy(path, path.parent / "tiny+2.json")
    (block,) = gather([path], tmp_path, None)[0].blocks.values()
    monkeypatch.setattr("bench.report.html.data.MAX_DETAILS", len(block) + 1)
    data, _ = gather([tmp_path / "results"], tmp_path, "https://example.org/blob/main/")
    assert len(data.blocks) < len(data.files) == 2
    content = data.finish()
    assert content["columns"]["state"].count(0) == 9
    assert content["columns"]["runs"] == [2] * 18
    assert content["files"][0]["url"].startswith("https://example.org/blob/main/")


def test_nothing_readable_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(UsageError, match="no readable result files"):
        write_page([tmp_path], tmp_path / "index.html", None)
    assert isinstance(PageData(tmp_path, None).finish()["awaited"], list)

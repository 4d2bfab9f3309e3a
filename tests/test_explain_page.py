"""The page of a report in a browser: it draws, its links and its zoom work, and the console has no error."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
from explain_page import explained_training

from torchtpu.diagnostics.session import Explanation

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "explain.png"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture(scope="module")
def explanation() -> Explanation:
    return explained_training()


@pytest.fixture
def opened(browser: Browser, explanation: Explanation, tmp_path: Path) -> Iterator[Browser]:
    """The page of the explanation; whatever a test does there, the console has no error."""
    explanation.save(tmp_path / "page.html")
    browser.open((tmp_path / "page.html").as_uri())
    yield browser
    assert browser.errors == []


def shown_range(browser: Browser) -> tuple[float, float]:
    begin, end = browser.evaluate("document.getElementById('range').textContent").removesuffix(" ms").split(" to ")
    return float(begin), float(end)


def test_the_page_draws_what_the_report_says(opened: Browser, explanation: Explanation) -> None:
    assert opened.evaluate("document.body.dataset.state") == "drawn"
    assert opened.evaluate("document.querySelectorAll('[data-lane=device]').length") == explanation.data["launches"]
    assert opened.evaluate("document.querySelectorAll('#map a').length") == len(explanation.data["regions"])
    text = opened.evaluate("document.body.textContent")
    (changed,) = (r["difference"] for r in explanation.data["recompilations"])
    assert (changed["before"], changed["after"]) == ("64", "40")
    for line in (changed["line"], *(row["line"] for row in explanation.data["reads"])):
        assert line in text


def test_each_link_of_the_page_leads_to_its_section(opened: Browser) -> None:
    targets = opened.evaluate("[...document.querySelectorAll('nav a')].map(a => a.getAttribute('href'))")
    assert len(targets) > 5
    for target in targets:
        opened.click(f"nav a[href='{target}']")
        assert opened.evaluate("location.hash") == target
        assert opened.evaluate("document.querySelector(':target').tagName") == "H2"


def test_a_region_of_the_map_leads_to_its_row(opened: Browser, explanation: Explanation) -> None:
    opened.click("#map a")
    first = explanation.data["regions"][0]
    row = opened.evaluate("document.querySelector('#regions tr:target').textContent")
    assert first["region"] in row and first["first_line"] in row


def test_the_wheel_zooms_the_timeline_and_a_double_click_shows_all_again(opened: Browser) -> None:
    begin, end = shown_range(opened)
    opened.turn_wheel("#timeline", -100)
    inner_begin, inner_end = shown_range(opened)
    assert begin <= inner_begin < inner_end <= end and inner_end - inner_begin < end - begin
    opened.double_click("#timeline")
    assert shown_range(opened) == (begin, end)


def test_an_error_of_a_page_is_noticed(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text("<script>console.error('first'); throw new Error('second')</script>")
    browser.open((tmp_path / "bad.html").as_uri())
    errors = list(browser.errors)
    browser.errors.clear()
    assert "first" in errors[0] and "second" in errors[1]


def test_the_picture_in_the_docs_is_what_the_page_looks_like(opened: Browser) -> None:
    for picture in (PICTURE.read_bytes(), opened.screenshot()):
        assert picture.startswith(b"\x89PNG\r\n\x1a\n") and len(picture) < 200_000
        width, height = struct.unpack(">II", picture[16:24])
        assert width >= 1000 and height >= 600

"""The report in a real browser: it opens, draws, filters, colours, compares, and runs nothing that a model wrote."""

from __future__ import annotations

import pytest

from megatron_rl.report.page import write_report
from tests.helpers.browser import chromium
from tests.helpers.recorded_run import HOSTILE, RL_ITERATIONS, record_run

SEE = """async (most) => {
  const places = [...document.querySelectorAll(".plot")].slice(0, most);
  for (const place of places) {
    place.scrollIntoView({ behavior: "instant" });
    for (let tries = 0; tries < 300 && !place.querySelector("svg.main-svg .xtick"); tries++)
      await new Promise((done) => setTimeout(done, 20));
  }
  return places.map((place) => {
    const frame = place.querySelector(".bglayer rect, .plotbg, .cartesianlayer")?.getBoundingClientRect();
    const card = place.closest(".card").getBoundingClientRect();
    const box = place.querySelector("svg.main-svg")?.getBoundingClientRect();
    return {
      title: place.closest(".card").textContent.slice(0, 40),
      width: box?.width ?? 0, height: box?.height ?? 0, drawn: (frame?.width ?? 0) * (frame?.height ?? 0),
      inside: !!box && box.top >= card.top && box.bottom <= card.bottom + 1 && box.right <= card.right + 1,
      marks: place.querySelectorAll(".trace, .bars path, .heatmaplayer image").length,
    };
  });
}"""


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """A report of one run, and one that compares it with another."""
    place = tmp_path_factory.mktemp("reports")
    runs = [record_run(place / "a"), record_run(place / "b", seed=2, surrogate="grpo")]
    return write_report(runs[:1]), write_report(runs, place / "both.html")


@pytest.fixture(scope="module")
def pages():
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def only_page(pages, reports):
    return pages.open(reports[0])


@pytest.fixture
def page(only_page):
    """With no filter set; a page takes a second or more to open."""
    clear(only_page)
    return only_page


def shown(page):
    return page.locator("#list li[role=option]").count()


def wait_for(page, expression, *, tries=400):
    """Until a JavaScript expression holds; the page's own policy forbids what Playwright does for it."""
    for _ in range(tries):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(25)
    raise AssertionError(f"never came true: {expression}")


def clear(page):
    page.click("button[type=reset]")
    wait_for(
        page, "document.querySelectorAll('#list li[role=option]').length === report.data.rollouts.length"
    )


def assert_drawn(charts):
    assert charts
    bad = [
        chart
        for chart in charts
        if not (chart["width"] > 250 and chart["height"] > 150 and chart["drawn"] > 9e3)
    ]
    assert bad == []
    assert [chart for chart in charts if not chart["inside"] or not chart["marks"]] == []


def test_every_chart_is_drawn_inside_its_card(page):
    charts = page.evaluate(SEE, 99)
    assert len(charts) >= 20
    assert_drawn(charts)


def test_filters_narrow_the_list_and_clear_restores_it(page):
    every = shown(page)
    assert every == 24 * RL_ITERATIONS
    page.select_option("[name=verdict]", "truncated")
    truncated = shown(page)
    assert 0 < truncated < every
    assert page.inner_text("#count") == f"{truncated} of {every}"
    page.select_option("[name=iteration]", "11")
    assert shown(page) == 1
    assert "truncated" in page.inner_text("#detail")
    clear(page)
    page.fill("[name=rewardLow]", "0.5")
    assert set(page.locator("#list li b").all_text_contents()) == {"✓ correct"}
    page.fill("[name=lengthHigh]", "5")
    page.select_option("[name=difficulty]", "5")
    assert set(page.locator("#list li .words").all_text_contents()) == {"5+2=?"}
    clear(page)
    page.fill("[name=text]", "5+17=?")
    assert shown(page) == RL_ITERATIONS
    page.fill("[name=text]", "no such words")
    assert shown(page) == 0


def test_tokens_are_coloured_by_logprob_ratio_and_clip(page):
    page.check("[name=withTokens]")
    assert shown(page) == 3 * RL_ITERATIONS

    def colours(view):
        page.click(f"[data-view={view}]")
        return page.locator("pre.tokens .t").evaluate_all("all => all.map(one => one.style.backgroundColor)")

    by_logprob = colours("logprob")
    assert len(by_logprob) == 7
    opacities = [float(colour.split(",")[3].rstrip(")")) for colour in by_logprob]
    assert opacities == sorted(opacities) and opacities[-1] > 0.5
    by_ratio = colours("ratio")
    assert by_ratio[0] != by_ratio[-1]
    assert [bool(colour) for colour in colours("clipped")] == [True, False, False, False, False, True, True]
    page.hover("pre.tokens .t >> nth=6")
    facts = page.inner_text(".facts-line")
    # e to the power of its log-prob -3.61, and of its ratio 0.2 * 3 + 0.02
    assert "p 0.0271" in facts and "ratio of the update 1.85893" in facts and "clipped above" in facts
    page.focus("#detail")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text(".facts-line").startswith("6: ")
    page.click("[data-view=text]")


def test_the_reader_is_worked_by_keys_alone(page):
    page.focus("#list")
    first = page.get_attribute("#list", "aria-activedescendant")
    page.keyboard.press("j")
    page.keyboard.press("ArrowDown")
    assert page.get_attribute("#list", "aria-activedescendant") != first
    page.keyboard.press("k")
    page.keyboard.press("/")
    page.keyboard.type("problem-3")
    assert shown(page) == 4 * RL_ITERATIONS
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "list"


def test_what_a_model_wrote_is_read_and_never_run(page):
    page.fill("[name=text]", "window.hacked")
    assert shown(page) == RL_ITERATIONS
    answer = page.locator("#detail pre.answer").evaluate("node => node.textContent")
    # the browser has no place for half a character, nor for the one of number 0
    assert answer.split("\u2028")[0] == HOSTILE.split("\u2028")[0]
    assert page.locator("#detail img, #detail script, #detail b").count() == 0
    assert page.evaluate("window.hacked") is None


def test_a_dark_page_has_dark_charts_and_a_narrow_one_fits(page):
    first_line = "document.querySelector('.plot path.js-line').style.stroke"
    background = "getComputedStyle(document.body).backgroundColor"
    page.evaluate("document.querySelector('.plot').scrollIntoView({ behavior: 'instant' })")
    light = page.evaluate(first_line)
    page.emulate_media(color_scheme="dark")
    wait_for(page, f"{first_line} !== {light!r}")
    assert sum(map(int, page.evaluate(background)[4:-1].split(","))) < 150
    page.set_viewport_size({"width": 420, "height": 800})
    wait_for(page, "document.documentElement.scrollWidth <= 420")
    page.emulate_media(color_scheme="light")
    wait_for(page, f"{first_line} === {light!r}")
    assert sum(map(int, page.evaluate(background)[4:-1].split(","))) > 600


def test_no_button_sends_a_chart_anywhere_and_a_finger_scrolls(pages, page, reports):
    page.evaluate("document.querySelector('.plot').scrollIntoView({ behavior: 'instant' })")
    wait_for(page, "document.querySelector('.plot .modebar-btn')")
    buttons = page.locator(".plot >> nth=0 >> .modebar-btn").evaluate_all(
        "all => all.map(one => one.dataset.title)"
    )
    assert sorted(buttons) == ["Download plot as a PNG", "Pan", "Reset axes", "Zoom"]
    touched = pages.open(reports[0], width=420, touch=True)
    assert_drawn(touched.evaluate(SEE, 2))
    # nothing hovers there: they would lie on the curves for good
    assert touched.locator(".modebar-btn").count() == 0
    assert touched.evaluate("document.querySelector('.js-plotly-plot').layout.dragmode") is False
    touched.close()


def test_two_runs_are_laid_over_each_other_and_told_apart(pages, reports):
    page = pages.open(reports[1])
    assert_drawn(page.evaluate(SEE, 8))
    assert page.locator(".runs .dot").count() == 2
    overview = page.inner_text("#overview")
    assert "stages.1.algorithm.surrogate" in overview and "gppo" in overview and "grpo" in overview
    assert "torch_threads" not in overview
    reward = page.locator(".card", has_text="mean over the rollouts of an iteration").locator(".plot")
    strokes = reward.locator("path.js-line").evaluate_all("all => all.map(one => one.style.stroke)")
    assert len(set(strokes)) == 2
    page.select_option("[name=run]", "1")
    assert 0 < shown(page) < page.evaluate("report.data.rollouts.length")
    page.close()


def test_no_page_complained_or_asked_the_network_for_anything(pages, page):
    assert pages.complaints == []
    assert [url for url in pages.requests if not url.startswith(("file:", "data:", "blob:"))] == []

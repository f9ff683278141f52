"""A result as HTML: complete, escaped, without anything from outside, readable on light and dark."""

import re
from html.parser import HTMLParser

import numpy as np
import pytest

from devsample import LLCResult
from devsample.markup import COLORS
from tests.unit.test_diagnostics import healthy
from tests.unit.test_results import make_result

VOID = {"br", "hr", "img", "meta", "link", "input"}


class Page(HTMLParser):
    """Checks that tags are closed in order; keeps tags, attributes and text."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.styles, self.text = [], [], [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.styles += [value for name, value in attrs if name == "style"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data + " "


def read(result):
    page = Page()
    page.feed(result._repr_html_())
    page.close()
    assert page.open == []
    return page


@pytest.fixture
def traces():
    return list(healthy(np.random.default_rng(0)))


@pytest.fixture
def broken(traces):
    traces[2] = traces[2][:40]
    message = "<script>alert('x')</script> & \"more\""
    provenance = {
        "started": "2026-01-02T03:04:05+00:00",
        "fingerprints": {"weights": "ab" * 32, "data": None},
    }
    return make_result(
        traces,
        c2={"status": "failed", "message": message},
        at_center={"gradient_noise": 3.0},
        sampler="<b>SGLD</b>",
        provenance=provenance,
    )


def test_it_says_what_the_summary_says(broken):
    text = " ".join(read(broken).text.split())
    assert text.startswith(f"{broken.verdict} λ̂ = ")
    for reason in broken.reasons:
        assert reason in text
    for part in (
        "3 of 4 chains × 500 draws",
        "std. error",
        "failed: ",
        "nbeta 239.8 = n/ln n",
        "sha256 abab",
    ):
        assert part in text
    assert "data unknown" in text


def test_everything_is_escaped(broken):
    page, html = read(broken), broken._repr_html_()
    assert "<script" not in html
    assert "<b>SGLD" not in html
    assert "<script>alert('x')</script> & \"more\"" in page.text
    assert "script" not in {tag for tag, _ in page.tags}


def test_nothing_comes_from_outside(broken):
    page = read(broken)
    assert {tag for tag, _ in page.tags} <= {
        *("div", "span", "b", "ul", "li", "table", "thead", "tbody", "tr", "td", "th", "details", "summary")
    }
    names = {name for _, attributes in page.tags for name in attributes}
    assert names <= {"style", "class", "colspan"}
    assert not re.search(r"url\(|https?:|@import|expression", broken._repr_html_())


@pytest.mark.parametrize("verdict", ["trust", "caution", "reject"])
def test_the_verdict_has_its_colour(traces, verdict):
    died = {"status": "died"}
    lost = {"trust": {}, "caution": {"c0": died}, "reject": {"c0": died, "c1": died}}[verdict]
    result = make_result(traces, **lost)
    assert result.verdict == verdict
    (style,) = [style for style in read(result).styles if "background:#" in style]
    assert f"background:{COLORS[verdict]}" in style


def luminance(color):
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return np.dot([0.2126, 0.7152, 0.0722], linear)


def test_it_reads_on_light_and_on_dark(broken):
    """The only colours of its own are the badge's, white on dark enough; the rest is the page's."""
    for color in COLORS.values():
        assert 1.05 / (luminance(color) + 0.05) >= 4.5
    badge, *others = sorted(read(broken).styles, key=lambda style: "background:#" not in style)
    assert "color:#fff" in badge
    for style in others:
        colors = re.findall(r"(?<![-\w])(?:color|background):([^;]+)", style)
        assert set(colors) <= {"inherit", "transparent"}, style


def test_many_chains_are_cut(traces):
    text = read(make_result(traces * 8)).text
    assert "12 more chains in .chains" in text


def test_a_merged_result_says_so(traces):
    merged = LLCResult.merge(make_result(traces), make_result(traces[:2], seed=1))
    assert "2 runs" in read(merged).text

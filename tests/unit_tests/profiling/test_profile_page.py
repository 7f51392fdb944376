"""Pictures and page of a profile: what stands where, and that it is well-formed."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from megatron_async.observe.timeline import Span
from megatron_async.profiling import gap_histogram as histogram
from megatron_async.profiling import lanes_picture as lanes
from megatron_async.profiling.profile_page import gap_window, profile_page, step_window
from megatron_async.profiling.step_gaps import step_gaps
from tests.unit_tests.profiling.made_timeline import LATE, made_timeline

FACTS = {"model": "<m&m>", "workload": "steady", "lookahead": 1}


def by_class(svg, name):
    return [e for e in ElementTree.fromstring(svg).iter() if name in e.get("class", "").split()]


def box(element):
    return tuple(float(element.get(key)) for key in ("x", "y", "width", "height"))


def test_bars_stand_where_their_spans_are():
    svg = lanes.lanes_picture(made_timeline(), 3000, 6000)
    scale = (lanes.WIDTH - lanes.LEFT - lanes.RIGHT) / 3000
    bars = {bar[0].text.split(":")[0]: box(bar) for bar in by_class(svg, "bar")}
    # Step 4: device from 4300 to 5200, prepared from 4050 to 4250.
    assert bars["device_step 4"] == pytest.approx(
        (lanes.LEFT + 1300 * scale, lanes.DEVICE_Y, 900 * scale, lanes.LANE_HEIGHT), abs=0.01
    )
    assert bars["prepare_step 4"] == pytest.approx(
        (lanes.LEFT + 1050 * scale, lanes.CPU_Y, 200 * scale, lanes.LANE_HEIGHT), abs=0.01
    )
    # Cut at the window's begin, and absent outside it; nested ranges are no bars of their own.
    assert bars["device_step 3"][0] == lanes.LEFT
    assert "device_step 2" not in bars
    assert not any(name.startswith("schedule") for name in bars)
    texts = [text.text for text in by_class(svg, "on-device-0")]
    assert texts == ["step 4"]


def test_gaps_are_named_with_their_length():
    svg = lanes.lanes_picture(made_timeline(), 3000, 6000)
    lengths = [gap[0].text for gap in by_class(svg, "gap")]
    assert lengths == ["device idle for 400 µs", "device idle for 100 µs"]
    assert [text.text for text in by_class(svg, "gap-length")] == ["idle 400 µs", "idle 100 µs"]


@pytest.mark.parametrize("length", [0.7, 35, 999, 2500, 123456, 5e6])
def test_nothing_leaves_the_picture(length):
    svg = lanes.lanes_picture(made_timeline(), 4000, 4000 + length)
    for rectangle in ElementTree.fromstring(svg).iter("rect"):
        x, y, width, height = box(rectangle)
        assert x >= lanes.LEFT
        assert x + width <= lanes.WIDTH - lanes.RIGHT + lanes.LEAST_WIDTH + 0.02
        assert 0 <= y <= y + height <= lanes.HEIGHT
    ticks = [text.text for text in by_class(svg, "tick")]
    assert 4 <= len(ticks) <= lanes.TICKS + 2
    assert len(set(ticks)) == len(ticks)


def test_a_name_that_does_not_fit_is_left_out():
    timeline = made_timeline()
    timeline.add(Span("cpu", "emit", 4, 4260, 4262))
    svg = lanes.lanes_picture(timeline, 3000, 6000)
    assert len(by_class(svg, "stage-emit")) == 1
    assert by_class(svg, "on-stage-emit") == []


def test_the_histogram_counts_every_step():
    gaps = step_gaps(made_timeline()).gaps
    gaps = [*gaps, replace(gaps[0], gap_us=0.0), replace(gaps[0], gap_us=123456.0)]
    svg = histogram.gap_histogram(gaps)
    titles = {
        kind: [re.search(r": (\d+) steps", bar[0].text).group(1) for bar in by_class(svg, kind)]
        for kind in ("column-ahead", "column-late")
    }
    assert sum(map(int, titles["column-ahead"])) == 6
    assert sum(map(int, titles["column-late"])) == 1
    (late,) = by_class(svg, "column-late")
    low, high = re.match(r"(\d+) µs to (\d+) µs", late[0].text).groups()
    assert float(low) <= 400 <= float(high)
    marks = [text.text for text in by_class(svg, "mark-name")]
    assert marks[0] == "median 100 µs"
    for rectangle in ElementTree.fromstring(svg).iter("rect"):
        x, y, width, height = box(rectangle)
        assert 0 <= x <= x + width <= histogram.WIDTH
        assert 0 <= y <= y + height <= histogram.HEIGHT


class Tags(HTMLParser):
    """Checks that tags close in order."""

    def __init__(self):
        super().__init__()
        self.open, self.sources = [], []

    def handle_starttag(self, tag, attributes):
        self.sources += [value for key, value in attributes if key in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else():
    timeline = made_timeline()
    page = profile_page(timeline, step_gaps(timeline), FACTS)
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.sources == []
    assert "<script" not in page
    assert "http" not in page
    assert "&lt;m&amp;m&gt;" in page
    assert "<m&m>" not in page
    assert f"400 µs before step {LATE}" in page
    assert "The CPU was late" in page
    assert page.count("<svg") == 3
    # Every class of the pictures has its colour.
    for name in set(re.findall(r'class="((?:stage|device|column|gap|mark|bar|lane)[\w-]*)', page)):
        assert f".{name}" in page.split("</style>")[0], name


def test_windows():
    timeline = made_timeline()
    report = step_gaps(timeline)
    begin, end = gap_window(timeline, report.worst[0])
    assert (begin, end) == (3500, 4700)  # its length on either side of 3900 to 4300
    typical = report.gaps[0]
    assert step_window(report, typical) == (900, 3900)  # steps 1 to 3
    timeline.add(Span("cpu", "no overlap: after_idle", 3, 0, 0))
    assert step_window(step_gaps(timeline), typical) == (900, 2900)  # not beyond idle time


@pytest.mark.parametrize("gap_us", [110.0, 500.0, 900.0])
def test_labels_of_percentiles_that_are_close_do_not_overlap(gap_us):
    gaps = step_gaps(made_timeline()).gaps
    gaps = [replace(gaps[0], gap_us=gap_us + i % 50) for i in range(100)]
    median, late = by_class(histogram.gap_histogram(gaps), "mark-name")
    spans = []
    for label in (median, late):
        x, width = float(label.get("x")), 7 * len(label.text)
        spans.append((x - width, x) if "end" in label.get("class") else (x, x + width))
        assert float(label.get("y")) - 12 > 0
    (a, b), (c, d) = spans
    assert b <= c or d <= a or abs(float(median.get("y")) - float(late.get("y"))) >= 12

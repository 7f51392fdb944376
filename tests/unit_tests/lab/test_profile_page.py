"""Pictures and page of a profile: what stands where, and that it is well-formed."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from megatron_async.lab import profile_page
from megatron_async.lab.profile_page import WIDTH, gap_window, step_window
from megatron_async.lab.step_gaps import STAGES, step_gaps
from megatron_async.observe.timeline import Span
from tests.support.browser import Browser, find_chromium
from tests.unit_tests.lab.made_timeline import LATE, made_timeline

LEFT, RIGHT = 52, 8
"""Margins of server/page/lanes.js."""
FACTS = {"model": "<m&m>", "workload": "steady", "lookahead": 1}


def by_class(svg, name):
    return [e for e in ElementTree.fromstring(svg).iter() if name in e.get("class", "").split()]


def box(element):
    return tuple(float(element.get(key)) for key in ("x", "y", "width", "height"))


@pytest.fixture(scope="module")
def lanes(tmp_path_factory):
    """Draws a window in a browser: elements of a class, and the picture's viewBox."""
    program = find_chromium()
    if program is None:
        pytest.skip("there is no Chromium: apt install chromium, or set CHROMIUM")
    folder = tmp_path_factory.mktemp("page")
    with Browser(program, folder / "profile") as browser, pytest.MonkeyPatch.context() as patch:

        def draw(timeline, start_us, end_us):
            patch.setattr(profile_page, "gap_window", lambda *_: (start_us, end_us))
            html = profile_page.profile_page(timeline, step_gaps(made_timeline()), FACTS)
            (folder / "index.html").write_text(html, "utf-8")
            browser.open(f"file://{folder}/index.html")
            picture = "document.querySelector('[data-window] svg').outerHTML"
            assert browser.complaints == []
            return browser.until(picture).replace("xmlns=", "about=")

        yield draw


def test_bars_stand_where_their_spans_are(lanes):
    svg = lanes(made_timeline(), 3000, 6000)
    scale = (WIDTH - LEFT - RIGHT) / 3000
    bars = {bar[0].text.split(":")[0]: box(bar) for bar in by_class(svg, "bar")}
    # Step 4: device from 4300 to 5200, prepared from 4050 to 4250, called from 4050 to 4600.
    for name, start, length in (("step 4", 1050, 550), ("prepare 4", 1050, 200)):
        assert bars[name][::2] == pytest.approx((LEFT + start * scale, length * scale), abs=0.01)
    device = {bar[0].text: box(bar) for bar in by_class(svg, "fill-device-0")}
    (x, y, width, height) = device["step 4: 900 µs, from 1.30 ms"]
    assert (x, width) == pytest.approx((LEFT + 1300 * scale, 900 * scale), abs=0.01)
    (cpu, lane) = (bars["prepare 4"], by_class(svg, "lane"))
    assert [box(each)[1::2] for each in lane] == [cpu[1::2], (y, height)]
    assert bars["step 4"][1] < cpu[1]  # the call stands above
    # Cut at the window's begin, and absent outside it; nested ranges are no bars of their own.
    (third,) = by_class(svg, "fill-device-1")[:1]
    assert third[0].text.startswith("step 3: ")
    assert box(third)[0] == LEFT
    assert not any(name.startswith(("step 2", "schedule")) for name in bars)
    texts = [text.text for text in by_class(svg, "on-bar")]
    assert "step 4" in texts


def test_gaps_are_named_with_their_length(lanes):
    svg = lanes(made_timeline(), 3000, 6000)
    lengths = [gap[0].text for gap in by_class(svg, "fill-gap")]
    assert lengths == ["device idle for 400 µs", "device idle for 100 µs"]
    assert [text.text for text in by_class(svg, "gap-length")] == ["idle 400 µs", "idle 100 µs"]


@pytest.mark.parametrize("length", [60, 999, 2500, 123456, 5e6])
def test_nothing_leaves_the_picture(lanes, length):
    svg = lanes(made_timeline(), 4000, 4000 + length)
    _, _, _, total = map(float, ElementTree.fromstring(svg).get("viewBox").split())
    for rectangle in ElementTree.fromstring(svg).iter("rect"):
        x, y, width, height = box(rectangle)
        assert x >= LEFT
        assert x + width <= WIDTH - RIGHT + 1.02  # the least width of a bar
        assert 0 <= y <= y + height <= total
    ticks = [text.text for kind in ("tick", "tick-end") for text in by_class(svg, kind)]
    assert len(ticks) == len(set(ticks)) == 5


def test_a_name_that_does_not_fit_is_left_out(lanes):
    timeline = made_timeline()
    timeline.add(Span("cpu", "emit", 4, 4260, 4262))
    svg = lanes(timeline, 3000, 6000)
    assert len(by_class(svg, "fill-emit")) == 1
    assert not any("emit" in (text.text or "") for text in by_class(svg, "on-bar"))


def test_the_histogram_counts_every_step():
    gaps = step_gaps(made_timeline()).gaps
    gaps = [*gaps, replace(gaps[0], gap_us=0.0), replace(gaps[0], gap_us=123456.0)]
    svg = profile_page.gap_histogram(gaps)
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
        assert 0 <= x <= x + width <= WIDTH
        assert 0 <= y <= y + height <= profile_page.HEIGHT


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
    page = profile_page.profile_page(timeline, step_gaps(timeline), FACTS)
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.sources == []
    assert "import" not in page.split("<script")[1]
    assert re.findall(r"https?:[^\"]*", page) == ["http://www.w3.org/2000/svg"]  # a name
    assert "&lt;m&amp;m&gt;" in page
    assert "<m&m>" not in page
    assert f"400 µs before step {LATE}" in page
    assert "The CPU was late" in page
    assert page.count("<svg") == 1
    assert page.count("data-window=") == 2
    # Every class of the pictures has its colour.
    names = {f"fill-{kind}" for kind in (*STAGES.values(), "call", "gap", "device-0", "device-1")}
    names |= {"gap-length", "gap-edge", "lane", "bar"}
    for name in names | set(re.findall(r'class="((?:column|mark)[\w-]*)', page)):
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
    median, late = by_class(profile_page.gap_histogram(gaps), "mark-name")
    spans = []
    for label in (median, late):
        x, width = float(label.get("x")), 7 * len(label.text)
        spans.append((x - width, x) if "end" in label.get("class") else (x, x + width))
        assert float(label.get("y")) - 12 > 0
    (a, b), (c, d) = spans
    assert b <= c or d <= a or abs(float(median.get("y")) - float(late.get("y"))) >= 12

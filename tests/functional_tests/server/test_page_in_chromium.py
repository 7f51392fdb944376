"""The page at "/" in a headless Chromium, with the demo model behind it: people's own way.

The test takes half a minute and is no part of the ordinary ones: set MEGATRON_ASYNC_BROWSER=1.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import Browser, find_chromium
from tests.support.patience import eventually
from tests.support.served import ADMIN, KEY, Served

CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("MEGATRON_ASYNC_BROWSER"),
        reason="takes half a minute: set MEGATRON_ASYNC_BROWSER=1",
    ),
    pytest.mark.skipif(
        CHROMIUM is None, reason="there is no Chromium: apt install chromium, or set CHROMIUM"
    ),
]
QUESTION = "What is the capital of France?"
MARKED = """# Head

Some **bold** and *thin* with `code`, 2 * 3 * 4, snake_case_name, <b>x</b>.
[l](javascript:alert(1)) **open

- one
- two **b**
  - deep

3. third

> quoted

```python
x = y ** 2  # **not bold**
```
End."""


@pytest.fixture
def page(service: Served, tmp_path: Path) -> Iterator[Browser]:
    """The page, the key given."""
    assert CHROMIUM is not None
    with Browser(CHROMIUM, tmp_path) as browser:
        browser.size(1600, 1000)
        browser.open(f"http://127.0.0.1:{service.port}/")
        browser.until("!document.getElementById('key-form').hidden")
        browser.complaints.clear()  # of the 401 that it is asked for
        yield browser


def give_key(page: Browser, key: str) -> None:
    page.value("document.getElementById('key').focus()")
    page.write(key)
    page.until("document.getElementById('model').textContent.includes('smollm2')")


def ask(page: Browser, question: str, **settings: float) -> None:
    for name, value in settings.items():
        page.value(f"document.getElementById('{name}').value = {value}")
    page.value("document.getElementById('text').focus()")
    page.write(question)


def text_of(page: Browser, selector: str) -> str:
    found: str = page.value(f"document.querySelector({selector!r})?.textContent ?? ''")
    return found


def test_chat_hover_and_steps(page: Browser, service: Served) -> None:
    give_key(page, ADMIN)
    ask(page, QUESTION, temperature=0, max_tokens=24)
    page.until("document.querySelector('.facts')?.textContent.includes('tokens/s')")
    page.until("document.getElementById('stop').hidden")
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 24}
    _, answer = service.request("/v1/chat/completions", body)
    told = answer["choices"][0]["message"]["content"]
    assert text_of(page, ".assistant .said") == told
    assert (
        page.value("[...document.querySelectorAll('.token')].map((t) => t.textContent).join('')")
        == told
    )
    assert "first token" in text_of(page, ".facts")
    page.point_at(".token")
    page.until("!document.getElementById('tip').hidden")
    assert page.value("document.querySelectorAll('#tip .line').length") == 5
    assert text_of(page, "#tip .chosen code") == told.split(" ")[0].split(",")[0]
    assert text_of(page, "#tip .chosen .number").endswith("%")
    page.value("document.querySelector('.assistant .said').focus()")
    page.press("ArrowRight", code=39)
    page.press("ArrowRight", code=39)
    assert (
        page.value("[...document.querySelectorAll('.token')].findIndex((t) => t.matches('.here'))")
        == 1
    )
    page.press("Escape", code=27)
    assert page.value("document.getElementById('tip').hidden")
    # Two lanes, steps of the device that the CPU launched ahead, and why the first was not.
    page.until("document.querySelectorAll('#lanes .fill-device-0').length")
    assert page.value("document.querySelectorAll('#lanes .fill-wait').length") >= 1
    assert text_of(page, "#reasons .why")
    assert page.complaints == []


def test_the_first_answer_is_sane_and_settings_say_what_is_done(page: Browser, service: Served):
    give_key(page, KEY)
    page.until("document.getElementById('temperature').placeholder === 'default 0'")
    assert page.value("document.getElementById('max_tokens').placeholder") == "default 1024"
    ask(page, QUESTION)
    page.until("document.querySelector('.facts')?.textContent.includes('tokens/s')")
    page.until("document.getElementById('stop').hidden")
    assert "Paris" in text_of(page, ".assistant .said")
    # A reload keeps the chat, which goes on, and a new one is empty.
    page.open(f"http://127.0.0.1:{service.port}/")
    page.until("document.querySelectorAll('.message').length === 2")
    assert text_of(page, ".user .said") == QUESTION
    assert "Paris" in text_of(page, ".assistant .said")
    page.until("document.getElementById('model').textContent.includes('smollm2')")
    ask(page, "And of Italy?")
    page.until("document.querySelectorAll('.facts').length === 1")
    page.until("document.getElementById('stop').hidden")
    assert "Rome" in text_of(page, ".message:last-child .said")
    page.value("document.getElementById('new-chat').click()")
    page.open(f"http://127.0.0.1:{service.port}/")
    assert page.value("document.querySelectorAll('.message').length") == 0


def test_marks_of_a_text_are_its_form(page: Browser) -> None:
    """In whatever parts it comes: all of its characters stay, and no HTML is made of it."""
    script = """(async () => {
        const { TokenText } = await import("/page/tokens.js");
        for (const size of [1, 3, 1000]) {
            const said = document.createElement("div");
            said.id = `by${size}`;
            said.className = "said";
            document.getElementById("messages").append(said);
            const shown = new TokenText(said), text = TEXT;
            for (let at = 0; at < text.length; at += size) {
                const token = text.slice(at, at + size);
                shown.push(token, [{ token, logprob: -0.1, bytes: null, top_logprobs: [] }]);
                shown.draw();
            }
            shown.end();
        }
    })()"""
    page.value(script.replace("TEXT", json.dumps(MARKED)))
    page.until("Boolean(document.querySelector('#by1000 pre'))")

    def texts(selector: str, size: int) -> list[str]:
        """What is seen of elements."""
        found: list[str] = page.value(
            f"[...document.querySelectorAll('#by{size} {selector}')].map((one) => one.innerText)"
        )
        return [text.strip() for text in found]

    for size in (1, 3, 1000):
        assert text_of(page, f"#by{size}") == MARKED
        assert texts("h3", size) == ["Head"]
        assert texts("strong", size) == ["bold", "b"]
        assert texts("em", size) == ["thin"]
        assert texts(".paragraph code", size) == ["code"]
        assert texts("pre", size) == ["x = y ** 2  # **not bold**"]
        assert texts("ul ul li", size) == ["deep"]
        assert page.value(f"document.querySelector('#by{size} ol li').value") == 3
        assert texts(".quote", size) == ["quoted"]
        first, last = texts(".paragraph", size)
        assert "2 * 3 * 4, snake_case_name, <b>x</b>.\n[l](javascript:alert(1)) **open" in first
        assert last == "End."
        assert texts(":is(a, b, img)", size) == []
    assert page.complaints == []


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_an_answer_is_stopped(page: Browser, service: Served, how: str) -> None:
    give_key(page, KEY)
    ask(page, "Tell me a very long story.", max_tokens=1500)
    page.until("document.querySelectorAll('.token').length > 3")
    if how == "button":
        page.value("document.getElementById('stop').click()")
    else:
        page.press("Escape", code=27)
    page.until("document.getElementById('stop').hidden")
    assert "stopped" in text_of(page, ".facts")

    def idle() -> bool:
        _, live = service.request("/live", key=ADMIN)
        return not any(one["slots_in_use"] for one in live["replicas"].values())

    eventually(idle, "the engine to be told")
    assert page.value("document.querySelectorAll('.error').length") == 0
    # A key that is no administrator's sees counters, and no steps.
    page.until("document.getElementById('engine-note').textContent.includes('admin key')")
    assert page.value("document.querySelectorAll('.tiles dd').length") == 8


def test_errors_are_sentences_and_texts_are_texts(page: Browser) -> None:
    give_key(page, KEY)
    ask(page, "<img src=x onerror=document.title='no'><b>hi</b>", temperature=-1)
    page.until("Boolean(document.querySelector('.error'))")
    assert text_of(page, ".error") == "Temperature=-1.0 is not allowed: it must be 0 to 100."
    assert text_of(page, ".user .said").startswith("<img src=x")
    assert page.value("document.querySelectorAll('.said img, .said b').length") == 0
    assert page.value("document.title") != "no"
    assert page.value("document.getElementById('text').value").startswith("<img")  # to ask again


@pytest.mark.parametrize("width", [400, 1600])
def test_nothing_is_wider_than_the_window(page: Browser, width: int) -> None:
    page.size(width, 900, dark=True)
    give_key(page, KEY)
    page.value("document.getElementById('settings').open = true")
    assert page.value("document.documentElement.scrollWidth") <= width


def test_texts_are_no_html(tmp_path: Path) -> None:
    """Names, questions, answers and errors are shown as they are written."""
    assert CHROMIUM is not None
    hostile = "<img src=x onerror='window.run = 1'><script>window.run = 1</script>"
    with Served(
        tmp_path / "log", "smollm2", "--device", "cpu", "--block-size-tokens", "16",
        "--max-requests", "8", "--no-progress", "--api-processes", "1",
        "--served-model-name", f"smollm2{hostile}",
    ) as served:  # fmt: skip
        served.wait_until_ready()
        with Browser(CHROMIUM, tmp_path) as page:
            page.open(f"http://127.0.0.1:{served.port}/")
            page.until("!document.getElementById('key-form').hidden")
            give_key(page, ADMIN)
            ask(page, f"Repeat this and nothing else: {hostile}", temperature=0, max_tokens=24)
            page.until("document.querySelector('.facts')?.textContent.includes('tokens/s')")
            assert hostile in text_of(page, "#model")
            assert hostile in page.value("document.body.textContent")
            assert page.value("document.querySelectorAll('img[src=x], body script').length") == 0
            assert page.value("window.run === undefined")


def test_numbers_of_a_server_that_is_gone_are_not_shown(page: Browser, service: Served) -> None:
    """The last test: it ends the service of the others."""
    give_key(page, KEY)
    page.until("document.getElementById('state').textContent === 'running'")
    service.process.kill()
    page.until("document.getElementById('state').textContent === 'not reached'")
    told = page.value("[...document.querySelectorAll('.tiles dd')].map((one) => one.innerText)")
    assert {one.strip() for one in told} == {"\u2013"}
    assert len(told) == 8
    assert "cannot be reached" in text_of(page, "#engine-note")
    assert page.value("document.querySelectorAll('#lanes svg, .tiles svg').length") == 0

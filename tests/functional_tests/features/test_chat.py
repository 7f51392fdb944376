"""`megatron-async chat`: turns remember, Ctrl-C stops one answer, what does not fit is said.

Break one of these, and a test fails:

- `ChatSession.answer`: keep the message of a turn that failed, or forget earlier turns
- `ChatSession._fit`: drop one message instead of two
- `ChatSession._answer`: no `abort_request`
"""

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from megatron_async import LLM, SamplingParams
from megatron_async.cli import main as cli
from megatron_async.cli.chat_session import ChatSession, TurnDoesNotFit
from megatron_async.ops.cpu.compiler import multiplies_integers
from megatron_async.text.tokenizer import TokenizerError
from tests.support.patience import PATIENCE_S

SHORT = SamplingParams(temperature=0.0, num_tokens_to_generate=8)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("smollm2", device="cpu", max_sequence_length=256, block_size_tokens=32) as made:
        yield made


@pytest.fixture
def session(llm: LLM) -> Iterator[ChatSession]:
    made = ChatSession(llm, SHORT)
    yield made
    made.close()


def test_a_turn_is_answered_with_the_turns_before_it(llm: LLM, session: ChatSession) -> None:
    pieces: list[str] = []
    first = session.answer("Name a color.", pieces.append)
    assert "".join(pieces) == first.text != ""
    assert (first.end, first.tokens, first.left_out) == ("length", 8, 0)
    assert 0 < first.first_s <= first.seconds
    second = session.answer("And another?", pieces.append)
    whole = [*session.messages[:3]]
    assert [message["role"] for message in whole] == ["user", "assistant", "user"]
    assert second.text == llm.chat(whole, SHORT)[0].generated_text
    assert second.cached_tokens % 32 == 0
    assert 0 < second.cached_tokens < second.prompt_tokens


def test_a_system_message_stays_when_the_oldest_turns_go(llm: LLM) -> None:
    session = ChatSession(llm, SHORT, "Be brief.")
    left_out = 0
    for number in range(6):
        answer = session.answer(f"Number {number}: " + "tea " * 30, lambda _: None)
        left_out += answer.left_out
        assert answer.prompt_tokens + 64 <= session.context_tokens == 256
        roles = [message["role"] for message in session.messages]
        assert roles == ["system", *["user", "assistant"] * (len(roles) // 2)]
    assert left_out >= 4
    assert session.messages[-2]["content"].startswith("Number 5")
    session.close()


def test_a_message_that_cannot_fit_is_refused_and_forgotten(session: ChatSession) -> None:
    session.answer("Hello", lambda _: None)
    before = list(session.messages)
    with pytest.raises(TurnDoesNotFit, match=r"comes to \d+ tokens .* the context has 256"):
        session.answer("tea " * 400, lambda _: None)
    assert session.messages == before
    assert session.answer("Hello", lambda _: None).tokens


@pytest.fixture
def takes_ctrl_c() -> Iterator[None]:
    """Ctrl-C arrives, as on a terminal: what a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("takes_ctrl_c")
def test_ctrl_c_stops_one_answer(llm: LLM) -> None:
    session = ChatSession(llm, SamplingParams(temperature=0.0, num_tokens_to_generate=150))
    pieces: list[str] = []

    def interrupt(text: str) -> None:
        pieces.append(text)
        if len(pieces) == 3:
            os.kill(os.getpid(), signal.SIGINT)

    stopped = session.answer("Tell me a long story about the sea.", interrupt)
    assert stopped.end == "stopped"
    assert 0 < stopped.tokens < 100
    assert session.messages[-1] == {"role": "assistant", "content": "".join(pieces)}
    assert not llm.engine.context.slots.slot_of  # the request has ended
    assert session.answer("Say yes.", lambda _: None).tokens  # the chat goes on
    session.close()


def test_a_model_without_a_tokenizer_has_no_chat() -> None:
    with (
        LLM("dummy:tiny", device="cpu") as llm,
        pytest.raises(TokenizerError, match="no tokenizer"),
    ):
        ChatSession(llm, SHORT)


def test_several_ranks_are_refused(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["chat"]) == 2
    assert "chat runs as one process" in capsys.readouterr().err


def test_turns_from_a_pipe(tmp_path, monkeypatch, capsys):
    """Answers alone on standard output; remarks on the other; a failed turn is the exit status."""
    saved = tmp_path / "chat.json"
    turns = f'/stats\n"""Say\nyes."""\n{"tea " * 3000}\n/nothing\n/save {saved}\n/quit\nnot asked\n'
    monkeypatch.setattr(sys, "stdin", io.StringIO(turns))
    limits = ["--max-new-tokens", "6", "--max-sequence-length", "1024"]
    assert cli.main(["chat", "--device", "cpu", *limits]) == 1
    run = capsys.readouterr()
    messages = json.loads(saved.read_text())
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert messages[0]["content"] == "Say\nyes."
    assert run.out.strip() == messages[1]["content"].strip()
    assert "\x1b" not in run.out + run.err
    remarks = [line for line in run.err.splitlines() if line.startswith("megatron-async: ")]
    for part in ("there was no answer yet", "shorten the message", "no /nothing", "wrote 2"):
        assert any(part in remark for remark in remarks), (part, run.err)


def test_in_a_terminal() -> None:
    """A person: a prompt, an answer with its figures, Ctrl-C in an answer, Ctrl-D."""
    here, there = pty.openpty()
    command = [sys.executable, "-m", "megatron_async", "chat", "--device", "cpu"]
    command += ["--quantization", "auto"]
    child = subprocess.Popen(
        command, stdin=there, stdout=there, stderr=there, start_new_session=True,
        env=os.environ | {"TERM": "xterm"}, preexec_fn=lambda: _control(there),
    )  # fmt: skip
    os.close(there)
    shown = b""

    def until(*parts: bytes, behind: int = 0) -> None:
        nonlocal shown
        deadline = time.monotonic() + PATIENCE_S
        while not all(part in shown[behind:] for part in parts):
            assert time.monotonic() < deadline, shown.decode(errors="replace")
            if select.select([here], [], [], 0.5)[0]:
                shown += os.read(here, 4096)

    try:
        until(b">>> ")
        if multiplies_integers():
            assert (
                b"smollm2, weights of 4 and 8 bits (--quantization none: float32). /help" in shown
            )
        os.write(here, b"Count from 1 to 500.\n")
        until(b"3. 3")
        os.write(here, b"\x03")
        until(b"tokens/s", b">>> ", behind=shown.index(b"3. 3"))
        at = len(shown)
        os.write(here, b"\x04")
        assert child.wait(timeout=PATIENCE_S) == 0
        assert b"\x1b[2m[" in shown[:at]
        assert b"499" not in shown
    finally:
        child.kill()
        child.wait()
        os.close(here)


def _control(terminal: int) -> None:
    """Make the terminal the child's own, so that its Ctrl-C becomes a signal."""
    import fcntl
    import termios

    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)

"""Megatron-LM's inference examples, run unmodified, and what each option's answer must be; its
server examples, asked over HTTP for what `LLM` says."""

import json
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from upstream.file_runs import TIME_IS_UP, TIMEOUT, environment, free_port, run

DYNAMIC = "examples/inference/advanced/gpt_dynamic_inference.py"
COORDINATED = "examples/inference/advanced/gpt_dynamic_inference_with_coordinator.py"
OFFLINE = "examples/inference/offline_inference.py"
PROMPTS = ("The sea is", "Once upon a time, in a land far away,", "1 2 3 4 5 6 7")
TOKENS = 12
LAUNCH = Path(__file__).with_name("launch.py")

Answer = dict[str, Any]
"""What the script's JSON says of one request: `generated_tokens`, `generated_text` and more."""


@dataclass(frozen=True)
class Expected:
    """What `LLM` says to a prompt: tokens, cut by Megatron's rule of stop words where the run has
    any; the text of all of them, and their log probs, if any were asked for."""

    tokens: list[int]
    text: str
    log_probs: list[float] | None
    prompt_length: int


@dataclass(frozen=True)
class Example:
    """One run of a script.

    Attributes:
        script: its path in the checkout.
        flags: beside those of model, prompts and lengths.
        sampling: what `SamplingParams` of the reference differ in.
        prompts: of this run.
        stop_words: of this run. Megatron ends a request where the tokens of a word have been
            generated, and takes these away.
        check: looks at an answer, beside its tokens, and says what is wrong; "" if nothing is.
        ranks: processes that torchrun starts; 1: without torchrun.
    """

    script: str
    flags: tuple[str, ...] = ()
    sampling: dict[str, Any] = field(default_factory=dict)
    prompts: tuple[str, ...] = PROMPTS
    stop_words: tuple[str, ...] = ()
    check: Callable[[Answer, Expected], str] = lambda answer, expected: ""
    ranks: int = 1

    @property
    def name(self) -> str:
        """As the report calls it."""
        ranks = (f"({self.ranks} ranks)",) if self.ranks > 1 else ()
        return " ".join((self.script.rsplit("/", 1)[-1], *self.flags, *ranks))


def _log_probs(answer: Answer, expected: Expected) -> str:
    found, wanted = answer["generated_logprobs"], expected.log_probs or []
    if len(found) != len(wanted):
        return f"{len(found)} log probs of generated tokens for {len(wanted)}"
    worst = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
    return "" if worst < 1e-3 else f"a log prob differs by {worst:.2g}"


def _prompt_log_probs(answer: Answer, expected: Expected) -> str:
    # The first token of a prompt follows nothing.
    wanted = expected.prompt_length - 1
    if len(answer["prompt_logprobs"]) != wanted:
        return f"{len(answer['prompt_logprobs'])} log probs of the prompt, not {wanted}"
    return _log_probs(answer, expected)


def _no_prompt_log_probs(answer: Answer, expected: Expected) -> str:
    if answer["prompt_logprobs"]:
        return "log probs of the prompt that were to be skipped"
    return _log_probs(answer, expected)


def _top_three(answer: Answer, expected: Expected) -> str:
    for token, top in zip(answer["generated_tokens"], answer["top_n_logprobs"], strict=True):
        if len(top) != 3:
            return f"{len(top)} of top_n_logprobs=3 for token {token}"
        if list(top.values()) != sorted(top.values(), reverse=True):
            return f"top_n_logprobs of token {token} are not in order"
    return _log_probs(answer, expected)


def _events(answer: Answer, _: Expected) -> str:
    if not answer["events"]:
        return "no events"
    return ""


SAMPLED = ("--temperature", "0.9", "--top_k", "20")
NUCLEUS = ("--temperature", "0.9", "--top_k", "0", "--top_p", "0.8")
STOP_WORDS = (" mystery", " was a", "8")
WITH_LOG_PROBS = {"return_log_probs": True}
ASYNC = (
    # One request a step: where all are prefilled in the first step, whose result comes with the
    # second, the script counts no prefill step, and divides by that count (read, not run, with
    # Megatron's own engine, which reports that first step in the same way).
    "--incoming-requests-per-step",
    "1",
    "--inference-dynamic-batching-async-sched-mode",
    "async",
)
DRAIN = ("--drain-between-batches", "--batch-boundaries", "0,2")

EXAMPLES = (
    Example(DYNAMIC),
    Example(DYNAMIC, ("--return-log-probs",), WITH_LOG_PROBS, check=_prompt_log_probs),
    Example(
        DYNAMIC,
        ("--return-log-probs", "--skip-prompt-log-probs"),
        WITH_LOG_PROBS,
        check=_no_prompt_log_probs,
    ),
    Example(
        DYNAMIC,
        ("--return-log-probs", "--skip-prompt-log-probs", "--top-n-logprobs", "3"),
        WITH_LOG_PROBS,
        check=_top_three,
    ),
    Example(DYNAMIC, ("--enable-chunked-prefill", "--inference-dynamic-batching-max-tokens", "16")),
    Example(DYNAMIC, SAMPLED, {"temperature": 0.9, "top_k": 20}),
    Example(DYNAMIC, NUCLEUS, {"temperature": 0.9, "top_p": 0.8}),
    Example(DYNAMIC, ("--stop-words", *STOP_WORDS), stop_words=STOP_WORDS),
    Example(DYNAMIC, ("--inference-repeat-n", "2")),
    Example(DYNAMIC, ("--output-request-events",), check=_events),
    Example(DYNAMIC, ("--suspend-resume-interval", "4")),
    Example(DYNAMIC, ("--incoming-requests-per-step", "1")),
    Example(DYNAMIC, DRAIN),
    Example(DYNAMIC, ASYNC),
    Example(OFFLINE),
    Example(OFFLINE, ("--async-mode",)),
    Example(OFFLINE, ("--inference-repeat-n", "2", "--output-request-events"), check=_events),
    Example(OFFLINE, ("--return-log-probs",), WITH_LOG_PROBS, check=_prompt_log_probs),
    # SmolLM2 has three groups of heads.
    Example(DYNAMIC, ("--tensor-model-parallel-size", "3"), ranks=3),
    Example(DYNAMIC, ("--pipeline-model-parallel-size", "2"), ranks=2),
    Example(COORDINATED),
    Example(COORDINATED, ("--suspend-resume-interval", "1")),
    Example(COORDINATED, ("--incoming-requests-per-step", "1")),
    # Two engines, each with the whole model.
    Example(COORDINATED, ("--suspend-resume-interval", "1"), ranks=2),
    # Engines over ranks, and two of them.
    Example(
        COORDINATED,
        ("--tensor-model-parallel-size", "3", "--suspend-resume-interval", "1"),
        ranks=3,
    ),
    Example(
        COORDINATED,
        ("--pipeline-model-parallel-size", "2", "--suspend-resume-interval", "1"),
        ranks=2,
    ),
    Example(COORDINATED, ("--pipeline-model-parallel-size", "2"), ranks=4),
    Example(OFFLINE, ("--use-coordinator",)),
    Example(OFFLINE, ("--use-coordinator", "--async-mode")),
    Example(OFFLINE, ("--use-coordinator", "--pipeline-model-parallel-size", "2"), ranks=2),
)
"""Every run that is compared."""

NOT_RUN = {
    "examples/inference/advanced/gpt_static_inference.py": "static batching is Megatron's own "
    "engine, with and without the hook",
    "examples/inference/advanced/simple_t5_batch_inference.py": "encoder-decoder models: "
    "Megatron's own engine, with and without the hook",
}
"""Examples that are not run, each with its reason."""


def command(
    checkout: Path, example: Example, folder: Path, flags: list[str], cpu: bool, output: Path,
    hook: bool = True,
) -> list[str]:  # fmt: skip
    """The command line of a run on this engine (`hook`) or on Megatron's. `folder` is the training
    checkpoint, with a tokenizer; `cpu` uses the stand-ins for a machine without a GPU; `output` is
    the JSON that the script writes."""
    without_gpu = ["--no-rope-fusion", "--no-gradient-accumulation-fusion"] if cpu else []
    python = [sys.executable, "-W", "ignore"]
    if example.ranks > 1:
        python += ["-m", "torch.distributed.run", "--nproc-per-node", str(example.ranks)]
    return [
        *python, str(LAUNCH), str(checkout),
        *(["--cpu"] if cpu else []), *([] if hook else ["--no-hook"]),
        str(checkout / example.script),
        "--load", str(folder), "--ckpt-format", "torch_dist",
        "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder),
        "--micro-batch-size", "1", "--seq-length", "256", "--transformer-impl", "local",
        "--no-persist-layer-norm", "--distributed-backend", "gloo" if cpu else "nccl",
        *without_gpu, *flags,
        "--prompts", *example.prompts, "--num-tokens-to-generate", str(TOKENS),
        "--incoming-requests-per-sec", "-1",
        "--inference-dynamic-batching-buffer-size-gb", "1", "--output-path", str(output),
        *example.flags,
    ]  # fmt: skip


def run_example(
    checkout: Path, example: Example, folder: Path, flags: list[str], cpu: bool, timeout_s: float,
    hook: bool = True,
) -> tuple[list[Answer], str]:  # fmt: skip
    """Run an example to its end: the answers in the order of the prompts, none if the script
    failed; and the end of what it wrote."""
    with tempfile.TemporaryDirectory() as place:
        output = Path(place) / "answers.json"
        words = command(checkout, example, folder, flags, cpu, output, hook)
        status, said = run(words, environment(), Path(place), timeout_s)
        if status or not output.is_file():
            why = f"exit status {status}"
            if status == TIME_IS_UP:
                why = f"{TIMEOUT}{timeout_s:g} s were not enough"
            return [], "\n".join([why, *said.splitlines()[-25:]])
        written = json.loads(output.read_text())
    answers = [answer for answer in written.values() if isinstance(answer, dict)]
    return answers, ""


def differences(example: Example, answers: list[Answer], expected: list[Expected]) -> list[str]:
    """What is wrong with the answers of a run, in the order of the prompts; nothing if all is as
    expected."""
    if len(answers) != len(expected):
        return [f"{len(answers)} answers for {len(expected)} prompts"]
    wrong = []
    for answer, one in zip(answers, expected, strict=True):
        tokens = list(answer["generated_tokens"])
        if tokens != one.tokens:
            said = f"tokens {tokens}, not {one.tokens}"
        else:
            said = example.check(answer, one)
        if said:
            wrong.append(f"{answer['input_prompt']!r}: {said}")
    return wrong


def reference(model: str, device: str) -> list[list[Expected]]:
    """The answers of `LLM` to each of `EXAMPLES`, its requests numbered as the scripts number them;
    `model` is what the checkpoint was made of."""
    from megatron_async import LLM, SamplingParams

    every = []
    # 1234 is the default of Megatron's --seed.
    with LLM(model, device=device, dtype="float32", inference_sampling_seed=1234) as llm:
        tokenizer = llm.tokenizer
        assert tokenizer is not None
        for example in EXAMPLES:
            given = {"temperature": 0.0, "num_tokens_to_generate": TOKENS, **example.sampling}
            params = SamplingParams(**given)
            add = llm.engine.add_request
            answers = [add(number, prompt, params) for number, prompt in enumerate(example.prompts)]
            while llm.engine.has_unfinished_requests():
                llm.engine.step_modern()
            words = [
                tokenizer.tokenize(word, add_special_tokens=False) for word in example.stop_words
            ]
            every.append([_expected(answer.result(), words) for answer in answers])
    return every


def _expected(request: Any, stop_words: list[list[int]]) -> Expected:
    tokens = list(request.generated_tokens)
    for end in range(1, len(tokens) + 1):
        hit = [word for word in stop_words if tokens[:end][-len(word) :] == word]
        if hit:
            tokens = tokens[: end - len(hit[0])]
            break
    text = request.generated_text
    return Expected(tokens, text, request.generated_log_probs, len(request.prompt_tokens))


SERVERS = (
    "examples/inference/launch_inference_server.py",
    "tools/run_dynamic_text_generation_server.py",
)
END_S = 120.0
"""A crowded host takes its time."""


def run_server(
    checkout: Path, script: str, folder: Path, flags: list[str], cpu: bool, timeout_s: float,
    expected: list[str],
) -> list[str]:  # fmt: skip
    """Start a server script, complete each of `PROMPTS` by HTTP, and end it by SIGINT; what is
    wrong. `timeout_s` is the time until it answers, `expected` texts of `LLM` after the prompts,
    greedy; the rest is that of `command`."""
    port = free_port()
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "log"
        example = Example(script, ("--host", "127.0.0.1", "--port", str(port)), prompts=())
        words = command(checkout, example, folder, flags, cpu, Path(place) / "unused")
        words.remove("--prompts")
        with log.open("wb") as output:
            server = subprocess.Popen(
                words, env=environment(), cwd=place, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            wrong = []
            for prompt, text in zip(PROMPTS, expected, strict=True):
                found = _ask(server, port, prompt, timeout_s)
                if found != text:
                    wrong.append(f"{prompt!r}: {found!r}, not {text!r}")
        except (OSError, TimeoutError) as error:
            late = TIMEOUT if isinstance(error, TimeoutError) else ""
            wrong = [f"{late}{error}\n" + "\n".join(log.read_text().splitlines()[-25:])]
        finally:
            server.send_signal(2)
            try:
                server.wait(END_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
                wrong = [*wrong, f"{TIMEOUT}it does not end within {END_S:g} s of SIGINT"]
    return wrong


def _ask(server: subprocess.Popen[bytes], port: int, prompt: str, timeout_s: float) -> str:
    """The text after a prompt, once the server is there."""
    fields = {"model": "megatron", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(fields).encode(),
        {"Content-Type": "application/json"},
    )
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                return str(json.load(reply)["choices"][0]["text"])
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise OSError(f"status {error.code}: {error.read()!r}") from error
        except urllib.error.URLError:
            pass
        if server.poll() is not None:
            raise OSError(f"the server ended with status {server.returncode}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"no answer within {timeout_s:g} s")
        time.sleep(0.2)

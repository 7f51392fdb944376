"""Servers that `compare_engines.py` starts: this project's, vLLM's and SGLang's, alike as far as
their options go."""

import http.client
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark_tokenizer import benchmark_tokenizer
from tqdm import tqdm

from megatron_async.checkpoints.convert import convert
from megatron_async.checkpoints.huggingface_config import write_config
from megatron_async.checkpoints.registry import open_model
from megatron_async.json_objects import write_object

DUMMY = "dummy:"
START_S = 1200.0
"""A server may take so long until it answers: others compile kernels first."""
END_S = 30.0
LATE_LAUNCH = {None: [], False: ["--no-late-launch"], True: ["--late-launch"]}


@dataclass(frozen=True)
class EngineSettings:
    """What all engines are told.

    Attributes:
        model: for this engine.
        folder: the same for others, a Hugging Face folder.
        name: it is served by.
        dtype: of weights and activations; None: the engine's choice.
        device: for this engine.
        max_requests: rows of a step.
        max_tokens: of a step, for this engine; others have their own default.
        longest: tokens of a sequence.
        block_size: tokens of a KV block, for this engine.
        target_tpot_ms: between two tokens of a request, for this engine; None: no target.
        mixed_step_tokens: of this engine; None: its default.
        late_launch: of this engine; None: its default.
    """

    model: str
    folder: Path
    name: str
    dtype: str | None
    device: str | None
    max_requests: int
    max_tokens: int
    longest: int
    block_size: int
    target_tpot_ms: float | None = None
    mixed_step_tokens: int | None = None
    late_launch: bool | None = None

    @property
    def _load_format(self) -> str:
        return "dummy" if self.model.startswith(DUMMY) else "auto"

    def vllm_arguments(self) -> dict[str, Any]:
        """Keywords of vLLM's AsyncEngineArgs."""
        return {
            "model": str(self.folder),
            "load_format": self._load_format,
            "dtype": self.dtype or "auto",
            "max_num_seqs": self.max_requests,
            "max_model_len": self.longest,
            "enable_prefix_caching": False,
        }

    def ours(self, port: int) -> list[str]:
        """Arguments of `megatron-async serve`."""
        blocks = self.max_requests * -(-self.longest // self.block_size)
        target, mixed = self.target_tpot_ms, self.mixed_step_tokens
        return [
            "serve", self.model, "--port", str(port), "--served-model-name", self.name,
            "--max-requests", str(self.max_requests), "--max-step-tokens", str(self.max_tokens),
            "--max-sequence-length", str(self.longest), "--num-kv-blocks", str(blocks),
            "--block-size-tokens", str(self.block_size), "--no-enable-prefix-caching",
            "--no-progress",
            *(["--dtype", self.dtype] if self.dtype else []),
            *(["--device", self.device] if self.device else []),
            *(["--target-tpot-ms", str(target)] if target is not None else []),
            *(["--mixed-step-tokens", str(mixed)] if mixed is not None else []),
            *LATE_LAUNCH[self.late_launch],
        ]  # fmt: skip

    def vllm(self, port: int) -> list[str]:
        """Arguments of vLLM's server."""
        return [
            "--model", str(self.folder), "--load-format", self._load_format, "--port", str(port),
            "--served-model-name", self.name, "--dtype", self.dtype or "auto",
            "--max-num-seqs", str(self.max_requests), "--max-model-len", str(self.longest),
            "--no-enable-prefix-caching",
        ]  # fmt: skip

    def sglang(self, port: int) -> list[str]:
        """Arguments of SGLang's server."""
        return [
            "--model-path", str(self.folder), "--load-format", self._load_format,
            "--port", str(port), "--served-model-name", self.name, "--dtype", self.dtype or "auto",
            "--max-running-requests", str(self.max_requests), "--disable-radix-cache",
            "--context-length", str(self.longest),
        ]  # fmt: skip


COMMANDS = {
    "ours-http": ("megatron_async", EngineSettings.ours),
    "vllm-http": ("vllm.entrypoints.openai.api_server", EngineSettings.vllm),
    "sglang-http": ("sglang.launch_server", EngineSettings.sglang),
}
"""By engine: a module that Python runs, and what it is told."""


def model_folder(
    model: str, folder: Path, write: bool, tokenizer: str | None = None
) -> tuple[Path, int]:
    """A model as a Hugging Face folder (written to `folder`, if it is no such folder yet and
    `write`), and the size of the vocabulary. Of a dummy model there is no more than `config.json`,
    and a tokenizer, because servers want one.

    Raises:
        ConfigurationError: the demo model, whose tokenizer is wanted, is not installed.
    """
    source = open_model(model)
    vocabulary = source.architecture.vocab_size
    if not write:
        return folder, vocabulary
    if (Path(model) / "config.json").is_file():
        return Path(model), vocabulary
    if not model.startswith(DUMMY):
        convert(source, folder / "model", to="huggingface")
        return folder / "model", vocabulary
    write_object(folder / "config.json", write_config(source.architecture, "bfloat16"))
    benchmark_tokenizer(tokenizer).save(folder)
    return folder, vocabulary


@contextmanager
def serving(engine: str, python: str, settings: EngineSettings) -> Iterator[str]:
    """A server of `COMMANDS` while it runs in the environment of `python`: its URL, up to and with
    `/v1`.

    Raises:
        SystemExit: it ended before it was ready, or took too long; its own words stand above.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    module, arguments = COMMANDS[engine]
    process = subprocess.Popen(
        [python, "-m", module, *arguments(settings, port)], stdout=sys.stderr
    )
    try:
        _wait_until_ready(engine, process, port)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(engine: str, process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_S
    with tqdm(desc=f"start {engine}", unit="s", leave=False, disable=None) as bar:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise SystemExit(f"{engine} ended with status {process.returncode}: see above.")
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except (OSError, http.client.HTTPException):
                pass
            finally:
                connection.close()
            time.sleep(1)
            bar.update()
    raise SystemExit(f"{engine} was not ready within {START_S:g} s.")

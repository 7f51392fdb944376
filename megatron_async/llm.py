"""`LLM`: a model, its context, controller and engine in one object."""

from __future__ import annotations

import asyncio
import difflib
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from megatron_async.checkpoints import open_model
from megatron_async.checkpoints.dtypes import parse_dtype
from megatron_async.checkpoints.registry import shipped_draft_layer
from megatron_async.cli.output import progress_line
from megatron_async.communication.bootstrap import join_job
from megatron_async.communication.job import FINISH_TIMEOUT_S
from megatron_async.config import InferenceConfig
from megatron_async.contexts.dynamic_context import DynamicInferenceContext
from megatron_async.devices import make_device, makes_ordinary_tensors, resolve_device_name
from megatron_async.engines.dynamic_engine import DynamicInferenceEngine, Prompt
from megatron_async.errors import ConfigurationError
from megatron_async.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron_async.models.architecture import ModelArchitecture
from megatron_async.models.hybrid import build_model
from megatron_async.models.parallel_state import ParallelSizes
from megatron_async.observe.timeline import Timeline
from megatron_async.ranks.join_group import join_group
from megatron_async.requests.inference_request import DynamicInferenceRequest
from megatron_async.requests.sampling_params import SamplingParams
from megatron_async.simulation.recorder import Recorder
from megatron_async.text_generation_controllers.text_generation_controller import (
    TextGenerationController,
)

LOADING_TIMEOUT_S = 3600.0
"""So much longer than others a rank may load its weights (a cold disk)."""
PROGRESS_EVERY_S = 0.1
"""A progress line is written so often; in between, a step costs nothing for it."""
OTHER_ENGINES_NAMES = {
    "max_model_len": "max_sequence_length",
    "max_num_seqs": "max_requests",
    "max_num_batched_tokens": "max_tokens",
    "block_size": "block_size_tokens",
    "tensor_parallel_size": "tensor_model_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    "gpu_memory_utilization": "buffer_size_gb",
    "kv_cache_memory_bytes": "buffer_size_gb",
    "num_gpu_blocks_override": "num_kv_blocks",
    "n_ctx": "max_sequence_length",
}
"""Settings by the names that vLLM and llama.cpp give them: what is meant is another word here."""


class LLM:
    """Load a model and generate.

    Args:
        model: "smollm2", a GGUF file, a Hugging Face folder, a Megatron torch_dist folder, or
            "dummy:SHAPE" (random weights).
        device: "cpu", "cuda" or "cuda:N"; None takes the GPU if there is one.
        dtype: of weights, activations and KV cache ("float32", "bfloat16", "float16" or the torch
            dtype); None: float32 on the CPU, bfloat16 on a GPU.
        tensor_model_parallel_size, pipeline_model_parallel_size, expert_model_parallel_size,
            sequence_parallel: over how many ranks the model is split, by Megatron's names; see
            `ParallelSizes`. Start the ranks with torchrun; each runs the same script.
        transformer_impl: what the model's layers are made of, in Megatron's words: "local" (torch
            and our kernels) or "transformer_engine" (a GPU and the package transformer-engine).
        progress: show bars while weights load and graphs are captured.
        timeline: record the step timeline; see `timeline`.
        record: file to write every arrival, plan and sample to, for `megatron-async replay` and
            `simulate`; it is complete when the LLM is closed. See `replica_file`.
        draft_layer: file of a layer for multi-token prediction that was trained for the model
            (scripts/train_draft_layer.py); `speculative_method="mtp"` drafts with it. None: the
            model's own, or for "smollm2" the one that comes with this package.
        **inference_config: any field of `InferenceConfig`.

    Attributes:
        engine: the `DynamicInferenceEngine`.
        tokenizer: the model's tokenizer, or None.
        timeline: the recorded `Timeline`, or None.

    Raises:
        ConfigurationError: an unknown setting, or one that this machine or model cannot honour.
    """

    @makes_ordinary_tensors
    def __init__(
        self,
        model: str,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        expert_model_parallel_size: int = 1,
        sequence_parallel: bool = False,
        transformer_impl: str = "local",
        progress: bool = False,
        timeline: bool = False,
        record: str | Path | None = None,
        draft_layer: str | Path | None = None,
        **inference_config: Any,
    ) -> None:
        if draft_layer is None and inference_config.get("speculative_method") == "mtp":
            draft_layer = shipped_draft_layer(model)
        source = open_model(model, draft_layer)
        sizes = ParallelSizes(
            tensor_model_parallel_size,
            pipeline_model_parallel_size,
            expert_model_parallel_size,
            sequence_parallel,
        )
        device = resolve_device_name(device)
        self.dtype = _resolve_dtype(dtype, device)
        asked = [inference_config.get(name) for name in ("lookahead", "async_sched_mode")]
        if pipeline_model_parallel_size > 1 and asked == [None, None]:
            # A step for each stage, and one that the host prepares.
            inference_config["lookahead"] = pipeline_model_parallel_size
        config = _make_config(inference_config, device, source.architecture)
        # Before anything is done together: ranks that differ would wait for each other in it.
        job = join_job()
        job.check_same("model", source.architecture.to_dict() | {"dtype": self.dtype})
        job.check_same("parallel sizes", asdict(sizes))
        job.check_same("InferenceConfig", asdict(config) | {"device": torch.device(device).type})
        self._device = make_device(device)
        weights = build_model(
            source.architecture,
            self.dtype,
            self._device.torch_device,
            transformer_impl,
            sizes,
            with_mtp=config.speculative_method == "mtp",
        )
        source.load_weights(weights, progress=progress)
        job.exchange("the end of loading", "", timeout_s=LOADING_TIMEOUT_S)
        self.tokenizer = source.tokenizer
        self.timeline = Timeline() if timeline else None
        context = DynamicInferenceContext(weights.config, config, self._device, self.timeline)
        wrapper = GPTInferenceWrapper(weights, context)
        controller = TextGenerationController(wrapper, self.tokenizer)
        reports = [
            context.gpu_view.attention_report,
            wrapper.collectives.report,
            wrapper.exchange.report,
            controller.create_cuda_graphs(progress),
        ]
        for report in reports:
            if progress and report is not None:
                tqdm.write(str(report), file=sys.stderr)
        self.engine = DynamicInferenceEngine(controller, context)
        self.engine.group, self._place = join_group(config.check_ranks_agree)
        self._recorder = None
        if record is not None and self.is_primary_rank:
            self._recorder = Recorder(self.engine, self.replica_file(record))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
        on_end: Callable[[DynamicInferenceRequest], None] | None = None,
    ) -> list[DynamicInferenceRequest]:
        """Generate for one prompt or many, all at once.

        On several ranks each of them calls it. Prompts are taken from the primary rank of each
        data-parallel replica, and differ from replica to replica if they are to be divided.

        Args:
            prompts: a text, a list of token ids, or a list of those.
            sampling_params: for all prompts, or one for each.
            progress: show a bar over the prompts, with tokens a second, rows and overlap.
            on_end: called with each request as soon as it has ended, or failed.

        Returns:
            one request for each prompt, in order; see `DynamicInferenceRequest`. One that could not
            be served has status FAILED and its `error`; the others are not affected. Nothing on
            ranks that are not primary.

        Raises:
            JobFailed: another rank died, or did something else than this one.
        """
        if not self.is_primary_rank:
            self.engine.follow()
            return []
        try:
            return self._generate(prompts, sampling_params, progress, on_end)
        finally:
            self.engine.group.release()

    @property
    def is_primary_rank(self) -> bool:
        """Whether this process speaks for its data-parallel replica: requests are given to it, and
        results are found there. The others do what it does, in `generate` or `follow`."""
        return self._place.is_primary

    @property
    def data_parallel_rank(self) -> int:
        """Number of this process's replica."""
        return self._place.data_parallel_rank

    @property
    def data_parallel_size(self) -> int:
        """Replicas in the job."""
        return self._place.data_parallel_size

    @property
    def shares_experts(self) -> bool:
        """Whether the model's experts are spread over replicas, which then step together."""
        return self.engine.context.model_config.expert_model_parallel_size > 1

    def replica_file(self, path: str | Path) -> Path:
        """Where this replica writes what would be `path` if there were one replica: with several,
        its number is added, run-0.rec for run.rec."""
        path = Path(path)
        if self.data_parallel_size == 1:
            return path
        return path.with_name(f"{path.stem}-{self.data_parallel_rank}{path.suffix}")

    def follow(self) -> None:
        """On a rank that is not primary: serve the primary rank until it closes its LLM.

        For programs whose primary rank uses `engine` itself (event loops, servers).
        """
        while self.engine.follow():
            pass

    async def finish_together(self, timeout_s: float | None = FINISH_TIMEOUT_S) -> None:
        """On a primary rank whose `engine` runs as a task: wait, before that is cancelled, until
        the primary ranks of all replicas are here. Until then they need this one's experts, if
        the model's are spread over replicas.

        Args:
            timeout_s: None waits for ever.

        Raises:
            RankLost, CommunicationTimeout: one of them has died, or did not come in time.
        """
        exchange, ranks = join_job().exchange, self._place.primary_ranks
        await asyncio.to_thread(exchange, "the end of serving", "", ranks, timeout_s)
        while self.engine.has_unfinished_requests():
            await asyncio.sleep(1e-3)

    def _generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool,
        on_end: Callable[[DynamicInferenceRequest], None] | None,
    ) -> list[DynamicInferenceRequest]:
        batch = [prompts] if _is_one_prompt(prompts) else list(prompts)
        with tqdm(total=len(batch), unit="prompt", disable=not progress, desc="generate") as bar:
            statistics = self.engine.statistics
            before, shown = statistics.generated_tokens, -PROGRESS_EVERY_S

            def show(report: dict[str, Any]) -> None:
                nonlocal shown
                ended = len(report["finished_request_records"])
                elapsed = bar.format_dict["elapsed"]
                if elapsed - shown >= PROGRESS_EVERY_S or bar.n + ended == len(batch):
                    shown = elapsed
                    rows, tokens = len(report["active_request_ids"]), statistics.generated_tokens
                    line = progress_line(self.engine.stats(), rows, tokens - before, elapsed)
                    bar.set_postfix_str(line)
                bar.update(ended)

            def on_step(report: dict[str, Any]) -> None:
                if on_end is not None:
                    for request in report["finished_request_records"]:
                        on_end(request)
                if progress:
                    show(report)

            is_told = progress or on_end is not None
            return self.engine.generate(batch, sampling_params, on_step if is_told else None)

    def close(self) -> None:
        """Free the device's threads, and finish the recording; the object is not used again."""
        try:
            if self._recorder is not None:
                self._recorder.close()
        finally:
            self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_one_prompt(prompts: Any) -> bool:
    if isinstance(prompts, str):
        return True
    first = prompts[0] if len(prompts) else ""
    return not isinstance(first, str) and not hasattr(first, "__len__")


def _resolve_dtype(dtype: str | torch.dtype | None, device: str) -> torch.dtype:
    if dtype is None:
        return torch.float32 if device == "cpu" else torch.bfloat16
    return parse_dtype(dtype)


def _make_config(
    values: dict[str, Any], device: str, architecture: ModelArchitecture
) -> InferenceConfig:
    known = [field.name for field in fields(InferenceConfig)]
    of_llm = list(LLM.__init__.__kwdefaults__ or ())
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, [*known, *of_llm], n=1)
            meant = OTHER_ENGINES_NAMES.get(name, near[0] if near else None)
            hint = "" if meant is None else f" Did you mean {meant!r}?"
            raise ConfigurationError(
                f"{name!r} is not a setting of LLM or InferenceConfig.{hint} "
                f"The settings are: {', '.join([*of_llm, *(n for n in known if n not in of_llm)])}."
            )
    longest = architecture.max_position_embeddings
    if architecture.sliding_window is not None:
        longest = min(longest, architecture.sliding_window)
    asked = values.get("max_sequence_length")
    if asked is None:
        values = {
            **values,
            "max_sequence_length": min(InferenceConfig.max_sequence_length, longest),
        }
    elif isinstance(asked, int) and asked > longest:
        raise ConfigurationError(
            f"max_sequence_length={asked}, but this model serves at most {longest} tokens (its "
            "trained positions or attention window): lower max_sequence_length."
        )
    return InferenceConfig(**{**values, "device": device})

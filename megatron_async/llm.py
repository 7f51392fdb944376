"""`LLM`: a model, its context, controller and engine in one object."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, fields
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_async.checkpoints import open_model
from megatron_async.checkpoints.info import check_weights_fit
from megatron_async.checkpoints.kept_blocks import keep_blocks, settle_quantization
from megatron_async.checkpoints.kernel_program import program_of
from megatron_async.checkpoints.mapping import Shard
from megatron_async.checkpoints.quantised_model import FILE, Kept
from megatron_async.checkpoints.registry import shipped_draft_layer
from megatron_async.checkpoints.source import ModelSource, cache_dtype, parse_dtype
from megatron_async.communication.bootstrap import join_job
from megatron_async.communication.job import FINISH_TIMEOUT_S
from megatron_async.config import MOST_LOOKAHEAD, InferenceConfig
from megatron_async.device_state.cache_layout import default_block_size
from megatron_async.device_state.pools import move_weights
from megatron_async.devices import make_device, makes_ordinary_tensors, resolve_device_name
from megatron_async.engine.dynamic_engine import DynamicInferenceEngine, Prompt
from megatron_async.engine.updating import UpdateDone
from megatron_async.engine.weight_books import Policy
from megatron_async.engine.weight_update import WeightUpdate
from megatron_async.errors import ConfigurationError
from megatron_async.interrupts import HeldInterrupts
from megatron_async.models.hybrid import build_model
from megatron_async.models.parallel_state import ParallelSizes
from megatron_async.models.partition import part_of_rank
from megatron_async.observe.generation_bar import GenerationBar
from megatron_async.observe.start_phases import StartPhases
from megatron_async.observe.timeline import Timeline
from megatron_async.ops.compile_kernels import KernelStart, cores, describe_gpu, start_kernels
from megatron_async.ops.cpu.compile_loops import compile_missing
from megatron_async.ops.triton_folder import choose_triton_folder
from megatron_async.other_names import answers_keywords, check_engine_names
from megatron_async.planning.default_length import default_max_sequence_length
from megatron_async.planning.dynamic_context import DynamicInferenceContext
from megatron_async.ranks.finishing import finish_together
from megatron_async.ranks.join_group import join_group
from megatron_async.requests.defaults import default_sampling_params, generation_defaults
from megatron_async.requests.generation_keys import tell_passed_over
from megatron_async.requests.inference_request import DynamicInferenceRequest
from megatron_async.requests.sampling_params import SamplingParams, scoring_params
from megatron_async.requests.weight_versions import Version
from megatron_async.step.gpt_inference_wrapper import GPTInferenceWrapper
from megatron_async.step.text_generation_controller import (
    TextGenerationController,
)
from megatron_async.text.tokenizer import (
    RAW_CHAT,
    Conversation,
    conversation_tokens,
    conversations,
    is_raw_chat,
)

logger = logging.getLogger(__name__)

RECORDER = "megatron_async.lab.recorder"
"""Module of `Recorder`: by name, as its room stands beside the engine and no other imports it."""
SAID_OF_MODE = "batch_invariant_mode: a token's bits depend on its own sequence alone"
LOADING_TIMEOUT_S = 3600.0
"""Seconds by which ranks may differ in the time to load their weights (a cold disk)."""


class LLM:
    """Load a model and generate.

    Args:
        model: "smollm2", a GGUF file, a Hugging Face folder or a model's id on the Hugging Face Hub
            ("Qwen/Qwen3-0.6B"), a Megatron torch_dist folder, or "dummy:SHAPE" (random weights).
        device: "cpu", "cuda" or "cuda:N"; None takes the GPU if there is one.
        dtype: of weights and activations, and of the KV cache unless `kv_cache_dtype` says
            otherwise ("float32", "bfloat16", "float16" or the torch dtype); None: float32 on the
            CPU, bfloat16 on a GPU.
        tensor_model_parallel_size, pipeline_model_parallel_size, expert_model_parallel_size,
            sequence_parallel: over how many ranks the model is split, by Megatron's names; see
            `ParallelSizes`. Start the ranks with torchrun; each runs the same script.
        transformer_impl: implementation of the model's layers, by Megatron's names: "local" (torch
            and our kernels) or "transformer_engine" (a GPU and the package transformer-engine).
        progress: show bars while weights load and graphs are captured.
        timeline: record the step timeline; see `timeline`.
        record: file to write every arrival, plan and sample to, for `megatron-async replay` and
            `simulate`; it is complete when the LLM is closed. See `replica_file`.
        draft_layer: file of a layer for multi-token prediction that was trained for the model
            (scripts/train_draft_layer.py); `speculative_method="mtp"` drafts with it. None: the
            model's own, or for "smollm2" the one that comes with this package.
        **inference_config: any field of `InferenceConfig`. `max_sequence_length` is the model's own
            context by default, as far as the KV pool holds it; on a GPU at most 8,192.

    Attributes:
        engine: the `DynamicInferenceEngine`.
        tokenizer: the model's tokenizer, or None.
        timeline: the recorded `Timeline`, or None.
        generation_defaults: what the model says of its sampling.
        start_phases: how long each phase of the start took.

    Raises:
        ConfigurationError: an unknown setting, or a value that this machine or model does not
            support.
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
        for name, value in ("progress", progress), ("timeline", timeline):
            if value not in (True, False):
                raise ConfigurationError(f"{name}={value!r} must be True or False.")
        if draft_layer is None and inference_config.get("speculative_method") == "mtp":
            draft_layer = shipped_draft_layer(model)
        self.start_phases = phases = StartPhases()
        source = open_model(model, draft_layer)
        sizes = ParallelSizes(
            tensor_model_parallel_size,
            pipeline_model_parallel_size,
            expert_model_parallel_size,
            sequence_parallel,
        )
        self.tokenizer = source.tokenizer
        told = source if self.tokenizer is None else self.tokenizer
        self.generation_defaults = generation_defaults(told)
        tell_passed_over(getattr(told, "generation_config", {}), source.name)
        device = resolve_device_name(device)
        self.dtype = _resolve_dtype(dtype, device)
        asked = [inference_config.get(name) for name in ("lookahead", "async_sched_mode")]
        if pipeline_model_parallel_size > 1 and asked == [None, None]:
            # A step for each stage, and one that the host prepares.
            inference_config["lookahead"] = min(pipeline_model_parallel_size, MOST_LOOKAHEAD)
        kept_bytes = None
        kept = Kept.on(
            device, inference_config, source, transformer_impl,
            dtype=self.dtype, tensor_size=tensor_model_parallel_size,
        )  # fmt: skip
        if kept.quantization is None:
            kept_bytes = settle_quantization(inference_config, source, device, self.dtype, sizes)
        config = _make_config(inference_config, device, source, self.dtype)
        # Before anything is done together: ranks that differ would wait for each other in it.
        job = join_job()
        job.check_same("model", source.architecture.to_dict() | {"dtype": self.dtype})
        job.check_same("parallel sizes", asdict(sizes))
        job.check_same("InferenceConfig", asdict(config) | {"device": torch.device(device).type})
        self._device = make_device(device)
        has_blocks, free = kept_bytes is not None, self._device.free_memory()
        if kept.quantization is not None:
            kept_bytes = kept.num_bytes(self.dtype)
        is_quantised = source.quantised is not None
        check_weights_fit(source.architecture, self.dtype, sizes, free, kept_bytes, is_quantised)
        kernels: KernelStart | None = None
        if self._device.torch_device.type == "cpu":
            compile_missing(progress)
        else:
            choose_triton_folder()
            part = part_of_rank(source.architecture, sizes, transformer_impl)
            shard = Shard(tensor_size=tensor_model_parallel_size)
            program = program_of(part, self.dtype, config, kept, shard, transformer_impl)
            kernels = start_kernels(program | describe_gpu(self._device.torch_device))
        with kernels or nullcontext():
            with phases.phase("build the model"):
                weights = build_model(
                    source.architecture,
                    self.dtype,
                    self._device.torch_device,
                    transformer_impl,
                    sizes,
                    with_mtp=config.speculative_method == "mtp",
                    layouts=kept.of_model,
                )
                moved = config.enable_sleep_mode and move_weights(weights, self._device)
            with phases.phase("read weights"):
                if has_blocks:
                    keep_blocks(source, weights, is_fine=config.quantization == FILE)
                source.load_weights(weights, progress, config.has_fp8_cache)
            with phases.phase("wait for kernels"):
                if kernels is not None:
                    kernels.join(progress)
                job.exchange("the end of loading", "", timeout_s=LOADING_TIMEOUT_S)
        self.timeline = Timeline() if timeline else None
        with phases.phase("make the cache"):
            context = DynamicInferenceContext(
                weights.config, config, self._device, self.timeline, progress
            )
            if moved:
                context.memories["weights"] = moved
            wrapper = GPTInferenceWrapper(weights, context)
            controller = TextGenerationController(wrapper, self.tokenizer)
        with phases.phase("capture steps"):
            captured = controller.create_cuda_graphs(progress)
        reports = [
            context.gpu_view.attention_report,
            wrapper.collectives.report,
            wrapper.exchange.report,
            SAID_OF_MODE if config.batch_invariant_mode else None,
            captured,
            None if captured is None else phases,
        ]
        for report in reports:
            if progress and report is not None:
                tqdm.write(str(report), file=sys.stderr)
        if kernels is not None:
            kernels.keep()
        group, self._place = join_group(config.check_ranks_agree)
        self.engine = DynamicInferenceEngine(controller, context, group)
        self._recorder = None
        self._said_raw = False
        if record is not None and self.is_primary_rank:
            recorder = import_module(RECORDER)
            self._recorder = recorder.Recorder(self.engine, self.replica_file(record))

    @answers_keywords
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
            sampling_params: for all prompts, or one for each. None: `default_sampling_params()`,
                by the rule of the command line and of the server.
            progress: show tokens, tokens a second, prompts that have ended, rows and overlap on
                stderr, if that is a terminal.
            on_end: called with each request as soon as it has ended, or failed.

        Returns:
            one request for each prompt, in order; see `DynamicInferenceRequest`. A request that
            could not be served has status FAILED and an `error`; the others are not affected. An
            empty list on ranks that are not primary.

        Raises:
            JobFailed: another rank died, or its actions differ from this rank's.
        """
        if not self.is_primary_rank:
            self.engine.follow()
            return []
        if sampling_params is None:
            sampling_params = self.default_sampling_params()
        try:
            return self._generate(prompts, sampling_params, progress, on_end)
        finally:
            with HeldInterrupts():  # other ranks wait for it
                self.engine.group.release()

    def score(
        self,
        sequences: Prompt | Sequence[Prompt],
        start: int | Sequence[int] = 0,
        sampling_params: SamplingParams | None = None,
    ) -> list[DynamicInferenceRequest]:
        """Log probs of given tokens, of one sequence or many (`DynamicInferenceEngine.score`). On
        several ranks each of them calls it, as `generate`.

        Raises:
            RequestError: the number of starts differs from the number of sequences.
            JobFailed: as in `generate`.
        """
        batch = [sequences] if _is_one_prompt(sequences) else list(sequences)
        return self.generate(batch, scoring_params(len(batch), start, sampling_params))

    @answers_keywords
    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool = False,
        on_end: Callable[[DynamicInferenceRequest], None] | None = None,
    ) -> list[DynamicInferenceRequest]:
        """Answer one conversation or many, all at once, by the model's chat template.

        The arguments have the names of vLLM's `LLM.chat`.

        Args:
            messages: a conversation, that is a list of messages with "role" and "content", such as
                `[{"role": "user", "content": "Why is the sky blue?"}]`; or a list of conversations.
            sampling_params: as `generate` takes them.
            tools: functions that the model may call, as OpenAI writes them, if the template
                mentions tools.
            add_generation_prompt: end with the beginning of the assistant's answer.
            chat_template_kwargs: further variables of the template, such as `enable_thinking`.
            progress, on_end: as in `generate`.

        Returns:
            one request for each conversation; its `generated_text` is the answer.

        Raises:
            TokenizerError: the model has no tokenizer or no chat template, or the template rejects
                a conversation.
            JobFailed: as in `generate`.
        """
        prompts = [
            conversation_tokens(
                self.tokenizer, each, tools, add_generation_prompt, chat_template_kwargs or {}
            )
            for each in conversations(messages)
        ]
        return self.generate(prompts, sampling_params, progress, on_end)

    def default_sampling_params(self, **given: Any) -> SamplingParams:
        """Parameters of a request that names no others than these: the model's own (its
        generation_config.json), else the likeliest tokens, at most 256 (`requests/defaults.py`).

        Args:
            **given: fields of `SamplingParams`.
        """
        return default_sampling_params(self.generation_defaults, **given)

    def begin_weight_update(self, version: Version, **options: Any) -> WeightUpdate:
        """Begin a round of new weights (`DynamicInferenceEngine.begin_weight_update`); each rank
        makes the same calls."""
        return self.engine.begin_weight_update(version, **options)

    def update_weights(
        self, tensors: Iterable[tuple[str, Tensor]], version: Version, **options: Any
    ) -> UpdateDone:
        """Take new weights in one call (`DynamicInferenceEngine.update_weights`)."""
        return self.engine.update_weights(tensors, version, **options)

    def weights_open(
        self, version: Version, policy: Policy = "keep"
    ) -> AbstractContextManager[None]:
        """`with` it around a change of the very parameters that are served
        (`DynamicInferenceEngine.weights_open`)."""
        return self.engine.weights_open(version, policy)

    @property
    def is_primary_rank(self) -> bool:
        """Whether this process is the one of its data-parallel replica that gets requests and
        returns results. The other ranks repeat its actions, in `generate` or `follow`."""
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
    def needed_ranks(self) -> tuple[int, ...]:
        """Ranks of the job without which this one cannot step: those of its replica, and those that
        share its experts."""
        return self._place.needed_ranks

    @property
    def shares_experts(self) -> bool:
        """Whether the model's experts are spread over replicas, which then step together."""
        return self.engine.context.model_config.expert_model_parallel_size > 1

    def replica_file(self, path: str | Path) -> Path:
        """The file of this replica for `path`: with several replicas the replica's number is added,
        run-0.rec for run.rec."""
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
        """On a primary rank whose `engine` runs as a task: wait, before you cancel the task, until
        the primary ranks of all replicas have called this method. If replicas share experts, the
        others need this rank's experts until then.

        Args:
            timeout_s: seconds; None waits for ever.

        Raises:
            RankLost, CommunicationTimeout: a primary rank has died, or has not called in time.
        """
        await finish_together(self.engine.has_unfinished_requests, self._place, timeout_s)

    def _generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool,
        on_end: Callable[[DynamicInferenceRequest], None] | None,
    ) -> list[DynamicInferenceRequest]:
        batch = [prompts] if _is_one_prompt(prompts) else list(prompts)
        if not self._said_raw and is_raw_chat(self.tokenizer, batch):
            self._said_raw = True
            logger.warning(RAW_CHAT)
        with GenerationBar(self.engine, len(batch), shown=progress) as bar:

            def on_step(report: dict[str, Any]) -> None:
                if on_end is not None:
                    for request in report["finished_request_records"]:
                        on_end(request)
                bar.step(report)

            is_told = progress or on_end is not None
            return self.engine.generate(batch, sampling_params, on_step if is_told else None)

    def close(self) -> None:
        """Close the engine and finish the recording; the object must not be used again. Ctrl-C
        takes effect behind that, a second one at once."""
        with HeldInterrupts():
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


def compile_ahead(
    model: str,
    gpu: Mapping[str, Any],
    dtype: str | torch.dtype | None = None,
    draft_layer: str | Path | None = None,
    **inference_config: Any,
) -> KernelStart:
    """Begin to compile what `LLM` with these arguments would on a GPU, which need not be there.

    Args:
        model, dtype, draft_layer, inference_config: as `LLM` takes them.
        gpu: as `describe_gpu` describes it.

    Raises:
        ConfigurationError: as `LLM`; or nothing could be kept.
    """
    if draft_layer is None and inference_config.get("speculative_method") == "mtp":
        draft_layer = shipped_draft_layer(model)
    source, weights = open_model(model, draft_layer), _resolve_dtype(dtype, "cuda")
    kept = Kept.on("cuda", inference_config, source, capability=gpu["capability"], dtype=weights)
    config = _make_config(inference_config, "cuda", source, weights)
    if not choose_triton_folder():
        raise ConfigurationError(
            "nothing is compiled, as it could not be kept: name a folder that can be written."
        )
    program = program_of(source.architecture, weights, config, kept)
    kernels = start_kernels({**program, **gpu}, workers=cores())
    if kernels is None:
        raise ConfigurationError(
            "nothing is compiled where TRITON_INTERPRET or a LOCAL_RANK above 0 is set: unset it."
        )
    return kernels


def _resolve_dtype(dtype: str | torch.dtype | None, device: str) -> torch.dtype:
    if dtype is None:
        return torch.float32 if device == "cpu" else torch.bfloat16
    return parse_dtype(dtype)


def _make_config(
    values: dict[str, Any], device: str, source: ModelSource, dtype: torch.dtype
) -> InferenceConfig:
    known = [field.name for field in fields(InferenceConfig)]
    own = inspect.signature(LLM).parameters.values()
    of_llm = [parameter.name for parameter in own if parameter.kind is parameter.KEYWORD_ONLY]
    of_config = [name for name in known if name not in of_llm]
    check_engine_names(values, [*of_llm, *of_config])
    architecture = source.architecture
    longest = architecture.max_position_embeddings
    asked = values.get("max_sequence_length")
    checked = InferenceConfig(**{n: value for n, value in values.items() if value is not None})
    cache = cache_dtype(checked.kv_cache_dtype, source)
    values = {**values, "kv_cache_dtype": cache}
    if values.get("block_size_tokens") is None:
        size = default_block_size(architecture.attention_windows, checked.block_size_tokens)
        values = {**values, "block_size_tokens": size}
    if asked is None:
        settings = {**values, "device": device}
        itemsize = 1 if cache == "fp8" else dtype.itemsize
        length = default_max_sequence_length(architecture, longest, settings, itemsize)
        values = {**values, "max_sequence_length": length}
    elif isinstance(asked, int) and asked > longest:
        raise ConfigurationError(
            f"max_sequence_length={asked}, but this model serves at most {longest} tokens (its "
            "trained positions): lower max_sequence_length."
        )
    return InferenceConfig(**{**values, "device": device})

"""`InferenceConfig`: every setting of the engine, with its manual under it.

Field names are Megatron-Core's where the meaning is the same; `lookahead`, `num_kv_blocks`,
`device` and `check_integrity` are ours.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields
from typing import Any

from megatron_async.errors import ConfigurationError
from megatron_async.other_names import names_settings_that_are_meant

MOST_LOOKAHEAD = 64
LOOKAHEAD_OF_MODE = {"legacy": 0, "async": 1}
"""Megatron-Core's `async_sched_mode` values, as lookahead."""

MEMORY_TAGS = ("kv_cache", "weights")
"""What the memory is called that a suspended engine can give back; the first has states too."""
DEFAULT_MAX_REQUESTS = 256
SHORT_PROMPT = 32
"""Prompt tokens for each prefill row of a captured mixed step with many of them."""

INVALIDATION_POLICIES = ("reconcile", "rollback")
SPECULATIVE_METHODS = ("mtp", "ngram")
DEFAULT_DRAFTS = {"mtp": 1, "ngram": 3}
"""Drafts by method. An MTP layer was trained for the token after the next one. Drafts from its own
output are right less often, and each takes another pass. With 3 n-gram drafts a decode row has 4
query tokens, one tile of the kernels for few rows. On edited text the third draft is still right in
7 of 10 cases; on other text such a row is rarely planned."""
STATE_DTYPES = ("float32", "bfloat16")
CACHE_DTYPES = ("auto", "fp8", "model")
QUANTIZATIONS = ("file", "fp8", "int8", "auto", "none")
CHOICES = ("measure", "cached", "shipped")
ATTENTION_BACKENDS = ("triton", "warpgroup", "flash_attn_4", "flash_attn_3", "torch")


@names_settings_that_are_meant
@dataclass
class InferenceConfig:
    """Settings of a `DynamicInferenceContext` and its engine.

    Raises:
        ConfigurationError: a value out of range; the message names field, value and remedy.
    """

    # ---- KV cache -------------------------------------------------------------------------------
    block_size_tokens: int = 256
    """Tokens of a KV block. Small blocks waste less memory at the end of a sequence, large ones
    make shorter block tables. GPU attention kernels want a multiple of 16. `LLM` takes 64 by
    itself where layers see a window of fewer than 256 keys."""

    buffer_size_gb: float | None = None
    """Memory for the KV pool, in GiB. `num_kv_blocks` overrides it. None: 1 on a CPU; on a GPU 80 %
    of the memory that the weights leave free."""

    num_kv_blocks: int | None = None
    """Blocks in the KV pool; overrides `buffer_size_gb`."""

    kv_cache_dtype: str = "auto"
    """Precision of keys and values in the cache: fp8, model (the dtype of the weights) or auto.
    "fp8" (e4m3; "fp8_e4m3" is the same) takes half the memory of 16 bits, and rounds what attention
    reads (docs/quantization.md). Scales are those of the model's files, else 1. "auto": fp8 where
    the files of an `LLM`'s model say so, else "model"."""

    paused_buffer_size_gb: float | None = None
    """Most of the KV pool, in GiB, that paused requests may hold. Beyond it the paused request that
    is last in rank is evicted: it gives its blocks back, keeps its tokens and is prefilled again
    later. (Never the request first in rank, which runs on to its end.) None: no such limit;
    requests are evicted only when nothing else could run."""

    enable_prefix_caching: bool = None  # type: ignore[assignment]  # a bool after __post_init__
    """Let requests that begin alike share KV blocks. Blocks of requests that have ended are kept. A
    request may then compute less of its prompt; its tokens are the same. None: on, except with the
    policy "rollback", which does not support it."""

    # ---- Recurrent layers -------------------------------------------------------------------
    mamba_ssm_states_dtype: str = "float32"
    """Precision of recurrent states of every kind, float32 or bfloat16. "bfloat16" takes half the
    memory and traffic, and rounds otherwise."""

    prefix_caching_mamba_gb: float | None = None
    """Memory for snapshots of recurrent states, in GiB on each rank. It comes beside the states of
    `max_requests` requests; `num_state_snapshots` overrides it. None: the rows that no running
    request needs. 0 or less: no snapshots, as in Megatron."""

    num_state_snapshots: int | None = None
    """Most snapshots of recurrent states; overrides `prefix_caching_mamba_gb`."""

    prefix_caching_mamba_interval: int | None = None
    """Tokens between two snapshots inside a prompt. Further snapshots are kept at its end and where
    prompts diverge. 0: none. None: as many tokens as need a snapshot's memory in the KV cache."""

    # ---- Limits of a step --------------------------------------------------------------------
    max_requests: int = None  # type: ignore[assignment]  # an integer after __post_init__
    """Requests served at once; others wait in order. Active and paused requests hold a slot each.
    None: 256, or as many as `max_tokens` has room for."""

    max_tokens: int = 2048
    """Token budget of one STEP, not of an answer. Decode rows come first, the rest goes to prefill.
    Smaller budgets keep the time between two tokens of running requests short, larger ones prefill
    faster. At least `max_requests`, so that every active request can decode in one step (with
    speculation, times `num_speculative_tokens` + 1)."""

    max_sequence_length: int = 2560
    """Most tokens of prompt and answer together. `LLM` takes the model's own context, as far as the
    KV pool holds it and on a GPU at most 8,192, where nothing is said."""

    enable_chunked_prefill: bool = True
    """Prefill a prompt over several steps if it does not fit into one, while other requests decode.
    Off: a prompt longer than `max_tokens` is refused. (A request prefilled again after an eviction
    may still be split.)"""

    mixed_step_tokens: int | None = None
    """Tokens of a step that has running requests, while few prompt tokens wait. A step may always
    have half of those that wait. Running requests wait for a step's prompts, so long prompts are
    prefilled in several (`engine/prefill_limit.py`). With `target_tpot_ms` the target decides.
    None: with captured steps a number of `choices`, else as many as `max_tokens`."""

    target_tpot_ms: float | None = None
    """Target for the milliseconds between two tokens of a running request. A step with running
    requests gets as many prompt tokens as fit this time, estimated from earlier steps; at least 64,
    so that prompts go on if the target is too short. None: as many as `max_tokens` leaves."""

    # ---- Scheduling --------------------------------------------------------------------------
    lookahead: int | None = None
    """Steps launched ahead of bookkeeping: 0 is serial. 1 launches step N+1 while step N runs; more
    hides jitter of the CPU at the price of up to `lookahead` wasted rows when a request ends by a
    stop token. With p pipeline stages at least p - 1 keeps them all busy. None: 1; in `LLM` p."""

    async_sched_mode: str | None = None
    """Megatron-Core's name for `lookahead`: "legacy" is 0, "async" is 1."""

    late_launch: bool | None = None
    """Launch each step shortly before the running one ends, not as soon as possible. So a request
    that arrives meanwhile joins that step, and has its first token up to a step earlier. The end of
    the running step is foreseen by earlier steps of its shape. For `async_step` and `run_engine`,
    as in a server, with lookahead 1; a loop of your own asks `engine.launching.seconds_left()`.
    None: on with lookahead 1."""

    invalidation: str = "reconcile"
    """Policy for steps in flight of a request that ends unexpectedly, reconcile or rollback. (By a
    stop token or word, an abort or a failed step.) "reconcile": the steps are booked, and rows of
    the request dropped (zombie rows). "rollback": the steps are discarded, the state before them is
    restored, and they are launched again without the request; slower, for comparison."""

    # ---- Speculation -------------------------------------------------------------------------
    speculative_method: str | None = None
    """Where draft tokens come from: mtp (a layer of the model) or ngram (what the text repeats).
    "ngram" looks up the tokens that followed an earlier occurrence of the sequence's last tokens,
    on the device, without weights. Tokens are those of plain decoding. None (or "none"): no drafts,
    or those of the drafter that is passed to a `TextGenerationController`."""

    num_speculative_tokens: int = 0
    """Tokens drafted ahead of a decode row. The next step verifies them and yields one to
    `num_speculative_tokens` + 1 tokens. 0: 3 with "ngram", 1 with "mtp", else no speculation."""

    draft_vocab_size: int | None = None
    """Draft only tokens with ids below this, with mtp. So a draft reads less of the output layer.
    In byte-level vocabularies low ids are the frequent tokens, because they were merged first.
    Tokens with higher ids are never drafted. None: all."""

    # ---- Graphs ------------------------------------------------------------------------------
    num_cuda_graphs: int | None = None
    """Batch sizes for which a decode step is captured as a CUDA graph, 0 for none. A step is padded
    to the next of them. Without effect on a CPU. None: many sizes, close together where padding
    costs most."""

    use_cuda_graphs_for_non_decode_steps: bool = True
    """Capture steps with prefill chunks too, where launching their kernels takes longer than
    running them. (By number of prefill tokens, see `choices`.) Off: such steps always run
    eagerly."""

    cuda_graph_mixed_prefill_count: int = 16
    """Prefill chunks that a captured mixed step has room for, at least: one of many prefill tokens
    has room for a chunk for every 32 of them. A step with more chunks runs eagerly."""

    choices: str = "cached"
    """How kernels and sizes are chosen that depend on times on a GPU: measure, cached or shipped.
    "cached" takes the row for this GPU and shape that comes with this package, or the one that an
    earlier start has kept in the user's cache, or measures and keeps one (docs/gpus.md). "shipped"
    measures nothing: where no row comes with this package, a rule chooses. "measure" always
    measures, and replaces the row kept. Without effect on a CPU."""

    # ---- Sampling ----------------------------------------------------------------------------
    inference_sampling_seed: int = 42
    """Seed of requests without one. It is mixed with the request's id, so that equal prompts
    get different samples and a run can be repeated."""

    materialize_only_last_token_logits: bool = True
    """Compute logits only where a token is sampled. Log probs of prompts are computed from hidden
    states (`SamplingParams.return_log_probs`), so nothing needs other logits: False is refused."""

    # ---- Training beside the engine ------------------------------------------------------------
    enable_routing_replay: bool = False
    """Record to which experts each token went: `routing_indices` of a request that has ended. A
    trainer replays them (docs/rl.md). Takes a byte or two for each token, layer with experts and
    chosen expert, beside the keys."""

    # ---- Logging -----------------------------------------------------------------------------
    logging_step_interval: int = 0
    """Log a line every N steps, 0 for none. The line (logger "megatron_async", level INFO) has the
    step's time on the device and its rows, tokens a second, overlap and occupancy. The device is
    never waited for: lines appear a step or two late."""

    nvtx: bool = field(default_factory=lambda: os.environ.get("MEGATRON_ASYNC_NVTX") == "1")
    """Push an NVTX range around every stage, for Nsight Systems, and let captured steps mark where
    their parts end (docs/observing.md). MEGATRON_ASYNC_NVTX=1 in the environment is the same."""

    # ---- Device and safety -------------------------------------------------------------------
    device: str | None = None
    """Device: cpu, cuda or cuda:N. None: a GPU where there is one."""

    batch_invariant_mode: bool = False
    """On a GPU, let the bits of a token's logits depend on its own sequence alone. (Not on other
    requests, chunks, prefix hits, drafts, lookahead, padding or evictions: docs/gpus.md.) Each
    op then has one order of sums, which is slower where another is the fastest."""

    quantization: str | None = None
    """file: weights as the files have them: of quantised folders on a GPU; of GGUF files on a CPU,
    with rows of 16 bits. It is the default there. fp8: 16-bit weights are rounded to FP8 at load,
    on a GPU. int8: on a CPU as the file has them, or 8 bits; rows of 8 bits by a file's weights:
    faster, but more tokens differ from float32's. auto: int8 where a CPU has quick loops. none, and
    the default of all others: the model's dtype (docs/quantization.md)."""

    attention_backend: str | None = None
    """Attention of prefill chunks on a GPU: triton (our kernel), warpgroup (ours for Hopper GPUs
    and 16-bit dtypes), flash_attn_4, flash_attn_3 (packages, 16-bit dtypes) or torch (the
    reference; steps with prefill are not captured). Decode rows always use our kernel. None: the
    fastest of those there are, by `choices`."""

    enable_sleep_mode: bool = False
    """Keep the addresses of KV cache, states and weights while a suspended engine has given their
    memory back: captured steps stay valid, and weights can be given back too (docs/rl.md)."""

    check_integrity: bool = False
    """Check after every step that each KV block and slot has exactly one owner; for tests."""

    check_ranks_agree: bool = False
    """Let followers report a checksum of every plan and of all samples to their leader, which
    compares them with its own; for debugging several ranks."""

    def __post_init__(self) -> None:
        for each in fields(self):
            switch = getattr(self, each.name)
            if str(each.type).startswith("bool") and switch not in (True, False, None):
                raise ConfigurationError(f"{each.name}={switch!r} must be True or False.")
        self._resolve_lookahead()
        self._resolve_speculation()
        caches: Any = self.enable_prefix_caching
        if caches is None:
            self.enable_prefix_caching = self.invalidation != "rollback"
        for name in ("block_size_tokens", "max_tokens", "max_sequence_length"):
            self._require_int(name, 1)
        asked: Any = self.max_requests
        if asked is None:
            most = self.max_tokens // self.decode_width
            self.max_requests = min(DEFAULT_MAX_REQUESTS, max(most, 1))
        self._require_int("max_requests", 1)
        for name, least in ("num_kv_blocks", 1), ("num_cuda_graphs", 0), ("mixed_step_tokens", 1):
            if getattr(self, name) is not None:
                self._require_int(name, least)
        self._require_int("cuda_graph_mixed_prefill_count", 1)
        if self.target_tpot_ms is not None:
            self._check_target_tpot(self.target_tpot_ms)
        for name in ("num_state_snapshots", "prefix_caching_mamba_interval"):
            if getattr(self, name) is not None:
                self._require_int(name, 0)
        for name in ("buffer_size_gb", "paused_buffer_size_gb", "prefix_caching_mamba_gb"):
            value, may_be_off = getattr(self, name), name == "prefix_caching_mamba_gb"
            if value is not None and not _is_above(-math.inf if may_be_off else 0, value):
                bound = ", 0 for no snapshots" if may_be_off else " above 0"
                raise ConfigurationError(f"{name}={value!r} must be a number of GiB{bound}.")
            if may_be_off and (value or 0) > 0 and not self.enable_prefix_caching:
                raise ConfigurationError(
                    f"prefix_caching_mamba_gb={value} is for snapshots of the prefix cache: set "
                    "enable_prefix_caching=True too, or leave it out."
                )
        # Megatron's own dtype is accepted too.
        self.mamba_ssm_states_dtype = str(self.mamba_ssm_states_dtype).removeprefix("torch.")
        self._require_int("inference_sampling_seed", 0)
        self._require_int("logging_step_interval", 0)
        self.quantization = None if self.quantization == "none" else self.quantization
        if self.kv_cache_dtype == "fp8_e4m3":
            self.kv_cache_dtype = "fp8"
        for name, known in (
            ("quantization", QUANTIZATIONS), ("attention_backend", ATTENTION_BACKENDS),
            ("invalidation", INVALIDATION_POLICIES), ("mamba_ssm_states_dtype", STATE_DTYPES),
            ("choices", CHOICES), ("kv_cache_dtype", CACHE_DTYPES),
        ):  # fmt: skip
            value, must = getattr(self, name), ("invalidation", "choices", "kv_cache_dtype")
            if value not in known and (value is not None or name in must):
                raise ConfigurationError(
                    f"{name}={value!r} is unknown: use one of {', '.join(known)}, or leave it out."
                )
        if self.invalidation == "rollback" and self.enable_prefix_caching:
            raise ConfigurationError(
                "invalidation='rollback' is not served with enable_prefix_caching=True: others may "
                "have begun after blocks of a step that is taken back. Use 'reconcile'."
            )
        if self.invalidation == "rollback" and self.decode_width > 1:
            raise ConfigurationError(
                f"invalidation='rollback' is not served with num_speculative_tokens="
                f"{self.num_speculative_tokens}, whose lengths the host does not know: use "
                "'reconcile', or num_speculative_tokens=0."
            )
        if self.max_tokens < self.max_requests * self.decode_width:
            raise ConfigurationError(
                f"max_tokens={self.max_tokens} is smaller than max_requests={self.max_requests}"
                f"{f' times {self.decode_width}' if self.decode_width > 1 else ''}: every active "
                f"request needs {self.decode_width} token{'s' if self.decode_width > 1 else ''} of "
                "a step's budget. Raise max_tokens or lower max_requests"
                f"{' or num_speculative_tokens' if self.decode_width > 1 else ''}."
            )
        if not self.materialize_only_last_token_logits:
            raise ConfigurationError(
                "materialize_only_last_token_logits=False is not needed for log probs of prompts: "
                "leave it True, and ask for them with SamplingParams(return_log_probs=True)."
            )

    def _check_target_tpot(self, target: Any) -> None:
        if not _is_above(0, target):
            raise ConfigurationError(
                f"target_tpot_ms={target!r} must be a number of milliseconds above 0."
            )
        if not self.enable_chunked_prefill:
            raise ConfigurationError(
                f"target_tpot_ms={target} divides prompts into chunks that fit: leave "
                "enable_chunked_prefill=True."
            )

    def _resolve_lookahead(self) -> None:
        if self.async_sched_mode is not None:
            # Megatron's own enum is accepted too.
            mode: Any = getattr(self.async_sched_mode, "value", self.async_sched_mode)
            if mode not in LOOKAHEAD_OF_MODE:
                raise ConfigurationError(
                    f"async_sched_mode={mode!r} is unknown: use 'legacy' (lookahead 0) or 'async' "
                    "(lookahead 1), or set lookahead itself."
                )
            implied = LOOKAHEAD_OF_MODE[mode]
            if self.lookahead is not None and self.lookahead != implied:
                raise ConfigurationError(
                    f"async_sched_mode={mode!r} means lookahead {implied}, but "
                    f"lookahead={self.lookahead} was given too. Give one of the two."
                )
            self.lookahead = implied
        if self.lookahead is None:
            self.lookahead = 1
        self._require_int("lookahead", 0)
        if self.late_launch and self.lookahead != 1:
            raise ConfigurationError(
                f"late_launch=True is for lookahead 1, not {self.lookahead}: leave one of them out."
            )
        if self.lookahead > MOST_LOOKAHEAD:
            raise ConfigurationError(
                f"lookahead={self.lookahead} must be at most {MOST_LOOKAHEAD}: each step ahead has "
                "buffers of its own, and more than 2 bring nothing."
            )

    def _resolve_speculation(self) -> None:
        self._require_int("num_speculative_tokens", 0)
        method: Any = self.speculative_method
        if method == "none":
            method = self.speculative_method = None
        if method not in (None, *SPECULATIVE_METHODS):
            raise ConfigurationError(
                f"speculative_method={method!r} is unknown: use one of "
                f"{', '.join(map(repr, SPECULATIVE_METHODS))}, or leave it out."
            )
        if method is not None and self.num_speculative_tokens == 0:
            self.num_speculative_tokens = DEFAULT_DRAFTS[method]
        if self.draft_vocab_size is not None:
            self._require_int("draft_vocab_size", 1)
            if method != "mtp":
                raise ConfigurationError(
                    f"draft_vocab_size={self.draft_vocab_size} is for speculative_method='mtp', "
                    f"not {method!r}: leave it out."
                )

    def _require_int(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigurationError(f"{name}={value!r} must be an integer of at least {least}.")

    @property
    def has_fp8_cache(self) -> bool:
        """Whether keys and values are stored as e4m3."""
        return self.kv_cache_dtype == "fp8"

    @property
    def chooses_widths(self) -> bool:
        """Whether each step's width is chosen by the success of drafts: with `speculative_method`.
        With a drafter that was passed in, every step verifies drafts."""
        return self.speculative_method is not None

    @property
    def decode_width(self) -> int:
        """Most query tokens of a decode row, and most tokens that it yields."""
        return 1 + self.num_speculative_tokens

    @property
    def draft_places(self) -> int:
        """Cache positions after a row's own tokens that a step fills, to draft."""
        return self.num_speculative_tokens if self.speculative_method == "mtp" else 0

    @property
    def max_rows(self) -> int:
        """Most rows of a step: one for each request, and in a padded step dummy rows besides."""
        return self.max_requests + self.most_mixed_prefill_rows

    @property
    def max_sample_rows(self) -> int:
        """Most rows of logits of a step."""
        return self.max_requests * self.decode_width + self.most_mixed_prefill_rows

    @property
    def mixed_prefill_rows(self) -> int:
        """Prefill rows of a captured mixed step, at least: there are no more chunks than
        requests."""
        return min(self.cuda_graph_mixed_prefill_count, self.max_requests)

    @property
    def most_mixed_prefill_rows(self) -> int:
        """Prefill rows of the captured mixed step of most prefill tokens."""
        rows = max(self.cuda_graph_mixed_prefill_count, self.max_tokens // SHORT_PROMPT)
        return min(rows, self.max_requests)

    @property
    def steps_in_flight(self) -> int:
        """Most steps that are launched and unresolved at once: the length of every buffer ring."""
        assert self.lookahead is not None  # set in __post_init__
        return self.lookahead + 1


def _is_above(least: float, value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > least

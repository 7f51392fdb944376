"""All cases of `megatron-async check`, one engine after the other."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from megatron_async.checkpoints import open_model
from megatron_async.checkpoints.registry import shipped_draft_layer
from megatron_async.cli.prompts import token_ids
from megatron_async.cli.ranks import gather_replicas, has_other_ranks, is_first_rank
from megatron_async.cli.terminal import raise_interrupts
from megatron_async.communication.bootstrap import join_job
from megatron_async.devices import resolve_device_name
from megatron_async.lab.check_cases import ALONE, Answer, NeedleServer, Variant, variants
from megatron_async.lab.check_outcomes import HEAD, Difference, Judge, digest, line
from megatron_async.lab.check_probe import LayerProbe
from megatron_async.llm import LLM

PROBED = 3
"""Cases that fail whose layers are looked for; each serves the needle twice more."""
ON_CPU = {"max_requests": 16, "block_size_tokens": 8}, 72, 16
ON_GPU = {"max_requests": 256, "block_size_tokens": 64}, 1200, 128
"""By device: settings, the longest random needle and tokens to generate, where nothing is said."""
LEAST_RECURRENT = 160
"""The longest needle where layers are recurrent: states are kept at multiples of 128 tokens."""
FEW = 4
"""Needles whose lengths have all magnitudes."""
SNAPSHOTS = 16
"""Rows for recurrent states of prompts' beginnings."""
MOST_WIDTH = 4
"""Query tokens of a row with drafts."""
NO_GB = 1e-9
"""What paused requests may hold: those that are short of blocks are evicted at once."""


@dataclass(frozen=True)
class _Work:
    """What is served, and how engines are made for it."""

    needles: list[list[int]]
    tokens: int
    options: dict[str, Any]
    plan: list[Variant]


def serve_cases(
    arguments: argparse.Namespace, model: str, sizes: Mapping[str, Any], given: Mapping[str, Any]
) -> tuple[list[list[dict[str, Any]]], str, str]:
    """Serve all cases, with a bar; the first replica's rows of the table are printed as they come.
    Every rank of a job calls it.

    Args:
        arguments: prompt, needles, tokens, cases, seed, dtype, transformer_impl, no_progress.
        model: anything that `LLM` loads.
        sizes: over how many ranks it is split.
        given: settings of the engine.

    Returns:
        the cases of each replica (see `Judge.compare`), the engine's mode, and the digest of the
        first replica's answers.
    """
    work = _work(arguments, model, given)
    making = {
        "dtype": arguments.dtype, "transformer_impl": arguments.transformer_impl, **sizes,
        **work.options, "lookahead": max(work.options["lookahead"], 2),
    }  # fmt: skip
    shown = None if is_first_rank() and not arguments.no_progress else True
    with tqdm(total=len(work.plan) + 1, unit="case", disable=shown, leave=False) as bar:
        cases = _Cases(work, arguments.seed, bar)
        # Layers of other stages, and rows of other ranks, are not seen here.
        is_whole = arguments.pipeline_model_parallel_size == 1 and not arguments.sequence_parallel
        cases.probes = PROBED if is_whole else 0
        for method in dict.fromkeys([None, *(each.method for each in work.plan)]):
            with LLM(model, speculative_method=method, **making) as llm:
                raise_interrupts()
                replicas = cases.serve(llm, method)
            del llm
            gc.collect()  # its memory is for the next one
    assert cases.judge is not None, "the first engine has it"
    firsts = [
        {each["needle"]: Answer(**each) for each in replica["firsts"]} for replica in replicas
    ]
    for number in range(1, len(firsts)):
        compared, _ = cases.judge.compare(firsts[0], firsts[number].values())
        case = {"case": "replicas", "label": "as on 0", "replica": number}
        replicas[number]["cases"].append({**case, **compared, "happened": "", "layer": ""})
    told = digest(firsts[0].values())
    return [replica["cases"] for replica in replicas], cases.judge.mode, told


class _Cases:
    """The cases so far, of one replica; a judge from the first engine on; and differences whose
    layers may still be looked for, as many on all ranks."""

    def __init__(self, work: _Work, seed: int, bar: Any) -> None:
        self._work, self._seed, self._bar = work, seed, bar
        self._firsts, self._cases = dict[int, Answer](), list[dict[str, Any]]()
        self.judge: Judge | None = None
        self.probes = 0

    def serve(self, llm: LLM, method: str | None) -> list[dict[str, Any]]:
        """All cases with one way to draft, and what the replicas have so far."""
        work, bar = self._work, self._bar
        own = work.options["lookahead"]
        server = NeedleServer(llm, work.needles, work.tokens, self._seed, own, self._on_step)
        if self.judge is None:
            self.judge = _judge(llm)
            bar.set_description("alone")
            self._firsts = {each.needle: each for each in server.serve(ALONE)[0]}
            if is_first_rank():
                bar.write(HEAD, file=sys.stdout)
            bar.update()
        for variant in [each for each in work.plan if each.method == method]:
            bar.set_description(variant.label)
            self._cases.append(self._case(server, variant, self.judge))
            if is_first_rank():
                row = line(self._cases[-1], llm.data_parallel_size > 1)
                bar.write(row, file=sys.stdout)
            bar.update()
        found = {"firsts": [*map(asdict, self._firsts.values())], "cases": self._cases}
        return gather_replicas(llm, found)

    def _case(self, server: NeedleServer, variant: Variant, judge: Judge) -> dict[str, Any]:
        begin = time.monotonic()
        found, happened = server.serve(variant)
        compared, failure = judge.compare(self._firsts, found)
        self._firsts = {each.needle: each for each in reversed(found)} | self._firsts
        case = {"case": variant.case, "label": variant.label, **compared, "happened": happened}
        replica = server.llm.data_parallel_rank
        case |= {"layer": "", "replica": replica, "seconds": time.monotonic() - begin}
        first = _first_of_all(failure, replica) if self.probes else None
        if first is not None:
            self.probes -= 1
            layer = _layer(server, variant, first[1], judge)
            if first[0] == replica:
                case["layer"] = layer
        return case

    def _on_step(self, report: Mapping[str, Any]) -> None:
        rows = len(report["active_request_ids"])
        self._bar.set_postfix_str(f"{rows} rows", refresh=False)
        self._bar.update(0)


def _work(arguments: argparse.Namespace, model: str, given: Mapping[str, Any]) -> _Work:
    """Needles, settings and cases for a model: the command line's, or what fits the device."""
    source = open_model(model)
    on_cpu = resolve_device_name(given.get("device")).startswith("cpu")
    defaults, longest, tokens = ON_CPU if on_cpu else ON_GPU
    shape, tokens = source.architecture, arguments.tokens or tokens
    if any(kind in shape.pattern for kind in "MG"):
        longest = max(longest, LEAST_RECURRENT)
        defaults = {"num_state_snapshots": SNAPSHOTS, **defaults}
    bounds = shape.max_position_embeddings, given.get("max_sequence_length")
    context = min(bound for bound in bounds if bound is not None)
    longest = max(min(longest, context - 2 * tokens), 1)
    draws = np.random.default_rng(arguments.seed)
    # A few lengths of all magnitudes, then lengths all over the range.
    stride = max(longest // arguments.needles, 1)
    sizes = (
        max(int(longest * 0.4**n), 1) if n < FEW else n * stride % longest + 1
        for n in range(arguments.needles)
    )
    needles = [_ids(prompt, source.tokenizer) for prompt in arguments.prompt] or [
        draws.integers(shape.vocab_size, size=size).tolist() for size in sizes
    ]
    longest = max(map(len, needles))
    if longest + 2 * tokens > context and "max_sequence_length" not in given:
        raise ValueError(
            f"--tokens {tokens}: a prompt of {longest} and twice as many tokens as each needle "
            f"generates are more than the model's {context}: use fewer."
        )
    options = {**defaults, "lookahead": 1, "paused_buffer_size_gb": NO_GB, **given}
    options.setdefault("max_sequence_length", longest + 2 * tokens)
    options.setdefault("max_tokens", max(2048, MOST_WIDTH * options["max_requests"]))
    has_mtp = shape.mtp_num_depths or shipped_draft_layer(model)
    methods = ["ngram", *(["mtp"] if has_mtp else [])]
    shares = arguments.expert_model_parallel_size > 1
    plan = variants(options, len(needles), longest, methods, shares, arguments.cases)
    if not plan:
        raise ValueError(
            f"--cases {' '.join(arguments.cases)}: with this model and these settings there are no "
            "such cases: choose others."
        )
    return _Work(needles, tokens, options, plan)


def _ids(prompt: str, tokenizer: Any) -> list[int]:
    return token_ids(prompt) if tokenizer is None else list(tokenizer.tokenize(prompt))


def _judge(llm: LLM) -> Judge:
    """What an engine promises, and the rounding of its dtype."""
    config, dtype, mode = llm.engine.context.config, llm.dtype, "fast"
    if config.quantization is not None or config.has_fp8_cache:
        # Activations of 8 bits round no better; a last bit can become a step of e4m3 in the cache.
        dtype = torch.bfloat16
    elif dtype == torch.float32:
        mode = "float32"
    if config.batch_invariant_mode:
        mode = "bits"
    model: Any = llm.engine.controller.inference_wrapped_model.model
    return Judge(mode, dtype, len(model.decoder.layer_type_list))


def _first_of_all(failure: Difference | None, replica: int) -> tuple[int, Difference] | None:
    """The difference of the first replica that has one, and its number; the same on all ranks."""
    if not has_other_ranks():
        return None if failure is None else (replica, failure)
    mine = json.dumps([replica, asdict(failure)]) if failure is not None else ""
    told = join_job().exchange("a difference", mine)
    for _, text in sorted(told.items()):
        if text:
            number, fields = json.loads(text)
            return number, Difference(**fields)
    return None


def _layer(server: NeedleServer, variant: Variant, failure: Difference, judge: Judge) -> str:
    """Where hidden states of a needle part, in words: it is served alone and by the variant once
    more, and the layers are watched, on all ranks together."""
    prompt, probes = server.needles[failure.needle], []
    end = failure.position + (0 if failure.in_prompt else len(prompt))
    for way in (ALONE, variant):
        probes.append(LayerProbe(server.llm.engine, prompt, end))
        with probes[-1].watching():
            server.serve(way, failure.needle)
    return probes[0].first_difference(probes[1], judge.mode == "bits", judge.dtype)

"""Does every key of a `config.json` mean here what it means to transformers?

Each key of each family's configuration class (and of others that files have) is left out, set to
null, to its default and to other values, in both spellings of rope, and beside and inside
`text_config`. A folder whose settings are served must give transformers' greedy tokens and log
probs; every other one must be refused by a sentence that names the key. What transformers itself
refuses has no truth to compare with.

    python scripts/check_settings.py --family llama mixtral
    python scripts/check_settings.py                        # all families: half an hour

The gated norm of Mamba2 with several groups is compared with a norm over each group, as the
published kernels have it and transformers' class has not.
"""

import argparse
import json
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import settings_families
import settings_theirs
import torch
import transformers
from settings_grid import Variant, variants
from torch import Tensor
from tqdm import tqdm

from megatron_async import LLM, SamplingParams
from megatron_async.checkpoints import CheckpointError
from megatron_async.checkpoints.huggingface_config import read_architecture
from megatron_async.checkpoints.huggingface_delta import language_model_config
from megatron_async.errors import ConfigurationError
from megatron_async.models.architecture import ModelArchitecture

EQUAL, REFUSED, WRONG, ALONE = "equal", "refused", "WRONG", "transformers refuses it"
LENGTHS = (1, 5, 23, 70)
"""Tokens of the prompts."""
NEW_TOKENS = 4
TOLERANCE = 2e-3
"""Of log probs."""


class Comparison:
    """Runs models, and remembers what it has run.

    Args:
        folder: for model folders; each is removed after its run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, tuple[str, str]] = {}

    def check(self, variant: Variant) -> tuple[str, str]:
        """What a file gives: one of the four outcomes, and a sentence about it."""
        content = json.loads(json.dumps(variant.config))
        try:
            ours = read_architecture(language_model_config(content, "config.json"), "config.json")
        except CheckpointError as error:
            return _refused(variant, error)
        except Exception as error:  # a fault of the reader, whatever it is
            return WRONG, f"{type(error).__name__}: {error}"
        try:
            model = their_model(variant)
        except Exception as error:  # whatever a class raises
            return ALONE, f"{type(error).__name__}: {error}".split("\n")[0]
        told = json.dumps([ours.to_dict(), model.config.to_dict()], default=str, sort_keys=True)
        if told not in self._seen:
            self._seen[told] = self._compare(variant, ours, model)
        return self._seen[told]

    def _compare(self, variant: Variant, ours: ModelArchitecture, model: Any) -> tuple[str, str]:
        prompts = prompts_of(ours)
        try:
            expected = [their_answer(model, prompt) for prompt in prompts]
        except Exception as error:  # whatever a model raises
            return ALONE, f"{type(error).__name__}: {error}".split("\n")[0]
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            model.save_pretrained(folder)
            (Path(folder) / "config.json").write_text(json.dumps(variant.config))
            try:
                found = our_answers(folder, prompts)
            except ConfigurationError as error:
                return _refused(variant, error)
            except Exception as error:  # Megatron's, for example, which names no key of a file
                return WRONG, f"{type(error).__name__}: {error}"
        for prompt, (tokens, theirs), (mine, told) in zip(prompts, expected, found, strict=True):
            if tokens != mine:
                return WRONG, f"prompt of {len(prompt)}: tokens {mine}, transformers' {tokens}"
            difference = (theirs - told).abs().max().item()
            if not difference < TOLERANCE:
                return WRONG, f"prompt of {len(prompt)}: log probs differ by {difference:.2g}"
        return EQUAL, ""


def _refused(variant: Variant, error: Exception) -> tuple[str, str]:
    named = any(key in str(error) for key in keys_of(variant))
    return (REFUSED if named else WRONG), str(error)


def keys_of(variant: Variant) -> set[str]:
    """Names of which an error must have one: the changed keys, and those inside of them."""
    found = set(variant.changed)
    for key in variant.changed:
        value = variant.config.get(key, variant.config.get("text_config", {}).get(key))
        if isinstance(value, dict):
            found |= value.keys()
    return found


def their_model(variant: Variant) -> Any:
    """A model of transformers with random weights that say nothing by chance.

    Raises:
        Exception: the class refuses the file.
    """
    kind = settings_families.FAMILIES[variant.family][0]
    name, config = f"{kind}ForCausalLM", settings_theirs.their_config(variant)
    if "text_config" in variant.config:
        name, config = f"{kind}ForConditionalGeneration", settings_theirs.their_whole(variant)
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    model = getattr(transformers, name)(config).float().eval()
    for key, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if key.endswith("A_log"):
            parameter.data.uniform_(-3.0, 0.5)
        elif key.endswith(("dt_bias", "correction_bias")):
            parameter.data.normal_(0.0, 0.5)
        elif parameter.dim() == 1 and "inv_freq" not in key:
            is_norm = "norm" in key or key.endswith(".D")
            if variant.family in ("qwen3_next", "qwen3_5", "qwen3_5_moe"):  # others have 1 + weight
                is_norm = "linear_attn.norm" in key
            parameter.data.normal_(1.0 if is_norm else 0.0, 0.2)
        elif "conv1d" in key or "embed" in key:
            parameter.data.normal_(0.0, 0.5)
        elif parameter.dim() > 1:  # outputs as large as inputs, however many there are
            parameter.data.normal_(
                0.0, (2.0 if "gate." in key else 1.0) * parameter.shape[-1] ** -0.5
            )
    for module in model.modules():
        if type(module).__name__ == "NemotronHMamba2Mixer":
            module.time_step_limit = (0.0, float("inf"))  # as the models' own code has it
        if type(module).__name__ == "Mamba2Mixer":
            module.norm.forward = GroupedNorm(module.norm, module.n_groups)
    model.tie_weights()
    return model


class GroupedNorm:
    """The gated norm of Mamba2 over each group, on the weight of another norm."""

    def __init__(self, norm: Any, groups: int) -> None:
        self._norm, self._groups = norm, groups

    def __call__(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        """`[..., inner]` in and out."""
        gated = hidden_states * torch.nn.functional.silu(gate)
        parts = gated.unflatten(-1, (self._groups, -1))
        squares = parts.pow(2).mean(-1, keepdim=True)
        normed = parts * torch.rsqrt(squares + self._norm.variance_epsilon)
        return self._norm.weight * normed.flatten(-2)


def prompts_of(architecture: ModelArchitecture) -> list[list[int]]:
    """Prompts that the model has room for."""
    longest = min(architecture.max_position_embeddings, architecture.sliding_window or 10**9)
    words = min(architecture.vocab_size, settings_families.VOCABULARY)
    tokens = torch.randint(0, words, (100,), generator=torch.Generator().manual_seed(2)).tolist()
    return [tokens[:length] for length in LENGTHS if length + NEW_TOKENS <= longest]


@torch.inference_mode()
def their_answer(model: Any, prompt: list[int]) -> tuple[list[int], Tensor]:
    """Greedy tokens of transformers, and log probs of the prompt and of the tokens."""
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        logits = _logits(model, tokens)
        tokens.append(int(logits[-1].argmax()))
    told = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    return tokens[len(prompt) :], told


def _logits(model: Any, tokens: list[int]) -> Tensor:
    places = {"position_ids": torch.arange(len(tokens))[None]}
    if model.config.model_type == "mamba2":
        places = {}
    logits: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False, **places).logits[0]
    if not logits.isfinite().all():
        raise ValueError("its logits are not finite")
    return logits


def our_answers(folder: str, prompts: list[list[int]]) -> list[tuple[list[int], Tensor]]:
    """Tokens and log probs of each prompt, of this engine."""
    params = SamplingParams(
        num_tokens_to_generate=NEW_TOKENS,
        temperature=0.0,
        termination_id=-1,
        return_log_probs=True,
        skip_prompt_log_probs=False,
    )
    with LLM(folder, device="cpu", max_requests=4, num_kv_blocks=32, block_size_tokens=16) as llm:
        found = llm.generate(prompts, params)
    return [
        (
            list(request.generated_tokens),
            torch.tensor([*(request.prompt_log_probs or ()), *(request.generated_log_probs or ())]),
        )
        for request in found
    ]


def make_parser() -> argparse.ArgumentParser:
    """Options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    families = list(settings_families.FAMILIES)
    parser.add_argument(
        "--family", nargs="+", choices=families, default=families, help="default: all"
    )
    parser.add_argument("--key", nargs="+", help="only these keys ('rope': all spellings of it)")
    parser.add_argument("--verbose", action="store_true", help="print every variant")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison; 1 if anything is wrong."""
    args = make_parser().parse_args(argv)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("megatron_async").setLevel(logging.ERROR)
    chosen = [v for family in args.family for v in variants(family)]
    chosen = [v for v in chosen if not args.key or v.key in args.key]
    count: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(Path(folder))
        for variant in (bar := tqdm(chosen, disable=not sys.stderr.isatty())):
            bar.set_description(variant.family)
            outcome, said = comparison.check(variant)
            count[variant.family, outcome] += 1
            if args.verbose or outcome == WRONG:
                tqdm.write(f"{outcome}: {variant.name}: {said}")
    outcomes = (EQUAL, REFUSED, ALONE, WRONG)
    print(f"{'family':<18}" + "".join(f"{outcome:>26}" for outcome in outcomes))
    for family in args.family:
        print(f"{family:<18}" + "".join(f"{count[family, outcome]:>26}" for outcome in outcomes))
    return int(any(outcome == WRONG for _family, outcome in count))


if __name__ == "__main__":
    sys.exit(main())

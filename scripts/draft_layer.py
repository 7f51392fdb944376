"""Parts of `scripts/train_draft_layer.py`: a layer for multi-token prediction in plain torch, with
gradients; the texts that it learns from; and what the model itself says of these, hidden states
computed by the engine's own prefill.

The layer computes what `megatron_async.models.mtp` computes with kernels, and names its source.
Served: dense layers with RMSNorm, SwiGLU and rotary embedding.

A chat model makes up conversations by itself: given nothing but the opening of a user's turn, it
writes a plausible prompt; then it answers that. (Xu et al. 2024, "Magpie", arXiv 2406.08464.) No
data set is needed, and the texts are those that the model will be asked to write.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_async import LLM, SamplingParams
from megatron_async.checkpoints.mapping import mtp_weights
from megatron_async.engine.listener import EngineListener
from megatron_async.errors import ConfigurationError
from megatron_async.models.architecture import ATTENTION, MLP, ModelArchitecture
from megatron_async.ops.attention.rope_append import apply_rotary_reference
from megatron_async.planning.step_plan import StepPlan
from megatron_async.step.text_generation_controller import LaunchedStep
from megatron_async.text.tokenizer import Tokenizer

PATTERN = ATTENTION + MLP
NOISE = 0.02
"""Standard deviation of what `eh_proj` begins with for the embedding."""
DEPTH = "mtp.layers.0."
MIXER = f"{DEPTH}mtp_model_layer.layers.0."
DENSE = f"{DEPTH}mtp_model_layer.layers.1."


class DraftLayer(nn.Module):
    """A layer whose parameters are fused as the engine's, under their names; it begins as a copy of
    the model's last one. `cos` and `sin` are `[positions, rotated]`. A ConfigurationError if the
    model has what this layer does not compute."""

    def __init__(
        self,
        architecture: ModelArchitecture,
        weights: Mapping[str, Tensor],
        cos: Tensor,
        sin: Tensor,
    ) -> None:
        super().__init__()
        self._a, self.cos, self.sin = architecture, cos, sin
        self.values = nn.ParameterDict()
        last = max(int(name.split(".")[2]) for name in weights if name.startswith("decoder.layers"))
        places = {MIXER: f"decoder.layers.{last - 1}.", DENSE: f"decoder.layers.{last}."}
        names = {weight.name: weight.shape for weight in mtp_weights(architecture)}
        for name, shape in names.items():
            self.values[_key(name)] = self._first(name, shape, weights, places)
        known = {f"{MIXER}{n}" for n in ("input_layernorm.weight", *QKV)} | {
            f"{DENSE}{n}" for n in ("pre_mlp_layernorm.weight", *FFN)
        }
        known |= {f"{DEPTH}{n}.weight" for n in ("enorm", "hnorm", "final_layernorm", "eh_proj")}
        strange = sorted(set(names) - known) or [architecture.activation]
        if strange != ["silu"]:
            raise ConfigurationError(
                f"a draft layer for {architecture.model_type} would need {strange[0]!r}, which "
                "this script does not train: take a model of dense SwiGLU layers without biases or "
                "norms of query and key heads."
            )

    def _first(
        self, name: str, shape: tuple[int, ...], weights: Mapping[str, Tensor],
        places: Mapping[str, str],
    ) -> Tensor:  # fmt: skip
        for ours, theirs in places.items():
            if name.startswith(ours):
                return weights[theirs + name.removeprefix(ours)].detach().float().clone()
        if name.endswith("eh_proj.weight"):
            # The hidden state passes, the embedding is learnt: a layer on top of the model.
            hidden = shape[0]
            return torch.cat((NOISE * torch.randn(hidden, hidden), torch.eye(hidden)), dim=1)
        if name.endswith("final_layernorm.weight"):
            return weights["decoder.final_norm.weight"].detach().float().clone()
        return torch.ones(shape)

    def forward(self, embedded: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """Hidden states after the final norm, `[texts, entries, hidden]`, of the embedded tokens at
        the entries' places (int64 `positions`) and the hidden states of the places before."""
        w = self._weight
        joined = torch.cat(
            (self._norm(embedded, "enorm", DEPTH), self._norm(hidden, "hnorm", DEPTH)), dim=-1
        )
        x = F.linear(joined, w(f"{DEPTH}eh_proj.weight"))
        x = x + self._attention(self._norm(x, "input_layernorm", MIXER), positions)
        gate, up = F.linear(
            self._norm(x, "pre_mlp_layernorm", DENSE), w(f"{DENSE}mlp.linear_fc1.weight")
        ).chunk(2, dim=-1)
        x = x + F.linear(F.silu(gate) * up, w(f"{DENSE}mlp.linear_fc2.weight"))
        return self._norm(x, "final_layernorm", DEPTH)

    def _attention(self, x: Tensor, positions: Tensor) -> Tensor:
        a, (texts, entries, _) = self._a, x.shape
        groups, dim = a.num_query_groups, a.kv_channels
        each = a.num_attention_heads // groups
        mixed = F.linear(x, self._weight(f"{MIXER}self_attention.linear_qkv.weight"))
        by_group = mixed.view(texts, entries, groups, each + 2, dim)
        query = by_group[..., :each, :].reshape(texts, entries, groups * each, dim)
        key, value = by_group[..., each, :], by_group[..., each + 1, :]
        turn = self.cos[positions][:, None], self.sin[positions][:, None]
        query, key = apply_rotary_reference(query, key, *turn)
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2),
            is_causal=True, enable_gqa=True,
        )  # fmt: skip
        flat = attended.transpose(1, 2).flatten(2)
        return F.linear(flat, self._weight(f"{MIXER}self_attention.linear_proj.weight"))

    def _norm(self, x: Tensor, name: str, prefix: str) -> Tensor:
        weight = self._weight(f"{prefix}{name}.weight")
        return F.rms_norm(x, weight.shape, weight, self._a.layernorm_epsilon)

    def _weight(self, name: str) -> Tensor:
        return self.values[_key(name)]

    def tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The layer by the names of `checkpoints/family_names.py`, in a dtype, on the host."""
        found: dict[str, Tensor] = {}
        for weight in mtp_weights(self._a):
            parameter = self._weight(weight.name).detach().cpu().to(dtype)
            for part, _region, place in weight.pieces(parameter):
                found[part] = place.reshape(weight.parts[part]).clone()
        return found


QKV = ("self_attention.linear_qkv.weight", "self_attention.linear_proj.weight")
FFN = ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight")


def _key(name: str) -> str:
    return name.replace(".", "/")  # a ParameterDict takes no dots


MARK = "\N{OBJECT REPLACEMENT CHARACTER}"
MOST_PROMPT_TOKENS = 96
ANSWER_TEMPERATURES = (0.0, 0.7, 1.0)
"""In turn: drafts are wanted at all of them."""


def opening_of(tokenizer: Tokenizer) -> tuple[str, str]:
    """What stands before a user's words in a conversation, and what ends them; a TokenizerError if
    the model has no chat template."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": MARK}], add_generation_prompt=False
    )
    before, _, behind = text.partition(MARK)
    return before, behind.strip()


def make_up(llm: LLM, count: int, most_tokens: int, seed: int) -> list[list[int]]:
    """Token ids of `count` conversations of one prompt and its answer, of `most_tokens` at most;
    the model has a tokenizer with a chat template."""
    tokenizer = llm.tokenizer
    assert tokenizer is not None, "opening_of has read it"
    before, end = opening_of(tokenizer)
    opening = tokenizer.tokenize(before, add_special_tokens=False)
    asked = [
        SamplingParams(
            num_tokens_to_generate=MOST_PROMPT_TOKENS, temperature=1.0, seed=seed + number,
            stop_words=[end] if end else [],
        )
        for number in range(count)
    ]  # fmt: skip
    questions = [_text(request) for request in llm.generate([opening] * count, asked, True)]
    prompts = [
        tokenizer.tokenize(
            tokenizer.apply_chat_template([{"role": "user", "content": question}]),
            add_special_tokens=False,
        )
        for question in questions
    ]
    wanted = [
        SamplingParams(
            num_tokens_to_generate=most_tokens, seed=seed + number,
            temperature=ANSWER_TEMPERATURES[number % len(ANSWER_TEMPERATURES)],
        )
        for number in range(count)
    ]  # fmt: skip
    answers = llm.generate(prompts, wanted, True)
    return [
        [*prompt, *answer.generated_tokens]
        for prompt, answer in zip(prompts, answers, strict=True)
        if answer.error is None
    ]


def _text(request: Any) -> str:
    if request.error is not None:
        raise request.error
    return str(request.generated_text).strip()


class HiddenStates(EngineListener):
    """Takes the hidden states of prompts while an engine prefills them: of the present texts, by
    request id, `[tokens, hidden]`, the model's dtype, on the host. The engine has lookahead 0, and
    neither prefix caching nor captured graphs."""

    def __init__(self, llm: LLM) -> None:
        self._llm, self._context = llm, llm.engine.context
        self._ids: list[int] = []
        self.found: dict[int, Tensor] = {}
        llm.engine.listeners.append(self)

    def of(self, texts: Sequence[Sequence[int]]) -> list[Tensor]:
        """Hidden states after the last norm, `[tokens, hidden]` of each text, on the host."""
        self.found = {}
        self._llm.generate(
            [list(text) for text in texts],
            SamplingParams(num_tokens_to_generate=1, temperature=0.0, termination_id=-1),
        )
        return [self.found[number] for number in sorted(self.found)]

    def launched(self, plan: StepPlan | None) -> None:
        """Note the chunks' requests: one that ends with the step has left its slot when the step is
        booked."""
        if plan is not None:
            chunks = plan.slots[plan.num_decode :]
            self._ids = self._context.slots.request_id[chunks].tolist()

    def resolved(self, step: LaunchedStep) -> None:
        """Copy what the step's chunks have."""
        plan, view = step.plan, self._context.gpu_view
        states: Any = view.hidden_states
        starts, first = plan.prefill_starts, plan.first_prefill_token
        for chunk, request in enumerate(self._ids):
            rows = states[first + int(starts[chunk]) : first + int(starts[chunk + 1])].cpu()
            before = self.found.get(request)
            self.found[request] = rows if before is None else torch.cat((before, rows))


class StateStore:
    """Hidden states of texts (token ids), computed by `trunk` when they are first asked for, and
    kept on `device` while they fit in `most_bytes`; what comes later is computed each time."""

    def __init__(
        self,
        trunk: HiddenStates,
        texts: Sequence[Sequence[int]],
        device: torch.device,
        most_bytes: int,
    ) -> None:
        self._trunk, self._texts, self._device = trunk, texts, device
        self._room = most_bytes
        self._kept: dict[int, Tensor] = {}

    def of(self, numbers: Sequence[int]) -> list[Tensor]:
        """`[tokens, hidden]` of each of these texts, on the device."""
        missing = [number for number in numbers if number not in self._kept]
        new: dict[int, Tensor] = {}
        if missing:
            states = self._trunk.of([self._texts[number] for number in missing])
            for number, state in zip(missing, states, strict=True):
                new[number] = state.to(self._device)
                if state.nbytes <= self._room:
                    self._room -= state.nbytes
                    self._kept[number] = new[number]
        return [self._kept[n] if n in self._kept else new[n] for n in numbers]

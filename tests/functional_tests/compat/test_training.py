"""Training with the engine's forward: Megatron's gradients, the log probs of generation and
`score`, and what is refused. On a GPU, in the mode whose bits do not depend on company, the gap
between training and generation is exactly 0."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor, nn

from megatron_async import SamplingParams
from megatron_async.compat.models.training import token_log_probs, use_engine_forward
from megatron_async.devices import CudaDevice
from megatron_async.errors import ConfigurationError
from megatron_async.lab import absent_gpu
from megatron_async.models.parallel_state import ensure_process_groups
from tests.support.compat_hybrids import MAMBA, hybrid_model, hybrids_on_a_cpu
from tests.support.compat_models import (
    VOCABULARY,
    config_of,
    engine_of,
    gpt_model,
    megatron_on_a_cpu,
)
from tests.support.ranks import run_ranks

DRY = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}
SHARED = {
    **EXPERTS,
    "moe_shared_expert_intermediate_size": 16,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_dtype": "fp32",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.01,
}
OWN_OUTPUT = {"share_embeddings_and_output_weights": False}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: gpt_model(DRY),
    "head norms": lambda: gpt_model({**DRY, "qk_layernorm": True}, OWN_OUTPUT),
    "experts": lambda: gpt_model({**DRY, **EXPERTS}),
    "shared expert": lambda: gpt_model({**DRY, **SHARED}),
    "hybrid": lambda: hybrid_model("*-*E", **DRY, **EXPERTS),
}


def some_ids(rows: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def log_probs(model: nn.Module, ids: Tensor, **changes: Any) -> Tensor:
    """Log probs but of first tokens, `[rows, length - 1]`; on a CPU Megatron wants to be given the
    causal mask."""
    length = ids.size(1)
    mask = torch.ones(1, 1, length, length).triu(1).bool() if ids.device.type == "cpu" else None
    given = {"attention_mask": mask, "runtime_gather_output": True, **changes}
    at = torch.arange(length, device=ids.device)[None]
    return token_log_probs(model(ids, at, **given)[:, :-1], ids[:, 1:])


def gradients(model: nn.Module, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    with hybrids_on_a_cpu():
        found = log_probs(model, ids)
        (found * torch.linspace(-1, 1, found.numel()).view_as(found)).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found.detach(), grads


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_megatrons(name: str) -> None:
    """In float32: a forward that differs by rounding, and gradients that differ as little."""
    ids, theirs, ours = some_ids(3, 70), MODELS[name](), MODELS[name]()
    names = list(ours.state_dict())
    assert use_engine_forward(ours) is ours
    assert list(ours.state_dict()) == names
    expected, wanted = gradients(theirs, ids)
    found, got = gradients(ours, ids)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-3)
    assert got.keys() == wanted.keys()
    assert len(got) > 8
    for name in got:
        scale = wanted[name].abs().max()
        assert (got[name] - wanted[name]).abs().max() <= 3e-4 * scale, name


def test_gradients_go_to_the_experts_of_the_forward() -> None:
    """Also where Megatron's router, which runs again in backward, would choose the others."""

    def trained_experts(sign: int) -> list[bool]:
        model: Any = gpt_model({**DRY, **EXPERTS, "num_layers": 1})
        use_engine_forward(model)
        mlp = model.decoder.layers[0].mlp
        with hybrids_on_a_cpu():
            found = log_probs(model, some_ids(1, 2))  # of one token
            with torch.no_grad():
                mlp.router.weight.mul_(sign)
            found.sum().backward()
        assert mlp.router.router_replay is None
        weights = [each.linear_fc2.weight.grad for each in mlp.experts.local_experts]
        return [grad is not None and bool(grad.any()) for grad in weights]

    assert trained_experts(-1) == trained_experts(1)
    assert sum(trained_experts(1)) == 2


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_steps_of_an_optimizer_reach_forward_and_engine(name: str) -> None:
    """After each step the training log probs are the engine's scores of the same model, up to
    float32's rounding: a CPU has no promise of bits."""
    model = MODELS[name]()
    use_engine_forward(model)
    ids = some_ids(2, 40)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    before = None
    for _ in range(3):
        optimizer.zero_grad()
        with megatron_on_a_cpu():
            found = log_probs(model, ids)
            found.mean().neg().backward()
        optimizer.step()
        assert before is None or found.mean() > before
        before = found.mean().detach()
    with torch.no_grad(), megatron_on_a_cpu():
        trained = log_probs(model, ids)
    engine = engine_of(model.train())
    scores = engine.score([row.tolist() for row in ids])
    scored = torch.tensor([each.prompt_log_probs for each in scores])
    torch.testing.assert_close(trained, scored, rtol=0, atol=2e-4)
    # A row alone, and in a longer batch padded behind.
    padded = torch.nn.functional.pad(ids[:1], (0, 9))
    with torch.no_grad(), megatron_on_a_cpu():
        torch.testing.assert_close(log_probs(model, padded)[:, :39], trained[:1])


@pytest.mark.parametrize("name", ["dense", "experts"])
def test_main_grad_of_distributed_data_parallel(name: str) -> None:
    """Hooks of parameters run in backward: their gradients are added to Megatron's buffers."""
    ids, model = some_ids(2, 20), MODELS[name]()
    _, wanted = gradients(MODELS[name](), ids)
    with megatron_on_a_cpu():
        around = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model)
        use_engine_forward(around)
    _, left = gradients(around, ids)
    assert not left
    for parameter_name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.main_grad, wanted[parameter_name], rtol=0,
            atol=3e-4 * float(wanted[parameter_name].abs().max()),
        )  # fmt: skip


def test_parameters_behind_a_frozen_embedding_learn() -> None:
    model: Any = gpt_model(DRY, OWN_OUTPUT)
    use_engine_forward(model).embedding.requires_grad_(False)
    _, grads = gradients(model, some_ids(1, 20))
    assert "decoder.layers.0.self_attention.linear_qkv.weight" in grads
    assert "embedding.word_embeddings.weight" not in grads


def test_refused_models() -> None:
    def refusal(model: nn.Module) -> str:
        with pytest.raises(ConfigurationError) as caught:
            use_engine_forward(model)
        return str(caught.value)

    assert "no_rope_freq=[0, 1]" in refusal(gpt_model({**DRY, "no_rope_freq": 2}))
    assert "hidden_dropout=0.1" in refusal(gpt_model({"attention_dropout": 0.0}))
    assert "normalization='LayerNorm'" in refusal(gpt_model({**DRY, "normalization": "LayerNorm"}))
    assert "layers of kind 'M'" in refusal(hybrid_model("M*-", **DRY, **MAMBA))
    model = gpt_model(DRY)
    use_engine_forward(model)
    assert "it has already" in refusal(model)


def test_refused_calls() -> None:
    model, ids = gpt_model(DRY), some_ids(2, 12)
    use_engine_forward(model)
    with megatron_on_a_cpu(), pytest.raises(ConfigurationError, match="is not causal"):
        log_probs(model, ids, attention_mask=torch.zeros(1, 1, 12, 12).bool())
    packed = PackedSeqParams(max_seqlen_q=12, max_seqlen_kv=12)
    with megatron_on_a_cpu(), pytest.raises(ConfigurationError, match="packed_seq_params"):
        log_probs(model, ids, packed_seq_params=packed)
    with megatron_on_a_cpu(), pytest.raises(RuntimeError, match=r"loss\.backward"):
        torch.autograd.grad(log_probs(model, ids).sum(), list(model.parameters()))
    with pytest.raises(ValueError, match="between -100 and"):
        token_log_probs(torch.zeros(2, 3, 8), torch.full((2, 3), -100))
    with pytest.raises(ValueError, match="one token for each row"):
        token_log_probs(torch.zeros(2, 3, 8), torch.zeros(2, 4).long())


def refused_layers(ffns: list[int]) -> list[str]:
    """What is refused of bfloat16 models with these inner sizes, on a Hopper GPU that is not there.
    It changes torch: for a process of its own."""
    kind = {"position_embedding_type": "rope", "pg_collection": ensure_process_groups()}
    absent_gpu._take_the_place_of_a_gpu([9, 0], 132, {})
    found = []
    with absent_gpu._AbsentMemory():
        for ffn in ffns:
            config = config_of(**DRY, ffn_hidden_size=ffn, bf16=True, params_dtype=torch.bfloat16)
            spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
            model = GPTModel(config, spec, VOCABULARY, 64, **kind).bfloat16().to(absent_gpu.GPU)
            try:
                use_engine_forward(model)
                found.append("")
            except ConfigurationError as error:
                found.append(str(error))
    return found


def test_layers_without_a_kernel_that_keeps_the_promise_are_refused_at_once() -> None:
    """Break it: leave `check_invariant_layers` to the engine."""
    [[served, refused]] = run_ranks(1, refused_layers, [48, 52])
    assert not served
    assert "the layer 'decoder.layers.1.mlp.linear_fc2'" in refused
    assert "train it with Megatron-Core's own forward" in refused


EIGHT_BILLION = {
    "num_layers": 4,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "kv_channels": 128,
    "ffn_hidden_size": 14336,
}
"""Four layers of Llama-3.1-8B."""
SMALL = {**EIGHT_BILLION, "hidden_size": 512, "num_attention_heads": 8, "num_query_groups": 2}
SMALL |= {"kv_channels": 64, "ffn_hidden_size": 1024}
SPARSE = {**SMALL, "num_moe_experts": 16, "moe_router_topk": 4, "moe_ffn_hidden_size": 256}
SPARSE |= {"moe_router_dtype": "fp32"}


def model_on_a_gpu(changes: dict[str, Any], vocabulary: int = 4096) -> Any:
    """A bfloat16 model with random weights and a sequence of up to 1,024 tokens."""
    seeded = {"perform_initialization": False, "masked_softmax_fusion": False}
    config = config_of(
        **{**DRY, **seeded, **changes}, bf16=True, params_dtype=torch.bfloat16,
        attention_softmax_in_fp32=True,
    )  # fmt: skip
    groups = ensure_process_groups()
    model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    model = GPTModel(
        config, spec, vocabulary, 1024, pg_collection=groups, position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )  # fmt: skip
    model = model.bfloat16().cuda()
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(
                0.0, (4.0 if "qkv" in name else 1.5) * parameter.size(-1) ** -0.5
            )
    return model


def rollouts(engine: Any) -> tuple[list[int], Tensor, Tensor, Tensor]:
    """Six rollouts of 64 tokens behind prompts of 5 to 190, in changing company: lengths of the
    prompts, all ids padded behind (int64 on the GPU), log probs of generation, and scores: float32
    `[6, longest - 1]`, 0 where there is none."""
    prompts = [row[: 5 + 37 * number].tolist() for number, row in enumerate(some_ids(6, 300))]
    params = SamplingParams(
        num_tokens_to_generate=64, termination_id=-1, return_log_probs=True,
        skip_prompt_log_probs=True,
    )  # fmt: skip
    made = engine.generate(prompts, params)
    whole = [[*one, *each.generated_tokens] for one, each in zip(prompts, made, strict=True)]
    scores = engine.score(whole)
    ids = torch.zeros(len(whole), max(map(len, whole)), dtype=torch.int64)
    generated, scored = torch.zeros(2, len(ids), ids.size(1) - 1)
    for row, tokens in enumerate(whole):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        first, last = len(prompts[row]) - 1, len(tokens) - 1
        generated[row, first:last] = torch.tensor(made[row].generated_log_probs)
        scored[row, :last] = torch.tensor(scores[row].prompt_log_probs)
    return [len(prompt) for prompt in prompts], ids.cuda(), generated, scored


GPU_SETTINGS = {
    "max_sequence_length": 1024,
    "max_requests": 8,
    "max_tokens": 128,
    "num_kv_blocks": 256,
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("changes", "vocabulary"),
    [(SMALL, 4096), (SPARSE, 4096), (EIGHT_BILLION, 128256)],
    ids=["dense", "experts", "8b"],
)
def test_no_gap_on_a_gpu(changes: dict[str, Any], vocabulary: int) -> None:
    """Log probs of generation = scores = training, before a step of the optimizer and after it, to
    the bit."""
    model = model_on_a_gpu(changes, vocabulary)
    use_engine_forward(model)
    settings = {**GPU_SETTINGS, "batch_invariant_mode": True}
    engine = engine_of(model, device=CudaDevice(), **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = None
    for version in range(2):
        prompts, ids, generated, scored = rollouts(engine)
        with torch.compiler.set_stance("force_eager"):
            trained = log_probs(model, ids)
            found = trained.detach().cpu()
            for row, prompt in enumerate(prompts):
                first, last = prompt - 1, prompt + 63
                assert torch.equal(found[row, :last], scored[row, :last])
                assert torch.equal(found[row, first:last], generated[row, first:last])
            trained.mean().neg().backward()
        with engine.weights_open(version + 1):
            optimizer.step()
        optimizer.zero_grad()
        assert before is None or not torch.equal(before, found[0, :4])
        before = found[0, :4]

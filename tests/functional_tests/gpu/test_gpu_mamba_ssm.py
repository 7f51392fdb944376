"""Models of Megatron's own Mamba-2 mixer, which calls mamba-ssm and causal-conv1d themselves.

Skipped where there is no GPU or a package is not installed (CONTRIBUTING.md has the command).
`test_compat_models_hybrid.py` has such models on a CPU, where plain PyTorch stands for them.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.activations import squared_relu
from megatron.core.ssm.mamba_mixer import MambaMixer

from megatron_async.devices import make_device
from tests.support.compat_hybrids import hybrid_model, hybrids_on_a_cpu, hybrids_on_a_gpu
from tests.support.compat_models import LENGTH, VOCABULARY, engine_of
from tests.support.harness import drain, greedy, random_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(1200),  # mamba-ssm tunes its kernels, unless MAMBA_DETERMINISTIC=1 is set
]

TOKENS = 12
PROMPTS = random_prompts(5, (200, 3, 128, 21), VOCABULARY)
"""mamba-ssm computes chunks of 128 tokens; the engine prefills in steps of 48."""
SIZES = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "mamba_state_dim": 128,
    "mamba_num_groups": 2,
    "masked_softmax_fusion": False,  # a kernel of apex
}
NEMOTRON = SIZES | {"gated_linear_unit": False, "activation_func": squared_relu}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mamba-2": ("MM-", SIZES),
    "in one group": ("MM-", SIZES | {"mamba_num_groups": 1}),
    "Nemotron-H": ("M-M*-", NEMOTRON),
}
HALF = {"params_dtype": torch.bfloat16, "bf16": True}
TOLERANCE = 0.01
"""Distance of log probs in float32."""


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages are there, and Triton makes a float32 product of three in TF32, which has 10
    bits."""
    pytest.importorskip("mamba_ssm", reason="mamba-ssm is not installed")
    pytest.importorskip("causal_conv1d", reason="causal-conv1d is not installed")
    monkeypatch.setenv("TRITON_F32_DEFAULT", "tf32x3")
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1, tp_rank=0, ep_rank=0, etp_rank=0)


@torch.no_grad()
def log_probs_of(model: Any, tokens: list[int]) -> torch.Tensor:
    """float32 `[tokens, vocabulary]` on the CPU, by Megatron's forward of a whole sequence."""
    device = next(model.parameters()).device
    ids = torch.tensor([tokens], device=device)
    positions = torch.arange(len(tokens), device=device)[None]
    mask = torch.ones(1, 1, len(tokens), len(tokens), device=device).triu(1).bool()
    with hybrids_on_a_cpu() if device.type == "cpu" else hybrids_on_a_gpu():
        logits = model(ids, positions, mask, runtime_gather_output=True)[0]
    return logits.float().log_softmax(-1).cpu()


def served(model: Any, device: Any) -> Iterator[tuple[list[int], int, torch.Tensor]]:
    """By the engine: prompt with answer, the prompt's length, log probs of all tokens but the
    first."""
    engine = engine_of(
        model, device=device, with_serving_config=True, lookahead=1, max_sequence_length=LENGTH
    )
    params = greedy(TOKENS, return_log_probs=True, skip_prompt_log_probs=False)
    for request, prompt in zip(engine.generate(PROMPTS, params), PROMPTS, strict=True):
        assert request.error is None
        assert len(request.generated_tokens) == TOKENS
        found = torch.tensor([*request.prompt_log_probs, *request.generated_log_probs])
        yield [*prompt, *request.generated_tokens], len(prompt), found
    drain(engine)
    engine.close()


def of_tokens(log_probs: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    return log_probs[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def check_float32(model: Any, device: Any) -> None:
    before = log_probs_of(model, PROMPTS[0])
    mixers = [module for module in model.modules() if isinstance(module, MambaMixer)]
    assert mixers
    chosen = set()
    for tokens, prompt, found in served(model, device):
        # Megatron's one call for training, and its calls of convolution, scan and norm.
        for in_one in (True, False) if device is not None else (True,):
            for mixer in mixers:
                mixer.use_mem_eff_path = in_one
            log_probs = log_probs_of(model, tokens)
            taken = of_tokens(log_probs, tokens)
            # Likeliest, or a near tie of the two arithmetics.
            best = log_probs[:-1].max(-1).values
            assert bool((best - taken)[prompt - 1 :].max() < TOLERANCE)
            torch.testing.assert_close(found, taken, rtol=1e-3, atol=TOLERANCE)
        chosen.update(tokens[prompt:])
    assert len(chosen) >= 5, "the tokens say too little"
    for mixer in mixers:
        mixer.use_mem_eff_path = True
    assert torch.equal(log_probs_of(model, PROMPTS[0]), before)


def check_bfloat16(name: str, device: Any) -> None:
    """The engine is as near to float32's log probs of the same weights as Megatron's own
    bfloat16."""
    model = hybrid_model("M-M*-", device=name, **NEMOTRON, **HALF).eval()
    exact = hybrid_model("M-M*-", device=name, **NEMOTRON).eval()
    for path, parameter in model.named_parameters():
        if "norm" in path:  # torch's begin as float32
            parameter.data = parameter.data.bfloat16()
    exact.load_state_dict(model.state_dict())
    mine, theirs = [], []
    for tokens, _prompt, found in served(model, device):
        truth = of_tokens(log_probs_of(exact, tokens), tokens)
        theirs.append(of_tokens(log_probs_of(model, tokens), tokens) - truth)
        mine.append(found - truth)
    error, allowed = (torch.cat(parts).square().mean().sqrt() for parts in (mine, theirs))
    print(f"root mean square errors of log probs: {error:.4f}, Megatron's own {allowed:.4f}")
    assert error < 1.5 * allowed
    assert allowed < 1, "rounding alone decides: the comparison says too little"


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_megatrons(name: str) -> None:
    pattern, changes = CASES[name]
    model = hybrid_model(pattern, device="cuda", **changes).eval()
    check_float32(model, make_device("cuda"))


def test_bfloat16_is_as_exact_as_megatrons() -> None:
    check_bfloat16("cuda", make_device("cuda"))

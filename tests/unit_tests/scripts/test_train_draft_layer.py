"""A draft layer learns what its model says, and the engine drafts with the file that is written."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_async import LLM, SamplingParams
from megatron_async.checkpoints import CheckpointError
from megatron_async.checkpoints.draft_layer import PATTERN as PATTERN_KEY
from megatron_async.checkpoints.draft_layer import save_draft_layer
from megatron_async.checkpoints.huggingface import save_huggingface
from megatron_async.checkpoints.registry import open_model
from tests.support.harness import TINY, make_model

SCRIPTS = Path(__file__).parents[3] / "scripts"
PLAIN = {"device": "cpu", "enable_prefix_caching": False, "num_kv_blocks": 64}


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPTS))
    import train_draft_layer

    yield train_draft_layer
    sys.path.remove(str(SCRIPTS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_huggingface(make_model(TINY), TINY, None, path)
    return path


def trained(script, folder, texts, epochs):
    """A layer, with its loss and agreement at the end."""
    torch.manual_seed(0)
    settings = argparse.Namespace(epochs=epochs, batch_tokens=200, lr=1e-2, passes=1, seed=0)
    architecture = replace(TINY, mtp_pattern=script.PATTERN, mtp_num_depths=1)
    with LLM(str(folder), lookahead=0, num_cuda_graphs=0, **PLAIN) as llm:
        model = llm.engine.controller.inference_wrapped_model.model
        weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
        embedding = weights["embedding.word_embeddings.weight"]
        rotary = llm.engine.context.gpu_view.rotary
        layer = script.DraftLayer(architecture, weights, rotary.cos, rotary.sin)
        trunk, head = script.HiddenStates(llm), weights.get("output_layer.weight", embedding)
        # Half of the states fit, the others are computed in each epoch.
        most = sum(map(len, texts)) * embedding.size(1) * embedding.itemsize // 2
        store = script.StateStore(trunk, texts, embedding.device, most)
        return layer, script.train(layer, store, texts, embedding, head, settings)


def test_what_is_learnt_is_drafted(script, folder, tmp_path):
    """Break it: `loss_of` with `theirs` of the place before, or `DraftLayer._attention` without
    rope, and drafts agree as seldom as before."""
    with LLM(str(folder), **PLAIN) as llm:
        prompts = [[3 + number, 5, 7] for number in range(6)]
        params = SamplingParams(temperature=0.0, num_tokens_to_generate=40, termination_id=-1)
        answers = llm.generate(prompts, params)
        texts = [
            [*prompt, *answer.generated_tokens]
            for prompt, answer in zip(prompts, answers, strict=True)
        ]
    shares = []
    for epochs in (1, 150):
        layer, (loss, agreed) = trained(script, folder, texts, epochs)
        file = tmp_path / "layer.safetensors"
        save_draft_layer(layer.tensors(torch.float32), script.PATTERN, {"seed": "0"}, file)
        drafting = {"speculative_method": "mtp", "num_speculative_tokens": 2}
        with LLM(str(folder), draft_layer=file, **drafting, **PLAIN) as llm:
            shares.append(script.acceptance(llm, prompts, 0.0, 40))
            again = llm.generate(prompts, params)
            assert [one.generated_tokens for one in again] == [
                one.generated_tokens for one in answers
            ]
    assert loss < 1
    assert agreed > 0.8
    # What the layer says in plain torch is what the engine drafts with it.
    assert shares[1][0] == pytest.approx(agreed, abs=0.1)
    assert shares[1][0] > shares[0][0] + 0.3


@pytest.mark.parametrize(
    ("tensors", "facts", "message"),
    [
        ({"x": torch.ones(1)}, {}, "no 'mtp_pattern'"),
        ({"x": torch.ones(1)}, {PATTERN_KEY: "*-"}, "'mtp.layers.0.enorm.weight', one of 13"),
    ],
)
def test_other_files_are_refused(folder, tmp_path, tensors, facts, message):
    save_file(tensors, tmp_path / "other.safetensors", metadata=facts)
    with pytest.raises(CheckpointError, match=message):
        LLM(str(folder), draft_layer=tmp_path / "other.safetensors", speculative_method="mtp",
            **PLAIN)  # fmt: skip


def test_models_that_take_no_layer(tmp_path):
    with pytest.raises(CheckpointError, match="a dummy model takes none"):
        open_model("dummy:tiny", tmp_path / "layer.safetensors")
    with pytest.raises(CheckpointError, match="not a readable safetensors file"):
        open_model("smollm2", tmp_path / "layer.safetensors")

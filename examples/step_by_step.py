"""The engine driven by hand: one step at a time, a request added while others are running.

    .venv/bin/python examples/step_by_step.py

The three objects have Megatron-Core's names and are made in its order; model, parameters and
reports are this project's. `megatron_script.py` is a script of Megatron-Core, with the import
changed.

With lookahead 1, a call of `step_modern` launches a step and then reports the step before it. So
the first call reports nothing, and the tokens of a new request are in the report of the call after
the one that launched its first step.
"""

import torch

from megatron_async import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    GPTInferenceWrapper,
    InferenceConfig,
    SamplingParams,
    TextGenerationController,
)
from megatron_async.checkpoints import open_model
from megatron_async.models.hybrid import build_model


def make_engine(model_name: str) -> DynamicInferenceEngine:
    """The trio on the CPU: context, controller, engine."""
    source = open_model(model_name)
    model = build_model(source.architecture, torch.float32, torch.device("cpu"))
    source.load_weights(model)
    config = InferenceConfig(device="cpu", lookahead=1, block_size_tokens=64, max_requests=8)
    context = DynamicInferenceContext(model.config, config)
    controller = TextGenerationController(GPTInferenceWrapper(model, context), source.tokenizer)
    return DynamicInferenceEngine(controller, context)


def main() -> None:
    """Two requests, and a third that joins the step of the sixth call."""
    engine = make_engine("smollm2")
    sampling = SamplingParams(num_tokens_to_generate=16, temperature=0.0)
    engine.add_request(0, "The capital of France is", sampling)
    engine.add_request(1, "The opposite of cold is", sampling)

    call = 0
    while engine.has_unfinished_requests():
        if call == 5:
            engine.add_request(2, "One, two, three,", sampling)
            print("-- request 2 added: this call launches its first step, the next one reports it")
        report = engine.step_modern()
        reported = report["active_request_ids"].tolist()
        print(f"call {call:2} reports tokens of requests {reported}")
        for request in report["finished_request_records"]:
            print(f"-- request {request.request_id}: {request.prompt!r} {request.generated_text!r}")
        call += 1
    engine.close()


if __name__ == "__main__":
    main()

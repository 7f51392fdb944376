"""Calls of Megatron-Bridge: a tokenizer of its own, and the server that it starts."""

import asyncio
import json
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from megatron.core.inference.apis import ServeConfig
from megatron.core.inference.config import InferenceConfig as MegatronConfig
from megatron.core.inference.config import (
    MambaInferenceStateConfig,
)
from megatron.core.inference.sampling_params import SamplingParams
from transformers import AutoTokenizer

from megatron_async.compat.inference.apis import MegatronAsyncLLM
from tests.support import compat_models
from tests.support.compat_models import gpt_model
from tests.support.patience import PATIENCE_S
from tests.support.served_demo import (
    demo_tokenizer,
)


class HFTokenizerAdapter:
    """What Megatron-Bridge wraps a tokenizer of transformers' library into."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        tokenizer.tokenizer = tokenizer
        self.eod = self.eos_id = tokenizer.eos_token_id
        self.bos, self.vocab_size = tokenizer.bos_token_id, len(tokenizer)

    def tokenize(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def detokenize(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))


def asked_at(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """The answer of a chat, once there is a server."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), headers
    )
    while True:
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
                return dict(json.load(reply))
        except urllib.error.URLError as error:
            if getattr(error, "code", 503) != 503:
                raise
            time.sleep(0.1)


def test_bridge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`async_text_generation.py` and `openai_server.py` of Megatron-Bridge, 067f987d: a host of
    0.0.0.0, the server's default, no key, and chats by the tokenizer that the adapter wraps."""
    monkeypatch.setattr(compat_models, "VOCABULARY", 49152)
    small = gpt_model({"num_layers": 1}, {"max_sequence_length": 64}).eval()
    demo_tokenizer().save(tmp_path)
    tokenizer = HFTokenizerAdapter(AutoTokenizer.from_pretrained(tmp_path))
    config = MegatronConfig(
        block_size_tokens=16, buffer_size_gb=0.01, max_requests=4, max_sequence_length=64,
        mamba_inference_state_config=MambaInferenceStateConfig.from_model(small),
        pg_collection=getattr(small, "pg_collection", None),
        materialize_only_last_token_logits=False, enable_chunked_prefill=False,
    )  # fmt: skip
    params = SamplingParams(
        temperature=1.0, top_k=1, top_p=0.0, return_log_probs=True, num_tokens_to_generate=4,
        skip_prompt_log_probs=False, termination_id=-1, top_n_logprobs=2, stop_words=None,
    )  # fmt: skip

    async def use() -> None:
        async with MegatronAsyncLLM(
            model=small, tokenizer=tokenizer, inference_config=config, use_coordinator=True,
            coordinator_host=None, coordinator_port=None,
        ) as llm:  # fmt: skip
            prompts = ["The sea is", "Hi"]
            results = await asyncio.gather(*(llm.generate(each, params) for each in prompts))
            assert not any(each.failed() for each in results)
            assert [len(each.generated_top_n_logprobs) for each in results] == [4, 4]
            assert len(results[0].prompt_log_probs) == 2
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            serving = ServeConfig("0.0.0.0", port, [], False, 1)
            serves = asyncio.ensure_future(llm.serve(serving, blocking=True))
            chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
            said = await asyncio.to_thread(asked_at, f"http://127.0.0.1:{port}", chat)
            assert len(said["choices"][0]["message"]["generation_token_ids"]) <= 4
            assert said["usage"]["prompt_tokens"] > 20
        await serves

    asyncio.run(asyncio.wait_for(use(), PATIENCE_S))

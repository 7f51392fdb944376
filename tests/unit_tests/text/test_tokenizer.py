"""Tokenizers. With hostile expressions, what they raise is an error of one request."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.models import BPE

from megatron_async.checkpoints import open_model
from megatron_async.checkpoints.registry import demo_file
from megatron_async.errors import RequestError
from megatron_async.text.tokenizer import Tokenizer, TokenizerError
from tests.support.quick_transformers import quick_gguf

TEXTS = [
    "",
    "Hello, world!",
    "  leading and trailing  \n\n\tblank ",
    "I'll say they've 1234567 items at 3.14 each; don't SHE'S",
    "Grüße, façade, naïve, e\u0301t\u00e9 Ångström",
    "你好,世界。こんにちは 안녕하세요",
    "emoji 🙂👩‍👩‍👧 \u200b zero\u00a0width",
    "def f(x):\n    return x ** 2  # comment\r\n",
    "<|im_start|>user\nhi<|im_end|>",
]
CHATS = [
    [{"role": "user", "content": "Hi <|im_end|>\n "}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Wie geht's?"},
        {"role": "assistant", "content": "Gut."},
        {"role": "user", "content": "世界"},
    ],
]


@pytest.fixture(scope="module")
def demo() -> Tokenizer:
    tokenizer = open_model("smollm2").tokenizer
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(scope="module")
def reference() -> Any:
    from transformers import AutoTokenizer

    with quick_gguf():
        return AutoTokenizer.from_pretrained(demo_file().parent, gguf_file=demo_file().name)


@pytest.mark.parametrize("text", TEXTS)
def test_demo_tokens_are_those_of_transformers(text: str, demo: Tokenizer, reference: Any) -> None:
    ids = demo.tokenize(text)
    assert ids == reference(text).input_ids
    assert ids == demo.tokenize(text, add_special_tokens=False)
    for skip in (True, False):
        assert demo.detokenize(ids, skip) == reference.decode(ids, skip_special_tokens=skip)
    assert demo.detokenize(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("messages", CHATS)
def test_demo_chats_are_those_of_transformers(
    messages: list[dict[str, str]], prompt: bool, demo: Tokenizer, reference: Any
) -> None:
    expected = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert demo.apply_chat_template(messages, prompt) == expected


def test_demo_special_tokens(demo: Tokenizer) -> None:
    assert (demo.eod, demo.bos, demo.eos_ids, demo.vocab_size) == (2, 1, (2,), 49152)


def test_saved_folder_is_the_same_tokenizer_here_and_in_transformers(demo: Tokenizer, tmp_path):
    from transformers import AutoTokenizer

    demo.save(tmp_path)
    ours, theirs = Tokenizer.from_folder(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert (ours.eos_ids, ours.bos) == (demo.eos_ids, demo.bos)
    assert theirs.eos_token_id == demo.eod
    for text in TEXTS:
        assert ours.tokenize(text) == demo.tokenize(text) == theirs(text).input_ids
    for messages in CHATS:
        assert ours.apply_chat_template(messages) == theirs.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )


def metadata(pre: str) -> dict[str, Any]:
    """A small byte-level BPE vocabulary as a GGUF file holds it."""
    backend = BackendTokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(TEXTS * 2, trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1])]
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens + specials,
        "tokenizer.ggml.token_type": [1] * len(tokens) + [3, 3, 4],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": len(tokens),
        "tokenizer.ggml.eos_token_id": len(tokens) + 2,
        "tokenizer.ggml.eot_token_id": len(tokens),
    }


def test_qwen2_pre_tokenizer_is_that_of_transformers() -> None:
    from transformers import Qwen2Tokenizer

    fields = metadata("qwen2")
    vocab = {token: index for index, token in enumerate(fields["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    theirs = Qwen2Tokenizer(vocab=vocab, merges=merges)
    theirs.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    ours = Tokenizer.from_gguf(fields, "file")
    assert ours.eos_ids == (vocab["<|im_end|>"], vocab["<|endoftext|>"])
    for text in TEXTS:
        assert ours.tokenize(text) == theirs(text).input_ids, text
    # Control tokens are skipped in text; user-defined ones are text.
    assert ours.detokenize(ours.tokenize(TEXTS[-1])) == "user\nhi<|im_end|>"


def test_llama_pre_tokenizer_is_that_of_transformers() -> None:
    from tokenizers import Regex
    from transformers.convert_slow_tokenizer import TikTokenConverter

    ours = Tokenizer.from_gguf(metadata("llama-bpe"), "file")
    pattern = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
    theirs = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    for text in TEXTS:
        assert ours.backend.pre_tokenizer.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)
        assert ours.tokenize(text) == [ours.bos, *ours.tokenize(text, add_special_tokens=False)]
    assert ours.backend.model.ignore_merges


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("dbrx", ["Don", "'t", "ĠHTTPServer", "Ġ", "123", "4", "Ġa", "/b"]),
        ("refact", ["Don", "'t", "ĠHTTPServer", "Ġ", "1", "2", "3", "4", "Ġa", "/", "b"]),
        ("gpt-2", ["Don", "'t", "ĠHTTPServer", "Ġ1234", "Ġa", "/", "b"]),
        ("granite-docling", ["Don", "'t", "ĠHTTPServer", "Ġ1234", "Ġa", "/", "b"]),
        ("tekken", ["Don", "'t", "ĠHTTPServer", "Ġ", "1", "2", "3", "4", "Ġa", "/b"]),
    ],
)
def test_words_of_other_pre_tokenizers(pre: str, words: list[str]) -> None:
    """By the published patterns of the models' own tokenizers."""
    ours = Tokenizer.from_gguf(metadata(pre), "file")
    found = ours.backend.pre_tokenizer.pre_tokenize_str("Don't HTTPServer 1234 a/b")
    assert [word for word, _ in found] == words
    assert ours.backend.model.ignore_merges == (pre == "tekken")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokenizer.ggml.pre": "gemma"}, "'gemma' is not supported; .*llama-bpe, .*, smollm"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre = None"),
        ({"tokenizer.ggml.model": "llama"}, "file: tokenizer.ggml.model = 'llama'"),
    ],
)
def test_unsupported_gguf_tokenizers(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_gguf(metadata("smollm") | fields, "file")


def test_end_tokens_of_all_files_count(demo: Tokenizer, tmp_path: Path) -> None:
    demo.save(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    found = Tokenizer.from_folder(tmp_path)
    assert found.eos_ids == (2, 0, 7)
    found.drop_ends_from(7)
    assert found.eos_ids == (2, 0)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, true]}')
    with pytest.raises(TokenizerError, match=r"eos_token_id = \[0, True\] must be token ids"):
        Tokenizer.from_folder(tmp_path)


def test_templates_of_older_files(demo: Tokenizer, tmp_path: Path) -> None:
    demo.save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    templates = [
        {"name": "tools", "template": "t"},
        {"name": "default", "template": "d{{ eos_token }}"},
    ]
    file.write_text(json.dumps(config | {"chat_template": templates}))
    assert Tokenizer.from_folder(tmp_path).apply_chat_template([]) == "d<|im_end|>"
    text = "{% generation %}{{ messages|tojson }}{% endgeneration %}"
    file.write_text(json.dumps(config | {"chat_template": text}))
    rendered = Tokenizer.from_folder(tmp_path).apply_chat_template([{"role": "ü", "content": "<"}])
    assert rendered == '[{"role": "ü", "content": "<"}]'


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("{% if %}", "invalid chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "rejects the messages"),
        ("{{ messages[0]['role'].upper() + 1 }}", "rejects the messages"),
    ],
)
def test_bad_chat_templates(template: str | None, message: str, demo: Tokenizer) -> None:
    tokenizer = Tokenizer(demo.backend, {}, (), template, "some/model")
    with pytest.raises(TokenizerError, match=f"some/model.*{message}"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json; copy"),
        (
            lambda f: (f / "tokenizer.json").rename(f / "tokenizer.model"),
            "has only tokenizer.model: save it with transformers",
        ),
        (lambda f: (f / "tokenizer.json").write_text("{"), "not a readable tokenizer"),
        (lambda f: (f / "tokenizer_config.json").write_text("{"), "not readable as JSON"),
    ],
)
def test_missing_and_damaged_files(damage: Callable[[Path], Any], message: str, demo, tmp_path):
    demo.save(tmp_path)
    damage(tmp_path)
    with pytest.raises(TokenizerError, match=message) as error:
        Tokenizer.from_folder(tmp_path)
    assert str(tmp_path) in str(error.value)


CATASTROPHIC = Regex(r"(a+)+$")


def hostile() -> Tokenizer:
    backend = BackendTokenizer(models.WordLevel({"a" * 40 + "b": 0, "c": 1}, unk_token="c"))
    backend.pre_tokenizer = pre_tokenizers.Split(CATASTROPHIC, "isolated")
    backend.decoder = decoders.Replace(CATASTROPHIC, "")
    return Tokenizer(backend, {}, [], None, "hostile")


def test_an_expression_that_gives_up_is_an_error_of_its_text() -> None:
    """The library's limit of tries ends the expression in a panic, which is no `Exception`."""
    tokenizer = hostile()
    with pytest.raises(RequestError, match="tokenized: PanicException"):
        tokenizer.tokenize("a" * 40 + "b")
    with pytest.raises(RequestError, match="made a text: PanicException"):
        tokenizer.detokenize([0])
    assert tokenizer.detokenize(tokenizer.tokenize("c")) == "c"


def test_a_bare_exception_of_the_library_is_one_too() -> None:
    backend = BackendTokenizer(models.WordLevel({"a": 0}, unk_token="none"))
    with pytest.raises(RequestError, match="tokenized: Exception"):
        Tokenizer(backend, {}, [], None, "no unknown token").tokenize("b")

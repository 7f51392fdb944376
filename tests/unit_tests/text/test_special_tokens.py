"""Added and special tokens in every spelling that files have, beside transformers: tokens of texts,
texts of tokens, streams of them, templates."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as BackendTokenizer
from tokenizers.models import BPE

from megatron_async import SamplingParams
from megatron_async.text.gguf_tokenizer import read_gguf
from megatron_async.text.token_text import TokenText
from megatron_async.text.tokenizer import Tokenizer, TokenizerError

TEXTS = ["hello <a>  world <b>. x<b>x <a>hello", "<a><b>", "hello", " <a> y<b> ", "a<a>b <b>c"]
PLAIN = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
CHAT = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {}}}]


def token(content: str, **flags: Any) -> dict[str, Any]:
    """A token in tokenizer_config.json, in the form of transformers' `save_pretrained`."""
    return {"__type": "AddedToken", "content": content, **PLAIN, "special": True, **flags}


def listed(content: str, **flags: Any) -> dict[str, Any]:
    return {"content": content, **PLAIN, "special": True, **flags}


def mapped(content: str, **flags: Any) -> dict[str, Any]:
    return {"content": content, **PLAIN, **flags}


@pytest.fixture(scope="module")
def trained() -> str:
    backend = BackendTokenizer(BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=272, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(["hello world the cat sat"] * 3, trainer)
    return backend.to_str()


@pytest.fixture
def folder(trained: str, tmp_path: Path) -> Callable[..., Path]:
    def make(
        added: list[AddedToken] | None = None,
        config: dict[str, Any] | None = None,
        files: dict[str, Any] | None = None,
    ) -> Path:
        backend = BackendTokenizer.from_str(trained)
        backend.add_tokens(added or [])
        backend.save(str(tmp_path / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast"} | (config or {})
        written = {"tokenizer_config.json": config, "config.json": {"model_type": "llama"}}
        for name, content in (written | (files or {})).items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / name).write_text(text)
        return tmp_path

    return make


IN_TOKENIZER = {
    "nothing in tokenizer.json": [],
    "a word there": [AddedToken("<a>", special=False, normalized=True, lstrip=True)],
    "both there": [AddedToken("<a>", special=True), AddedToken("<b>", special=False)],
}
CONFIGS: dict[str, dict[str, Any]] = {
    "no config": {},
    "names as texts": {"bos_token": "<a>", "eos_token": "hello", "pad_token": "hello"},
    "names as objects": {"bos_token": token("<a>", rstrip=True, special=False)},
    "null": {"bos_token": None, "eos_token": "<b>"},
    "decoder": {
        "added_tokens_decoder": {
            "272": listed("<a>", normalized=True, special=False), "273": listed("<b>", lstrip=True),
        },
    },
    "decoder and names": {
        "bos_token": "<a>",
        "added_tokens_decoder": {
            "272": listed("<a>", special=False, rstrip=True),
            "999": listed("<b>", single_word=True),
        },
    },
    "extra list": {"extra_special_tokens": ["<a>", "<b>"]},
    "extra object": {
        "extra_special_tokens": {"image_token": "<a>", "x": token("<b>", lstrip=True)}
    },
    "additional": {"additional_special_tokens": ["<a>", token("<b>", rstrip=True)]},
    "of the model's own": {"boi_token": "<a>", "eoi_token": token("<b>")},
    "of version 5": {"model_specific_special_tokens": {"image": "<a>"}, "sep_token": "<b>"},
    "decoder of another, without a flag": {
        "sep_token": "<a>",
        "eos_token": "<b>",
        "added_tokens_decoder": {"272": {"content": "<b>", "lstrip": True}},
    },
    "names in both files": {
        "image_token": "<a>", "extra_special_tokens": [{"__type": "AddedToken", "content": "<b>"}],
    },
    "split": {"bos_token": "<a>", "split_special_tokens": True},
}  # fmt: skip
FILES: dict[str, dict[str, Any]] = {
    "no file": {},
    "map": {
        "special_tokens_map.json": {"bos_token": "<b>", "eos_token": mapped("<a>", lstrip=True)}
    },
    "map of additional": {"special_tokens_map.json": {"additional_special_tokens": ["<b>", "<a>"]}},
    "map of extra": {"special_tokens_map.json": {"extra_special_tokens": [mapped("<a>"), "<b>"]}},
    "map of the model's own": {"special_tokens_map.json": {"image_token": "<b>"}},
    "added": {"added_tokens.json": {"<b>": 273, "<a>": 272}},
    "added and map": {
        "added_tokens.json": {"<b>": 300},
        "special_tokens_map.json": {"unk_token": "<b>", "bos_token": mapped("<a>")},
    },
}


def their(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.pairs
@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("added", IN_TOKENIZER)
def test_every_spelling_is_as_in_transformers(added: str, config: str, files: str, folder):
    path = folder(IN_TOKENIZER[added], CONFIGS[config], FILES[files])
    ours, theirs = Tokenizer.from_folder(path), their(path)
    assert ours.special_texts == theirs.special_tokens_map
    assert (ours.bos, ours.eod) == (theirs.bos_token_id, theirs.eos_token_id)
    assert repr(ours.backend.get_added_tokens_decoder()) == repr(theirs.added_tokens_decoder)
    for text in TEXTS:
        ids = ours.tokenize(text)
        assert ids == theirs(text).input_ids
        for skip in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skip)
            assert ours.detokenize(ids, skip) == expected
        stream = TokenText(ours, SamplingParams(termination_id=-1))
        pieces = [stream.push([number]) for number in ids]
        assert "".join([*pieces, stream.end("length")]) == theirs.decode(ids, True)
    # What is saved is the same tokenizer, here and there.
    (path / "saved").mkdir()
    ours.save(path / "saved")
    again = Tokenizer.from_folder(path / "saved")
    assert again.special_texts == ours.special_texts
    assert [again.tokenize(text) for text in TEXTS] == [ours.tokenize(text) for text in TEXTS]


NAMES = (
    "{{ bos_token }}|{{ eos_token }}|{{ image_token }}{% if tools %}|{{ tools|length }}{% endif %}"
    "\n"
)
TEMPLATES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a file": ({}, {"chat_template.jinja": NAMES}),
    "a text": ({"chat_template": NAMES}, {}),
    "a file before a text": ({"chat_template": "no"}, {"chat_template.jinja": NAMES}),
    "a list": (
        {
            "chat_template": [
                {"name": "tool_use", "template": "\n  T " + NAMES + "\n"},
                {"name": "rag", "template": "no"},
                {"name": "default", "template": "\n" + NAMES},
            ]
        },
        {},
    ),
    "further files": (
        {},
        {
            "chat_template.jinja": "{% if true %}\n  {%- set x = 3 %}\n  d{{ x }}\n{% endif %}\n\n",
            "additional_chat_templates/tool_use.jinja": "  {% set x = 4 %}\n t{{ x }} " + NAMES,
        },
    ),
    "only tools": ({}, {"additional_chat_templates/tool_use.jinja": NAMES}),
    "JSON with letters": ({"chat_template": "{{ {'ü': 1}|tojson(ensure_ascii=True) }}"}, {}),
}


@pytest.mark.parametrize("spelling", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_templates_are_as_in_transformers(spelling: str, tools: Any, folder: Callable[..., Path]):
    config, files = TEMPLATES[spelling]
    names = {"special_tokens_map.json": {"bos_token": "<a>", "eos_token": mapped("<b>")}}
    path = folder([], config | {"image_token": "<i>"}, files | names)
    ours, theirs = Tokenizer.from_folder(path), their(path)
    try:
        expected = theirs.apply_chat_template(CHAT, tools=tools, tokenize=False)
    except ValueError:  # several templates, and none for this chat
        with pytest.raises(TokenizerError, match="has templates tool_use, and none for this chat"):
            ours.apply_chat_template(CHAT, False, tools)
        return
    assert ours.apply_chat_template(CHAT, False, tools) == expected
    ours.save(path)
    again = Tokenizer.from_folder(path)
    assert again.apply_chat_template(CHAT, False, tools) == expected


def test_the_template_of_a_processor(folder: Callable[..., Path]) -> None:
    path = folder(files={"chat_template.json": {"chat_template": "p{{ messages|length }}"}})
    assert Tokenizer.from_folder(path).apply_chat_template(CHAT) == "p1"


@pytest.mark.pairs
@pytest.mark.parametrize(
    "named",
    [
        None,
        "PreTrainedTokenizerFast",
        "Qwen2TokenizerFast",
        "GPT2Tokenizer",
        "GPTNeoXTokenizerFast",
    ],
)
@pytest.mark.parametrize("eos", [None, "<b>"])
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "qwen3_5_text",
        "mamba2",
        "granitemoehybrid",
        "nemotron_h",
    ],
)
def test_special_tokens_of_classes(family: str, eos: str | None, named: str | None, folder):
    """Where no file names them, transformers' classes have some by themselves."""
    tokens = [AddedToken(text, special=True) for text in ("<|endoftext|>", "<|padding|>", "<b>")]
    config: dict[str, Any] = {"tokenizer_class": named} | ({"eos_token": eos} if eos else {})
    path = folder(tokens, config, {"config.json": {"model_type": family}})
    ours, theirs = Tokenizer.from_folder(path), their(path)
    assert ours.special_texts == theirs.special_tokens_map
    assert (ours.bos, ours.eod) == (theirs.bos_token_id, theirs.eos_token_id)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"add_bos_token": True, "bos_token": "<a>"}, "add_bos_token = True (tokenizer.json"),
        ({"add_eos_token": True, "eos_token": "<a>"}, "add_eos_token = True (tokenizer.json"),
        ({"fix_mistral_regex": True}, "fix_mistral_regex = True"),
        ({"new_setting": 3}, "new_setting (unknown)"),
        ({"added_tokens_decoder": {"999": listed("<a>")}}, "'<a>', one of 1, has id 999, but it"),
        ({"clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True,
          "clean_up_tokenization_spaces": True}, "clean_up_tokenization_spaces = True"),
        ({"add_bos_token": False, "bos_token": "<a>", "legacy": True, "model_max_length": 10**30,
          "clean_up_tokenization_spaces": True, "padding_side": "left", "add_prefix_space": None,
          "errors": "replace", "auto_map": {}}, ""),
    ],
)  # fmt: skip
def test_settings_that_are_not_honoured_are_told(config: dict[str, Any], said: str, folder, caplog):
    with caplog.at_level(logging.WARNING, "megatron_async"):
        Tokenizer.from_folder(folder([], config))
    assert len(caplog.records) == bool(said)
    assert said in caplog.text


def sentence_piece(normalizer: Any, pre_tokenizer: Any) -> str:
    """A tokenizer.json of Llama 2's kind."""
    letters = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁haltow"]
    vocabulary = {text: number for number, text in enumerate(letters)} | {"▁a": len(letters)}
    model = BPE(vocabulary, [("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = BackendTokenizer(model)
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    backend.add_special_tokens(letters[:3])
    return backend.to_str()


PREPEND = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
FIRST, NEVER = (
    pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False) for scheme in ("first", "never")
)


@pytest.mark.parametrize(
    ("parts", "config", "said"),
    [
        ((PREPEND, None), {"legacy": True, "add_prefix_space": True}, ""),
        ((PREPEND, None), {"legacy": False}, "legacy = False (tokenizer.json"),
        ((PREPEND, None), {"add_prefix_space": False}, "add_prefix_space = False (tokenizer"),
        ((None, FIRST), {"legacy": False, "add_prefix_space": None}, ""),
        ((None, FIRST), {"legacy": True}, "legacy = True (tokenizer.json"),
        ((None, NEVER), {"legacy": True, "add_prefix_space": False}, ""),
        ((None, NEVER), {"add_prefix_space": True}, "add_prefix_space = True (tokenizer"),
    ],
)
def test_a_tokenizer_json_counts_and_blanks_of_another_kind_are_told(
    parts: tuple[Any, Any],
    config: dict[str, Any],
    said: str,
    folder: Callable[..., Path],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """transformers 5 builds a `LlamaTokenizer` anew, whatever its file says; transformers 4 and
    `PreTrainedTokenizerFast` go by the file."""
    from transformers import PreTrainedTokenizerFast

    named = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    path = folder([], named | config)
    (path / "tokenizer.json").write_text(sentence_piece(*parts))
    ours = Tokenizer.from_folder(path)
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"))
    for text in ("a hat", "  a", "<s>a hat</s><s> a", "two\na"):
        ids = ours.tokenize(text)
        assert ids == theirs(text).input_ids
        assert ours.detokenize(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert len(caplog.records) == bool(said)
    assert said in caplog.text


@pytest.mark.parametrize(
    ("config", "files", "message"),
    [
        ({"added_tokens_decoder": {"x": listed("<a>")}}, {}, "tokens of .* are malformed"),
        ({"added_tokens_decoder": {"1": 7}}, {}, "7 is no token"),
        ({"added_tokens_decoder": [1]}, {}, "are malformed"),
        ({}, {"added_tokens.json": {"<a>": "x"}}, "are malformed"),
        ({"extra_special_tokens": [3]}, {}, "3 is no token"),
        ({"bos_token": 3}, {}, "3 is no token"),
        ({}, {"special_tokens_map.json": {"eos_token": {"text": "x"}}}, "is no token"),
        ({"model_specific_special_tokens": ["a"]}, {}, "are malformed"),
        ({"fast_tokenizer_files": ["tokenizer.4.0.0.json"]}, {}, "tokenizer.4.0.0.json"),
        ({"chat_template": [{"name": "default"}]}, {}, "chat templates must be texts"),
        ({"chat_template": {"default": 3}}, {}, "chat templates must be texts"),
    ],
)
def test_malformed_tokens_and_templates(
    config: dict[str, Any], files: dict[str, Any], message: str, folder: Callable[..., Path]
) -> None:
    path = folder([], config, files)
    with pytest.raises(TokenizerError, match=message) as error:
        Tokenizer.from_folder(path)
    assert str(path) in str(error.value)


def gguf(trained: str, **fields: Any) -> dict[str, Any]:
    model = json.loads(trained)["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), "<a>", "<b>"]
    plain = {
        "model": "gpt2", "pre": "smollm", "tokens": tokens, "token_type": [1] * 272 + [3, 3],
        "merges": [" ".join(pair) for pair in model["merges"]], "bos_token_id": 272,
        "eos_token_id": 273,
    }  # fmt: skip
    return {f"tokenizer.ggml.{key}": value for key, value in (plain | fields).items()}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, []),
        ({"add_bos_token": True}, [272]),
        ({"add_bos_token": True, "add_eos_token": True}, [272, 273]),
        ({"add_eos_token": True}, [273]),
        ({"pre": "llama-bpe", "add_eos_token": True}, [272, 273]),
        ({"pre": "llama-bpe", "add_bos_token": False}, []),
    ],
)
def test_tokens_that_a_gguf_file_adds(fields: dict[str, Any], expected: list[int], trained: str):
    found = Tokenizer.from_gguf(gguf(trained, **fields), "file")
    plain = found.tokenize("hello", add_special_tokens=False)
    assert found.tokenize("hello") == [
        *expected[: 272 in expected], *plain, *expected[272 in expected :],
    ]  # fmt: skip


def test_templates_of_a_gguf_file(trained: str) -> None:
    fields = gguf(trained) | {
        "tokenizer.chat_template": "d{{ bos_token }}",
        "tokenizer.chat_template.tool_use": "t{{ eos_token }}",
        "tokenizer.chat_templates": ["tool_use"],
    }
    found = Tokenizer.from_gguf(fields, "file")
    assert found.apply_chat_template(CHAT) == "d<a>"
    assert found.apply_chat_template(CHAT, tools=TOOLS) == "t<b>"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bos_token_id": 274}, "bos_token_id = 274, but there are 274 tokens"),
        ({"eot_token_id": 10**9}, "eot_token_id = 1000000000"),
        ({"token_type": [1, 3]}, "token_type is missing, or not of one entry a token"),
        ({"merges": None}, "merges is missing"),
        ({"merges": ["no such"]}, None),
        ({"merges": 7}, None),
        ({"tokens": [3] * 274}, None),
        ({"add_bos_token": True, "bos_token_id": "x"}, None),
    ],
)
def test_metadata_that_do_not_fit_together(fields: dict[str, Any], message: str | None, trained):
    said = f"file: tokenizer.ggml.{message}" if message else "file: the metadata of its tokenizer"
    with pytest.raises(TokenizerError, match=said):
        Tokenizer.from_gguf(gguf(trained, **fields), "file")


def test_unknown_metadata_of_a_tokenizer_are_told(trained: str, caplog):
    with caplog.at_level(logging.WARNING, "megatron_async"):
        read_gguf(gguf(trained, scores=[0.0], add_space_prefix=False), "file", TokenizerError)
        assert not caplog.records
        read_gguf(gguf(trained, lowercase=True), "file", TokenizerError)
    assert "not read: tokenizer.ggml.lowercase" in caplog.text

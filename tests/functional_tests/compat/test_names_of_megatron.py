"""Every public name of Megatron's trio has its answer; docs/megatron_names.md is made of these.

After a change of the table: `python -m tests.functional_tests.compat.test_names_of_megatron`.
"""

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megatron_async import (
    DynamicInferenceContext,
    DynamicInferenceEngine,
    GPTInferenceWrapper,
    TextGenerationController,
)
from megatron_async.compat.inference.apis import MegatronAsyncLLM, MegatronLLM
from megatron_async.compat.inference.inference_client import InferenceClient
from megatron_async.names_of_megatron import CLASSES, MAIN, OF_MAIN, ClassNames
from tests.support import compat_trio

PAGE = Path(__file__).resolve().parents[3] / "docs/megatron_names.md"
MARK = "<!-- What follows is made by tests/functional_tests/compat/test_names_of_megatron.py -->\n"
SOURCES = {
    "DynamicInferenceContext": ("contexts/base_context.py", "contexts/dynamic_context.py"),
    "DynamicInferenceEngine": ("engines/abstract_engine.py", "engines/dynamic_engine.py"),
    "TextGenerationController": (
        "text_generation_controllers/text_generation_controller.py",
    ),
}  # fmt: skip
BASES = {"BaseInferenceContext", "AbstractEngine"}


def theirs(kind: str) -> set[str]:
    """Public names of Megatron's class, its base class, and what their methods set on `self`."""
    root = Path(str(find_spec("megatron.core").origin)).parent / "inference"
    found: set[str] = set()
    for file in SOURCES[kind]:
        for made in ast.parse((root / file).read_text("utf-8")).body:
            if not isinstance(made, ast.ClassDef) or made.name not in {kind, *BASES}:
                continue
            for each in made.body:
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(each.name)
                elif isinstance(each, ast.Assign | ast.AnnAssign):
                    targets = each.targets if isinstance(each, ast.Assign) else [each.target]
                    found |= {ast.unparse(target) for target in targets}
            found |= {
                each.attr for each in ast.walk(made)
                if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)
                and ast.unparse(each.value) == "self"
            }  # fmt: skip
    # What only static batching sets.
    found -= {"sequence_len_offset", "batch_size_offset"}
    return {name for name in found if not name.startswith("_")}


def all_of(names: ClassNames) -> list[str]:
    groups = [names.own, names.compat, *names.otherwise.values(), *names.absent.values()]
    return [name for group in groups for name in group.split()]


@pytest.mark.parametrize("kind", CLASSES)
def test_the_table_has_every_name_once(kind: str) -> None:
    named = all_of(CLASSES[kind])
    assert set(named) == theirs(kind)
    assert len(named) == len(set(named))


def test_names_exist_or_are_answered(tiny_model: Any) -> None:
    from tests.support.compat_trio import make_compat_engine
    from tests.support.harness import make_engine

    for engine, is_own in (
        (make_engine(tiny_model), True),
        (make_compat_engine(tiny_model), False),
    ):
        trio = {type(e).__name__: e for e in (engine, engine.context, engine.controller)}
        for kind, names in CLASSES.items():
            exist = names.own.split() + ([] if is_own else names.compat.split())
            others = [name for group in names.otherwise.values() for name in group.split()]
            for name in exist + others:
                assert hasattr(trio[kind], name), name
            for name in names.answers.keys() - set(exist):
                with pytest.raises(AttributeError) as error:
                    getattr(trio[kind], name)
                assert str(error.value) == (
                    f"{kind!r} object has no attribute {name!r}, which Megatron's has: "
                    f"{names.answers[name]} (docs/megatron_names.md)"
                )
        if not is_own:
            trio["KVBlockCounts"] = engine.context.kv_block_allocator
            trio |= {each.__name__: each for each in (MegatronLLM, MegatronAsyncLLM)}
            trio["InferenceClient"] = InferenceClient("tcp://127.0.0.1:1")
            for kind, newer in OF_MAIN.items():
                for name in newer.compat.split():
                    assert hasattr(trio[kind], name), name
                for name, text in newer.answers.items():
                    if name not in newer.compat.split():
                        with pytest.raises(AttributeError, match=text[:20]):
                            getattr(trio[kind], name)
        for each in [engine, engine.context, engine.controller]:
            with pytest.raises(AttributeError, match=r"Did you mean 'lookahead=1'\?$"):
                _ = each.async_scheduling
            with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
                _ = each.nothing
        with pytest.raises(AttributeError, match=r"Did you mean 'lookahead=1'\?$"):
            engine.context.config.async_scheduling = True
        engine.close()


@pytest.mark.parametrize(
    ("kind", "argument", "answer"),
    [
        (DynamicInferenceContext, "params_dtype", "model_config describes the model."),
        (DynamicInferenceContext, "block_size_tokens", "InferenceConfig(block_size_tokens=...)."),
        (DynamicInferenceContext, "max_requests_override", "Did you mean 'max_requests'?"),
        (DynamicInferenceEngine, "enable_cuda_graph", "Did you mean 'num_cuda_graphs'?"),
        (DynamicInferenceEngine, "random_seed", "Did you mean 'inference_sampling_seed'?"),
        (DynamicInferenceEngine, "termination_id", "SamplingParams(termination_id=...)."),
        (DynamicInferenceEngine, "pg_collection", "the InferenceConfig of megatron_async.compat"),
        (TextGenerationController, "pp_group", "the model's own process groups serve"),
        (TextGenerationController, "nothing", "takes no argument 'nothing'."),
        (GPTInferenceWrapper, "inference_wrapper_config", "the model's configuration says it"),
    ],
)
def test_arguments_of_older_constructors(kind: Any, argument: str, answer: str) -> None:
    class Fixed(kind):
        def __init__(self, *args: Any, **values: Any) -> None:
            super().__init__(None, None)

    for made in (kind, getattr(compat_trio, kind.__name__)):
        with pytest.raises(TypeError, match=rf"{kind.__name__}\(\) takes no arg") as error:
            made(None, None, **{argument: 1})
        assert answer in str(error.value)
    assert isinstance(object.__new__(kind), kind)
    assert isinstance(Fixed.__new__(Fixed, **{argument: 1}), kind), "it may hand on what it takes"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("add_request", (0, [1, 2], 4)),
        ("update_requests", ([1], [2], [3])),
        ("transfer_bookkeeping_to_gpu", ()),
    ],
)
def test_megatrons_arguments_of_methods_that_are_another_thing(
    name: str, arguments: tuple[Any, ...]
) -> None:
    context = object.__new__(compat_trio.DynamicInferenceContext)
    with pytest.raises(TypeError, match=rf"^{name}\(\).*`engine.step_modern\(\)`.*names.md"):
        getattr(context, name)(*arguments)


def test_arguments_that_megatrons_llm_lacks() -> None:
    for kind in (MegatronLLM, MegatronAsyncLLM):
        with pytest.raises(TypeError, match=rf"^{kind.__name__}.*Did you mean 'max_requests'"):
            kind(model=None, tokenizer=None, max_num_seqs=3)
        with pytest.raises(TypeError, match=r"a setting, InferenceConfig\(max_requests=...\)"):
            kind(model=None, tokenizer=None, max_requests=3)


def test_a_property_raises_its_own_error() -> None:
    class Context(DynamicInferenceContext):
        @property
        def length(self) -> int:
            return self.slots.no_such_array  # type: ignore[attr-defined]

    context = object.__new__(Context)
    vars(context)["slots"] = ()
    with pytest.raises(AttributeError, match="'tuple' object has no attribute 'no_such_array'"):
        _ = context.length


def listing(names: ClassNames) -> str:
    rows = {"our class, so `compat` too": names.own, "`compat`": names.compat}
    rows |= {f"another thing ({text})": each for text, each in names.otherwise.items()}
    rows |= {f"not here ({text})": each for text, each in names.absent.items()}
    lines = []
    for text, each in ((text, each) for text, each in rows.items() if each):
        lines.append(f"- {text}: {', '.join(f'`{name}`' for name in sorted(each.split()))}")
    return "\n".join(lines) + "\n"


def made() -> str:
    parts = []
    for kind, names in CLASSES.items():
        own, compat = len(names.own.split()), len(names.compat.split())
        absent = len(names.answers) - compat
        other = len(all_of(names)) - own - compat - absent
        parts.append(
            f"\n## {kind}\n\n{len(all_of(names))} names. Of our class: {own}; of `compat` besides: "
            f"{compat}; another thing: {other}; not here: {absent}.\n\n{listing(names)}"
        )
    parts.append(f"\n## Main ({MAIN})\n")
    parts += [f"\n### {kind}\n\n{listing(names)}" for kind, names in OF_MAIN.items()]
    return "".join(parts)


def test_the_page_is_the_table() -> None:
    assert PAGE.read_text("utf-8").partition(MARK)[2] == made()


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text("utf-8").partition(MARK)[0] + MARK + made(), "utf-8")

"""`Metadata`: the keys of a GGUF file, each read or accounted for.

What a key means is llama.cpp's (`src/llama-model.cpp`, `src/llama-context.cpp`); names are those of
gguf-py's `constants.py`. A reader asks for a key by `get`, `size` or `number`, so it is known at
the end which keys nobody asked for: `finish` refuses those that change the computation.

`general.sampling.*` in a GGUF file: what the model's makers say of its sampling.

The converter of llama.cpp writes a model's `generation_config.json` so (`Keys.General` of the gguf
package from 0.18; llama.cpp's `common/common.cpp` reads them).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from megatron_async.checkpoints.errors import CheckpointError
from megatron_async.checkpoints.files import check_number, check_size
from megatron_async.checkpoints.settings import is_one_of, tell_unknown
from megatron_async.models.architecture import LINEAR, RopeScaling

logger = logging.getLogger("megatron_async")

ONLY: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_gating_func": (0,),
    "expert_weights_norm": (False,),
    "expert_weights_scale": (0, 1),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "use_parallel_residual": (False,),
    "pooling_type": (0,),
    "swin_norm": (False,),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "embedding_scale": (0, 1),
    "attn_logit_softcapping": (0,),
    "router_logit_softcapping": (0,),
    "final_logit_softcapping": (0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.output_scale": (0, 1),
    "attention.temperature_scale": (0,),
    "attention.shared_kv_layers": (0,),
    "rope.scaling.attn_factor": (1,),
    "rope.scaling.alpha": (0, 1),
}
"""Keys that change the computation, behind the architecture's prefix, and the values that leave it
as it is."""
MATTERS = re.compile(
    "rope|attention|attn|expert|moe|scal|norm|softcap|clamp|ssm|residual|activation|sparsity|window"
)
"""A key of such a name that nobody knows is refused: what it means would be guessed."""
YARN_ALONE = "only rope of the types yarn and longrope has it"
HARMLESS = {
    "rope.scaling.finetuned": "llama.cpp only shows it",
    "rope.scaling.original_context_length": YARN_ALONE,
    "rope.scaling.yarn_log_multiplier": YARN_ALONE,
    "rope.scaling.yarn_ext_factor": YARN_ALONE,
    "rope.scaling.yarn_attn_factor": YARN_ALONE,
    "rope.scaling.yarn_beta_fast": YARN_ALONE,
    "rope.scaling.yarn_beta_slow": YARN_ALONE,
    "tensor_data_layout": "it names the converter's source; llama.cpp reads it nowhere",
    "expert_feed_forward_length": "there are no experts (`expert_count`)",
    "expert_shared_feed_forward_length": "there are no experts (`expert_count`)",
}
"""Keys behind the architecture's prefix that leave the computation as it is, and why."""
GENERAL = re.compile(
    r"GGUF\.\w+|general\.(name|author|version|organization|finetune|basename|description|url|doi"
    r"|uuid|repo_url|tags|languages|datasets?|quantized_by|size_label|file_type|alignment"
    r"|license(\.\w+)*|source\.[\w.]+|base_model\.[\w.]+|dataset\.[\w.]+|sampling\.\w+)"
    r"|split\.(no|tensors\.count)|quantize\.imatrix\.\w+|tokenizer\..+"
)
"""Keys about the file, not about the computation; or that other readers account for (sampling, the
tokenizer)."""
WITHOUT_PREFIX = ("general.", "split.", "tokenizer.")
"""Beginnings of keys that are no architecture's."""
REFUSED = {
    "adapter.": "it is an adapter, and adapters are not applied: merge it into its model",
    "clip.": "it is the vision or audio part of a model: give the file of the language model",
    "imatrix.": "it holds statistics for quantising, not a model",
    "diffusion.": "it is no model that writes a text from left to right",
    "xielu.": "its activation is not supported",
}
"""Beginnings of keys of files that are no models of these architectures."""


class Metadata:
    """What a GGUF file (`where`) says of its model, by the fields of `gguf.GGUFReader`. What is
    missing, malformed or not served is a `CheckpointError` that names file and key. Keys are given
    without the architecture's prefix.

    Attributes:
        kind: the architecture.
    """

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self.fields = fields
        self.where = where
        self._taken: set[str] = set()
        self.kind: str = str(self.get("general.architecture", ""))

    def get(self, key: str, *default: Any) -> Any:
        """A value; the default, if one is given, where it is missing."""
        key = self._whole(key)
        self._taken.add(key)
        field = self.fields.get(key)
        if field is not None:
            return field.contents()
        if default:
            return default[0]
        raise CheckpointError(f"{self.where}: metadata {key!r} is missing; the file is incomplete")

    def size(self, key: str, *default: int) -> int:
        """A positive integer."""
        return check_size(self.get(key, *default), self._whole(key), self.where)

    def number(self, key: str, *default: float) -> float:
        """A positive finite number, `as_written`."""
        return as_written(check_number(self.get(key, *default), self._whole(key), self.where))

    def only(self, key: str, *supported: Any) -> Any:
        """A value that is one of these; the first of them where it is missing."""
        value = self.get(key, supported[0])
        if not is_one_of(value, supported):
            raise self.error(key, f"is not supported (only {_listed(supported)})")
        return value

    def per_layer(self, key: str, layers: int, *default: int) -> tuple[int, ...]:
        """A number for each layer, 0 or a size: a list, or a size for all."""
        value = self.get(key, *default)
        if not isinstance(value, list):
            return (self.size(key, *default),) * layers
        if len(value) != layers:
            raise CheckpointError(
                f"{self.where}: {self._whole(key)} has {len(value)} numbers, but block_count is "
                f"{layers}; fetch the file again"
            )
        return tuple(
            each if type(each) is int and each == 0 else check_size(each, key, self.where)
            for each in value
        )

    def _whole(self, key: str) -> str:
        return key if key.startswith(WITHOUT_PREFIX) else f"{self.kind}.{key}"

    def token_id(self, key: str) -> int | None:
        """A token's id; None where it is missing."""
        value = self.get(key, None)
        if value is not None and (type(value) is not int or value < 0):
            raise self.error(key, "must be a token's id")
        return value

    def error(self, key: str, problem: str) -> CheckpointError:
        """An error that names the file, a key and its value."""
        value = self.get(key, None)
        return CheckpointError(f"{self.where}: {self._whole(key)} = {value!r:.200} {problem}")

    def check_file(self) -> None:
        """Check that the file is a whole model."""
        for beginning, why in REFUSED.items():
            key = next((key for key in self.fields if key.startswith(beginning)), None)
            if key is not None:
                raise CheckpointError(f"{self.where}: has {key}: {why}")
        if self.get("general.type", "model") != "model":
            raise self.error("general.type", "is not supported (only 'model')")
        if self.get("split.count", 1) not in (0, 1):
            raise self.error(
                "split.count",
                "means that the model is in several files, which are not read together; join them "
                "with llama.cpp's llama-gguf-split --merge",
            )
        if self.get("general.quantization_version", 2) != 2:
            raise self.error("general.quantization_version", "is not supported (only 2)")

    def linear_scaling(self) -> RopeScaling | None:
        """Scaling of rope by one factor for all frequencies, which is what a factor without a type
        means; None where there is none."""
        key = "rope.scaling.type"
        scaling = self.get(key, LINEAR)
        if scaling not in ("none", LINEAR):
            raise self.error(key, f"is not supported (only 'none' and {LINEAR!r})")
        names = ["rope.scaling.factor", "rope.scale_linear"]  # the old name
        self._taken.update(map(self._whole, names))
        name = next((name for name in names if self._whole(name) in self.fields), None)
        if name is None or self.get(name) == 0:
            return None
        factor = self.number(name)
        if scaling == "none" and factor != 1:
            logger.warning(
                "%s: %s = %s is not used, as %s = 'none'.",
                self.where, self._whole(name), factor, self._whole(key),
            )  # fmt: skip
        return None if scaling == "none" or factor == 1 else RopeScaling(factor, kind=LINEAR)

    def finish(self, vocabulary: int, head_dim: int, epsilon: float) -> None:
        """Account for the keys that no reader has asked for: those that change the computation are
        refused."""
        same = {
            "vocab_size": vocabulary,
            "embedding_length_out": self.get("embedding_length"),
            "attention.layer_norm_epsilon": epsilon,
            "attention.scale": 1 / math.sqrt(head_dim),
        }
        unknown = []
        for key in self.fields.keys() - self._taken:
            name = key.removeprefix(f"{self.kind}.")
            if GENERAL.fullmatch(key) or (name != key and name in HARMLESS):
                continue
            value = self.fields[key].contents()
            if name != key and name in same:
                is_off = name == "attention.scale" and value == 0
                if not is_off and not _is_close(value, same[name]):
                    raise self.error(name, f"is not supported (only {same[name]:g})")
            elif name != key and name in ONLY:
                if value not in ONLY[name]:
                    raise self.error(name, f"is not supported (only {_listed(ONLY[name])})")
            elif name != key and MATTERS.search(name):
                raise self.error(name, "is not known, and may change the computation")
            else:
                unknown.append(key)
        if unknown:
            tell_unknown(self.where, self.kind, tuple(sorted(unknown)))


def as_written(value: float) -> float:
    """A number as short as its 32 bits tell it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _is_close(value: Any, expected: float) -> bool:
    return isinstance(value, int | float) and math.isclose(value, expected, rel_tol=1e-5)


def _listed(supported: tuple[Any, ...]) -> str:
    return " or ".join(map(str, supported))


SAMPLING_PREFIX = "general.sampling."
SAMPLING_NAMES = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Name in the file: name in generation_config.json."""
SAMPLING_OFF = {"mirostat": 0, "xtc_probability": 0.0}
"""Ways of sampling that are not served, and the value that is off."""


def generation_config(metadata: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Fields of a `generation_config.json` from a file's metadata that begin with
    `SAMPLING_PREFIX`; a warning names what is not served."""
    found: dict[str, Any] = {}
    for key, value in metadata.items():
        name = key.removeprefix(SAMPLING_PREFIX)
        if name in SAMPLING_OFF and value != SAMPLING_OFF[name]:
            logger.warning("%s: %s = %s is not served: answers go without it.", source, key, value)
        if name in SAMPLING_NAMES:
            found[SAMPLING_NAMES[name]] = as_written(value) if isinstance(value, float) else value
    return found

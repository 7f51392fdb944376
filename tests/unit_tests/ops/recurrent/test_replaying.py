"""A token's bits are those of its sequence alone: in one prefill, in chunks of any lengths, decoded
token by token, with drafts, and in any company. In the interpreter small layers, whose products add
up as those of a GPU; there, real ones too."""

import itertools
from copy import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_async import InferenceConfig
from megatron_async.device_state.recurrent_state import make_recurrent_state
from megatron_async.errors import ConfigurationError
from megatron_async.models.sizes import DeltaSizes, MambaSizes
from megatron_async.ops.recurrent.recurrent_pools import MAX_WIDTH, replaying_rule
from tests.unit_tests.ops.recurrent.recurrent_cases import Chunk, Decode, Runner, Sequence
from tests.unit_tests.ops.recurrent.recurrent_layers import KERNELS, DeltaLayer, MambaLayer
from tests.unit_tests.ops.triton_interpreter import INTERPRETED

pytestmark = pytest.mark.usefixtures("poisoned_memory", "matrix_units")
SIXTEEN_BITS = torch.float16 if INTERPRETED else torch.bfloat16
TILES, MORE = 2, 7
"""A sequence: whole tiles, and tokens of the next."""
WIDTHS = st.integers(1, 5) if INTERPRETED else st.sampled_from((1, 4))
NANO = {"heads": 64, "head_dim": 64, "groups": 8, "d_state": 128}
QWEN = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128}
LAYERS = {
    "small": (MambaLayer, {"heads": 2, "groups": 1}),
    "odd": (MambaLayer, {"heads": 3, "groups": 1, "head_dim": 20, "d_state": 32}),
    "delta": (DeltaLayer, {"key_heads": 2}),
    "odd delta": (DeltaLayer, {"key_heads": 1, "key_dim": 32, "value_dim": 48}),
}
if not INTERPRETED:
    LAYERS |= {
        "nemotron-3-nano": (MambaLayer, NANO),
        "wide state": (MambaLayer, {"heads": 24, "head_dim": 128, "groups": 1, "d_state": 256}),
        "qwen3-next": (DeltaLayer, QWEN),
        "wide keys": (DeltaLayer, {"key_dim": 256, "value_dim": 256, "value_heads": 8}),
    }


class Walk:
    """A sequence's way through steps, in row 1, with a second one in row 0 beside it at times."""

    def __init__(self, layer, sequence, lag=0):
        # Rings of one length: each would compile its own kernels.
        rule = replaying_rule(lag, layer.tile)
        options = {"rule": rule, "width": 5, "spare": layer.tile + 1 - lag}
        self.runner = Runner(layer, KERNELS[layer.kind], **options)
        self.sequence, self.other = copy(sequence), copy(sequence)
        self.sequence.row, self.other.row, self.sequence.length = 1, 0, 0
        self.other.length, self.outputs = 0, []

    def prefill(self, tokens, is_last=False, in_company=False):
        chunks = [Chunk(self.sequence, tokens, is_last)]
        if in_company:
            self.runner.step(chunks=[Chunk(self.other, 3)])
            chunks.insert(0, Chunk(self.other, 7, True))
        self.outputs.append(self.runner.step(chunks=chunks)[-1])
        return self

    def decode(self, until, width=1, right=1, in_company=False):
        while self.sequence.length < until:
            count = min(right, until - self.sequence.length)
            rows = [Decode(self.sequence, count)]
            if in_company and 0 < self.other.length < len(self.other.inputs):
                rows.insert(0, Decode(self.other))
            outputs = self.runner.step(rows, width=width, dummies=int(in_company))
            self.outputs.append(outputs[-1])
        return self

    def check(self, outputs, states):
        """Outputs, and the state at whatever border it stands."""
        assert torch.equal(torch.cat(self.outputs), outputs[: self.sequence.length])
        tile, lag = self.runner.rule[:2]
        border = int(self.runner.base[1]) // tile
        assert border >= self.sequence.length // tile - 1 - lag // tile
        assert torch.equal(self.runner.pools.state[1], states[border])


@pytest.fixture(params=LAYERS)
def whole(request, device):
    """A layer, a sequence, the outputs of one prefill, and the states at borders."""
    kind, sizes = LAYERS[request.param]
    layer = kind(**sizes, dtype=SIXTEEN_BITS, device=device)
    layer.gates, tile = layer.replayed_gates, layer.tile
    sequence = Sequence(layer, TILES * tile + MORE + 2 * MAX_WIDTH, row=1)
    at_once, by_tiles = Walk(layer, sequence), Walk(layer, sequence)
    at_once.prefill(TILES * tile + MORE)
    states = [torch.zeros_like(at_once.runner.pools.state[1])]
    for _ in range(TILES):
        by_tiles.prefill(tile)
        states.append(by_tiles.runner.pools.state[1].clone())
    by_tiles.prefill(MORE)
    [outputs] = at_once.outputs
    for walk in (at_once, by_tiles):
        walk.check(outputs, states)
    return layer, sequence, outputs, states


def test_a_token_has_its_bits_however_it_comes(whole):
    layer, sequence, *expected = whole
    tile, tokens = layer.tile, len(expected[0])
    for chunks in ((1, tile - 2, 2, tokens - tile - 1), (tile - 1, tile + 1, MORE)):
        walk = Walk(layer, sequence)
        for number, count in enumerate(chunks):
            walk.prefill(count, in_company=not number)
        walk.check(*expected)
    start = max(tokens - 10, 1) if INTERPRETED else 1
    walk = Walk(layer, sequence).prefill(start, is_last=True, in_company=True)
    walk.decode(tokens, in_company=True).check(*expected)
    # A step of one row has kernels of its own.
    walk = Walk(layer, sequence).prefill(tokens - 10, is_last=True)
    walk.decode(tokens).check(*expected)
    # Four query tokens, of which three are kept; the state two borders behind where it stands.
    walk = Walk(layer, sequence, lag=tile + 1).prefill(tile - 6).prefill(tile - 4, is_last=True)
    walk.decode(tokens, width=4, right=3).check(*expected)


@given(data=st.data())
@settings(
    max_examples=4 if INTERPRETED else 12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_way(whole, data):
    """Chunks, then decode steps of some width, on any lag, beside another row or not."""
    layer, sequence, *expected = whole
    draw, tokens = data.draw, len(expected[0])
    least = max(tokens - 25, 2) if INTERPRETED else 2
    prompt = draw(st.integers(least, tokens - 1), "prompt")
    cuts = sorted({0, prompt, *draw(st.sets(st.integers(1, prompt - 1), max_size=3), "cuts")})
    beside = draw(st.booleans(), "beside")
    walk = Walk(layer, sequence, draw(st.sampled_from((0, 1, layer.tile + 1)), "lag"))
    for begin, end in itertools.pairwise(cuts):
        walk.prefill(end - begin, is_last=end == prompt, in_company=beside and not begin)
    width = draw(WIDTHS, "width")
    walk.decode(tokens, width, draw(st.integers(1, width), "right"), beside).check(*expected)


def test_an_engine_has_rings_of_a_tile():
    """Rings have the tile of its layers; no common tile, or unaligned input rows, are refused."""
    delta, mamba = DeltaSizes(2, 16, 4, 16), MambaSizes(4, 16, 16, 2)

    def state(*layers):
        config = InferenceConfig(max_requests=3, batch_invariant_mode=True)
        return make_recurrent_state(layers, config, torch.bfloat16, torch.device("cpu"))

    for sizes, layer in ((delta, DeltaLayer()), (mamba, MambaLayer())):
        found = state(sizes)
        found.allocate()
        assert found.rule == replaying_rule(0, layer.tile)
        [pools] = found._layers
        ring = pools.ring_gates.shape[1:]
        assert ring == (layer.tile + 1, layer.replayed_gates, layer.state_size[0])
    with pytest.raises(ConfigurationError, match="with Gated DeltaNet beside Mamba-2 layers"):
        state(delta, mamba)
    with pytest.raises(ConfigurationError, match=r"with 6 value heads .* a multiple of 4"):
        state(DeltaSizes(2, 16, 6, 16))

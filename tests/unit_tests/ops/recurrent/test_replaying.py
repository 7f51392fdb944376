"""A token's bits are those of its sequence alone: in one prefill, in chunks of any lengths, decoded
token by token, with drafts, and in any company. In the interpreter small layers, whose products add
up as those of a GPU; there, real ones too."""

import itertools
from copy import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_async.ops.recurrent.recurrent_pools import MAX_WIDTH, TILE, replaying_rule
from tests.unit_tests.ops.recurrent.recurrent_cases import Chunk, Decode, Runner, Sequence
from tests.unit_tests.ops.recurrent.recurrent_layers import KERNELS, MambaLayer
from tests.unit_tests.ops.triton_interpreter import INTERPRETED

pytestmark = pytest.mark.usefixtures("poisoned_memory", "matrix_units")
SIXTEEN_BITS = torch.float16 if INTERPRETED else torch.bfloat16
TOKENS = 135
LAGS = (0, 1, TILE + 1)
WIDTHS = st.integers(1, 5) if INTERPRETED else st.sampled_from((1, 4))
LAYERS = {
    "small": {"heads": 2, "groups": 1},
    "odd": {"heads": 3, "groups": 1, "head_dim": 20, "d_state": 32},
}
if not INTERPRETED:
    LAYERS |= {
        "nemotron-3-nano": {"heads": 64, "head_dim": 64, "groups": 8, "d_state": 128},
        "wide state": {"heads": 24, "head_dim": 128, "groups": 1, "d_state": 256},
    }


class Walk:
    """A sequence's way through steps, in row 1, with a second one in row 0 beside it at times."""

    def __init__(self, layer, sequence, lag=0):
        # Rings of one length: each would compile its own kernels.
        options = {"rule": replaying_rule(lag), "width": 5, "spare": LAGS[-1] - lag}
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
            if in_company and self.other.length:
                rows.insert(0, Decode(self.other))
            outputs = self.runner.step(rows, width=width, dummies=int(in_company))
            self.outputs.append(outputs[-1])
        return self

    def check(self, outputs, states):
        """Outputs, and the state at whatever border it stands."""
        assert torch.equal(torch.cat(self.outputs), outputs[: self.sequence.length])
        border = int(self.runner.base[1]) // TILE
        assert border >= self.sequence.length // TILE - 1 - self.runner.rule.lag // TILE
        assert torch.equal(self.runner.pools.state[1], states[border])


@pytest.fixture(params=LAYERS)
def whole(request, device):
    """A layer, a sequence, the outputs of one prefill, and the states at borders."""
    layer = MambaLayer(**LAYERS[request.param], dtype=SIXTEEN_BITS, device=device)
    sequence = Sequence(layer, TOKENS + MAX_WIDTH, row=1)
    at_once, by_tiles = Walk(layer, sequence).prefill(TOKENS), Walk(layer, sequence)
    states = [torch.zeros_like(at_once.runner.pools.state[1])]
    for _ in range(TOKENS // TILE):
        by_tiles.prefill(TILE)
        states.append(by_tiles.runner.pools.state[1].clone())
    by_tiles.prefill(TOKENS % TILE)
    [outputs] = at_once.outputs
    for walk in (at_once, by_tiles):
        walk.check(outputs, states)
    return layer, sequence, outputs, states


def test_a_token_has_its_bits_however_it_comes(whole):
    layer, sequence, *expected = whole
    for chunks in ((1, 62, 2, 70), (63, 65, 7)):
        walk = Walk(layer, sequence)
        for tokens in chunks:
            walk.prefill(tokens, in_company=tokens == chunks[0])
        walk.check(*expected)
    start = 125 if INTERPRETED else 1
    walk = Walk(layer, sequence).prefill(start, is_last=True, in_company=True)
    walk.decode(TOKENS, in_company=True).check(*expected)
    # Four query tokens, of which three are kept; the state two borders behind where it stands.
    walk = Walk(layer, sequence, lag=LAGS[-1]).prefill(40).prefill(80, is_last=True)
    walk.decode(TOKENS, width=4, right=3).check(*expected)


@given(data=st.data())
@settings(
    max_examples=4 if INTERPRETED else 12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_way(whole, data):
    """Chunks, then decode steps of some width, on any lag, beside another row or not."""
    layer, sequence, *expected = whole
    draw = data.draw
    prompt = draw(st.integers(110 if INTERPRETED else 2, TOKENS - 1), "prompt")
    cuts = sorted({0, prompt, *draw(st.sets(st.integers(1, prompt - 1), max_size=3), "cuts")})
    beside = draw(st.booleans(), "beside")
    walk = Walk(layer, sequence, draw(st.sampled_from(LAGS), "lag"))
    for begin, end in itertools.pairwise(cuts):
        walk.prefill(end - begin, is_last=end == prompt, in_company=beside and not begin)
    width = draw(WIDTHS, "width")
    walk.decode(TOKENS, width, draw(st.integers(1, width), "right"), beside).check(*expected)

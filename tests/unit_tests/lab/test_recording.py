"""Files that are no recordings, or not of this version, say so; fits find what they should."""

import gzip
import json
from dataclasses import asdict

import numpy as np
import pytest

from megatron_async import InferenceConfig, SamplingParams
from megatron_async.choices import Question
from megatron_async.errors import RecordingError
from megatron_async.lab import recording
from megatron_async.lab.fit import fit_machine
from megatron_async.lab.model_less import ModelLessEngine
from megatron_async.lab.model_shape import ModelShape
from megatron_async.lab.recorder import Recorder
from megatron_async.lab.recording import Launched, Recording, Resolved, load_recording
from megatron_async.models.dummy_shapes import DUMMY_SHAPES
from megatron_async.planning.graph_shapes import MixedRow

SHAPE = ModelShape.of_architecture(DUMMY_SHAPES["tiny"], "float32")
CONFIG = InferenceConfig(num_kv_blocks=16, block_size_tokens=8)


class Ones:
    def sample(self, plan, context):
        return np.ones(plan.num_rows, np.int32), np.ones(plan.num_rows, np.int32)


@pytest.fixture
def path(tmp_path):
    """A recording of a few steps."""
    path = tmp_path / "run.rec"
    engine = ModelLessEngine(SHAPE, CONFIG, Ones())
    recorder = Recorder(engine, path)
    engine.generate([[1, 2, 3]], SamplingParams(num_tokens_to_generate=4))
    recorder.close()
    return path


def lines(path):
    with gzip.open(path, "rt") as file:
        return file.read().splitlines(keepends=True)


def write(path, content):
    with gzip.open(path, "wt") as file:
        file.writelines(content)


def test_the_lines_of_a_recording(path):
    first, *rest = map(json.loads, lines(path))
    assert (first["format"], first["version"]) == ("megatron_async recording", 3)
    assert first["config"]["num_kv_blocks"] == 16
    kinds = [record[0] for record in rest]
    assert kinds[0] == "add"
    assert rest[0][3:] == [[1, 2, 3], {"num_tokens_to_generate": 4}]
    assert kinds[-1] == "end"
    recording = load_recording(path)
    assert recording.is_complete
    assert recording.shape == SHAPE
    assert recording.config == CONFIG
    resolved = [event for event in recording.events if isinstance(event, Resolved)]
    assert [event.tokens for event in resolved] == [[1]] * 4


def test_other_files_are_refused(tmp_path, path):
    other = tmp_path / "other.rec"
    other.write_text("no gzip at all")
    with pytest.raises(RecordingError, match="is not a recording"):
        load_recording(other)
    write(other, ["plain text\n"])
    with pytest.raises(RecordingError, match="is not a recording"):
        load_recording(other)
    write(other, [])
    with pytest.raises(RecordingError, match="is not a recording"):
        load_recording(other)
    with pytest.raises(FileNotFoundError):
        load_recording(tmp_path / "missing.rec")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 1}, "version 1, but this program reads version 3"),
        ({"config": {**asdict(CONFIG), "warp": 9}}, "the setting 'warp'"),
        ({"shape": {**asdict(SHAPE), "num_warps": 9}}, "the model's field 'num_warps'"),
    ],
)
def test_other_versions_are_refused(path, change, message):
    first, *rest = lines(path)
    write(path, [json.dumps({**json.loads(first), **change}) + "\n", *rest])
    with pytest.raises(RecordingError, match=message):
        load_recording(path)
    if "version" in change:
        write(path, [json.dumps({**json.loads(first), "version": 2}) + "\n", *rest])
        assert load_recording(path).is_complete


def test_damaged_lines_are_named(path):
    content = lines(path)
    write(path, [*content[:3], '["launch"]\n', *content[4:]])
    with pytest.raises(RecordingError, match="line 4 is damaged"):
        load_recording(path)
    write(path, [*content[:3], '["warp",1]\n', *content[4:]])
    with pytest.raises(RecordingError, match="line 4 is damaged"):
        load_recording(path)


HEADER = {"format": recording.FORMAT, "version": recording.VERSION}


@pytest.mark.parametrize(
    ("header", "line", "said"),
    [
        (HEADER, "", "header"),
        (HEADER | {"config": {}, "shape": {}}, "", "header"),
        (HEADER | {"config": [1], "shape": {}}, "", "1"),
        (HEADER | {"config": {"num_kv_blocks": {}}, "shape": {}}, "", "header"),
        (None, "[" * 200_000 + "\n", "line 2 is damaged"),
        (None, "{}\n", "line 2 is damaged"),
        (None, "9" * 5000 + "\n", "line 2 is damaged"),
        (None, " " * 100_000 + "\n", "100000 characters or more"),
    ],
)
def test_hostile_recordings_are_refused(path, header, line, said, monkeypatch):
    """Also a line that gzip has made small."""
    if said.startswith("100000"):
        monkeypatch.setattr(recording, "MOST_CHARACTERS", 100_000)
    first = lines(path)[0] if header is None else json.dumps(header) + "\n"
    write(path, first + line)
    with pytest.raises(RecordingError, match=said):
        load_recording(path)


@pytest.mark.parametrize("how", ["a line short", "mid-line", "gzip cut off"])
def test_truncated_recordings(path, how):
    content, whole = lines(path), load_recording(path)
    if how == "a line short":
        write(path, content[:-1])
    elif how == "mid-line":
        write(path, [*content[:-2], content[-2][:9]])
    else:
        path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(RecordingError, match="has no end after line"):
        load_recording(path)
    recording = load_recording(path, allow_truncated=True)
    assert not recording.is_complete
    assert recording.events == whole.events[: len(recording.events)]


def test_the_rows_used_are_in_the_header(tmp_path):
    """And a recording of before there were any is read as well."""
    path = tmp_path / "run.rec"
    engine = ModelLessEngine(SHAPE, CONFIG, Ones())
    choices, rule = engine.context.choices, MixedRow([64], 64)
    choices.keep(Question("mixed steps", {"vocab": 8}, rule, lambda row: None), rule, False)
    Recorder(engine, path).close()
    first, *rest = lines(path)
    header = json.loads(first)
    (row,) = header.pop("choices")
    assert (row["kind"], row["shape"], row["source"]) == ("mixed steps", {"vocab": 8}, "measured")
    assert row["value"] == {"sizes": [64], "step_tokens": 64}
    assert load_recording(path).config == CONFIG
    del header["config"]["choices"]
    write(path, [json.dumps(header) + "\n", *rest])
    assert load_recording(path).config == CONFIG


def test_only_a_fresh_engine_is_recorded(tmp_path):
    engine = ModelLessEngine(SHAPE, CONFIG, Ones())
    recorder = Recorder(engine, tmp_path / "a.rec")
    with pytest.raises(RecordingError, match="already"):
        Recorder(engine, tmp_path / "b.rec")
    recorder.close()
    recorder.close()
    engine.generate([[1]], SamplingParams(num_tokens_to_generate=1))
    with pytest.raises(RecordingError, match="before the first"):
        Recorder(engine, tmp_path / "b.rec")


def test_a_file_that_cannot_be_written(tmp_path):
    engine = ModelLessEngine(SHAPE, CONFIG, Ones())
    with pytest.raises(OSError, match="No such file"):
        Recorder(engine, tmp_path / "nowhere" / "a.rec")
    recorder = Recorder(engine, "/dev/full")
    results = engine.generate([[1]], SamplingParams(num_tokens_to_generate=1))
    assert results[0].succeeded(), "the run goes on"
    with pytest.raises(RecordingError, match="incomplete"):
        recorder.close()


def test_fit_finds_the_times_of_a_machine():
    recording = Recording(CONFIG, SHAPE, {"device": "made up"})
    random, now = np.random.default_rng(0), 0.0
    for step in range(60):
        work = tuple(int(random.integers(1, high)) for high in (100, 50, 5000))
        took = 500 + 7 * work[0] + 3 * work[1] + 0.25 * work[2]
        recording.events.append(Launched(step, [], work, (11.0, 22.0, now)))
        recording.device_spans[step] = (now, now + took)
        now += took + 100
        recording.events.append(Resolved(step, [], None, None, (33.0, now)))
    machine = fit_machine(recording)
    device, cpu = machine.device, machine.cpu
    assert device.tokens_us[0][1] == pytest.approx(500)
    found = (device.prefill_us, device.decode_us, device.kv_us)
    assert found == pytest.approx((7, 3, 0.25))
    assert (cpu.prepare_us, cpu.launch_us, cpu.resolve_us) == (11, 22, 33)
    assert machine.reach.most[1] == max(e.work[1] for e in recording.events[::2])
    del recording.events[20:]
    with pytest.raises(RecordingError, match="20 are needed"):
        fit_machine(recording)


def test_a_fit_does_not_stretch_what_never_varied():
    """A run of one prompt: every step has one row, whose time is the base's."""
    recording, now = Recording(CONFIG, SHAPE, {"device": "made up"}), 0.0
    for step in range(40):
        took = 900 + 2.0 * step
        recording.events.append(Launched(step, [], (0, 1, step + 1), (1.0, 1.0, now)))
        recording.device_spans[step] = (now, now + took)
        now += took + 100
        recording.events.append(Resolved(step, [], None, None, (1.0, now)))
    machine = fit_machine(recording)
    assert machine.device.decode_us == machine.device.prefill_us == 0
    assert machine.device.time_us(0, 1, 20) == pytest.approx(938, abs=1)
    assert machine.device.time_us(0, 69, 20) == pytest.approx(938, abs=1)
    assert machine.reach.varies == (False, False, True)
    beyond = machine.reach.exceeded_by((0, 69, 30))
    assert beyond == ["69 decode tokens (recorded: 1, always, so more of them are taken to cost "
                      "nothing)"]  # fmt: skip

"""`examples/megatron_script.py`, by changed import and by the hook, beside Megatron's forward."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.patience import PATIENCE_S

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "megatron_script.py"
RUNS = """
import contextlib, io, json, runpy, sys
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron_async.compat.__main__ import main as by_hook
from megatron_async.compat.cpu_stand_ins import stand_in

changed, own = sys.argv[1:]
stand_in()

def greedy(model, letters):
    tokens = letters.tokenize("The sea")
    with torch.no_grad():
        for _ in range(16):
            ids, length = torch.tensor([tokens]), len(tokens)
            mask = torch.ones(1, 1, length, length).tril() < 0.5
            logits = model.eval()(ids, torch.arange(length)[None], mask)
            tokens.append(int(logits[0, -1].argmax()))
    return letters.detokenize(tokens[-16:])

def forget():
    dist.destroy_process_group()
    parallel_state.destroy_model_parallel()

def printed(run):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        run()
    forget()
    return out.getvalue().splitlines()

script = runpy.run_path(changed)
model = script["make_model"]()
truth = [greedy(model, script["LETTERS"])]
loss = script["train_step"](model.train(), "The sea is wide. " * 3)
truth.append(greedy(model, script["LETTERS"]))
forget()
found = [printed(lambda: runpy.run_path(changed, run_name="__main__"))]
found.append(printed(lambda: by_hook(["--cpu", own])))
print(json.dumps({"truth": truth, "loss": loss, "found": found}))
"""


def test_the_example(tmp_path: Path) -> None:
    own = tmp_path / "mine.py"
    text = EXAMPLE.read_text().replace("megatron_async.compat.inference", "megatron.core.inference")
    assert "megatron.core.inference.apis" in text
    own.write_text(text)
    command = [sys.executable, "-W", "ignore", "-c", RUNS, str(EXAMPLE), str(own)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    before, after = told["truth"]
    assert before != after
    for lines in told["found"]:
        assert lines[0] == f"before: {before!r}"
        assert lines[1] == f"loss:   {round(told['loss'], 2)}"
        assert lines[2] == f"after:  {after!r}"

"""Writes `CODEOWNERS` in GitHub's syntax: a line for each sub-package, by the part it belongs to.

python scripts/codeowners.py
"""

from __future__ import annotations

from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "CODEOWNERS"
MAINTAINERS = "maintainers@users.noreply.a-seed-8449540f.example"
"""All commits' author. Whoever shares the work puts a GitHub name into `OWNERS`."""
HEAD = f"""\
# Written by scripts/codeowners.py. GitHub asks the owners of the last line that matches.
* {MAINTAINERS}
"""
PARTS = {
    "context: the books, and the device's view of them": (
        "contexts", "device_state", "rollback", "ops",
    ),
    "controller: a step's work on the device": (
        "captured_steps", "devices", "model_inference_wrappers", "models", "pipeline",
        "text_generation_controllers",
    ),
    "engine: requests, the loop, ranks, what is counted": (
        "communication", "engines", "observe", "parity", "profiling", "ranks", "requests", "text",
    ),
    "models from outside": ("checkpoints", "compat"),
    "services and tools": ("cli", "fleet", "lab", "server", "serving", "simulation"),
}  # fmt: skip
"""Sub-packages by part."""
OWNERS = dict.fromkeys(PARTS, MAINTAINERS)


def text() -> str:
    """The file's text."""
    lines = [HEAD]
    for part, rooms in PARTS.items():
        lines.append(f"# {part}\n")
        lines += [f"/megatron_async/{room}/ {OWNERS[part]}\n" for room in sorted(rooms)]
    return "".join(lines)


if __name__ == "__main__":
    FILE.write_text(text(), "utf-8")

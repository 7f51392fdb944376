"""Writes `CODEOWNERS` in GitHub's syntax: a line for each sub-package, by the part it belongs to.

python scripts/codeowners.py
"""

from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "CODEOWNERS"
MAINTAINERS = "maintainers@users.noreply.a-seed-8449540f.example"
"""All commits' author. Everybody who shares the work puts a GitHub name into `OWNERS`."""
HEAD = f"""\
# Written by scripts/codeowners.py. GitHub asks the owners of the last line that matches.
* {MAINTAINERS}
"""
PARTS = {
    "context: the books, and the device's view of them": (
        "planning", "device_state", "rollback", "ops",
    ),
    "controller: a step's work on the device": (
        "step", "models", "devices",
    ),
    "engine: requests, the loop, ranks, what is counted": (
        "engine", "requests", "text", "observe", "ranks", "communication",
    ),
    "models from outside": ("checkpoints", "compat", "updates"),
    "services and tools": ("serving", "server", "cli", "ray", "lab"),
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

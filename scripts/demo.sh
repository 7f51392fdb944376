#!/usr/bin/env bash
# Set up, then the main job: a real model answers several prompts at once through the async engine.
# Arguments go to `megatron-async generate`:  bash scripts/demo.sh --lookahead 0
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
unset PYTHONDONTWRITEBYTECODE # compiled modules halve the time that torch and Megatron-Core import
exec .venv/bin/megatron-async generate --model smollm2 --lookahead 1 --max-new-tokens 128 \
    --prompt "What is the capital of France?" \
    --prompt "Give me three tips for a good night's sleep." \
    --prompt "Write one sentence about the sea." \
    --prompt "Explain gravity to a child in two sentences." \
    --prompt "What does a CPU do?" \
    "$@"

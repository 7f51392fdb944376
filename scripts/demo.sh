#!/usr/bin/env bash
# Set up, then the main job: a real model answers several prompts at once through the async engine.
# Arguments go to `megatron-async generate`:  bash scripts/demo.sh --lookahead 0
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh
unset PYTHONDONTWRITEBYTECODE # compiled modules halve the time that torch and Megatron-Core import
exec .venv/bin/megatron-async generate --model smollm2 --chat --lookahead 1 \
    --prompt "What is the capital of France?" \
    --prompt "Why is the sky blue? Answer in two sentences." \
    --prompt "Write a haiku about autumn." \
    --prompt "Name three uses of a paper clip." \
    --prompt "Explain in one sentence what a graphics processor does." \
    "$@"

#!/usr/bin/env bash
# Ask a running server by the clients that people use, each in an environment of its own, and write
# what came out of it to docs/records/clients.md. Rows of clients that are not asked stay.
#
#   bash scripts/check_clients.sh                     # starts `megatron-async serve smollm2` itself
#   bash scripts/check_clients.sh openai-1 litellm    # only these
#   BASE_URL=http://host:8000/v1 API_KEY=k MODEL=m bash scripts/check_clients.sh
#
# Environments are made by uv in $CLIENT_ENVS (default: ~/.cache/megatron-async-clients) and kept;
# they come from PyPI, as do vLLM's and llama.cpp's own tests. Nothing else of the network is used.
# guidellm (5.7 GB) runs only when named.
set -uo pipefail
cd "$(dirname "$0")/.."

ENVS=${CLIENT_ENVS:-${XDG_CACHE_HOME:-$HOME/.cache}/megatron-async-clients}
REPORT=${REPORT:-docs/records/clients.md}
TIME_LIMIT=${TIME_LIMIT:-1200}
ALL=(openai-1 openai-2 openai anthropic inspect-ai litellm instructor pydantic-ai langchain-openai
     llm lm-eval aiperf schemathesis llama.cpp vllm)
# The names that vLLM's tests ask for.
NAMES=(Qwen/Qwen3-0.6B HuggingFaceH4/zephyr-7b-beta HuggingFaceTB/SmolLM2-135M-Instruct
       Qwen/Qwen2.5-1.5B-Instruct gpt-3.5-turbo-instruct)
# Whose tests are run: of the packages' sources on PyPI.
export LLAMA_CPP_PYTHON=0.3.36 VLLM=0.33.0
names=("$@")
[ ${#names[@]} -gt 0 ] || names=("${ALL[@]}")
for name in "${names[@]}"; do
    case " ${ALL[*]} guidellm " in
    *" $name "*) ;;
    *) sed -n '2,/^set /{/^set /!s/^# \{0,1\}//p}' "$0"
       case $name in -h | --help) exit 0 ;; esac
       echo "There is no client '$name': name some of ${ALL[*]} guidellm, or none for all but the last." >&2
       exit 2 ;;
    esac
done
UV=$(command -v uv .venv/bin/uv | head -1)
[ -n "$UV" ] || { echo "uv makes the environments: bash scripts/setup.sh, or pip install uv" >&2; exit 1; }
UV=$(realpath "$UV")
export UV
mkdir -p "$ENVS/logs"
export MODEL=${MODEL:-smollm2} API_KEY=${API_KEY:-sk-check-clients}
# Not a Python that uv would fetch, but the one that the project's own environment is made of.
BASE_PYTHON=$(${PYTHON:-.venv/bin/python} -c 'import sys; print(sys._base_executable)')
export BASE_PYTHON
export LITELLM_LOCAL_MODEL_COST_MAP=True

server=
if [ -z "${BASE_URL:-}" ]; then
    log="$ENVS/logs/server.log"
    MEGATRON_ASYNC_API_KEY=$API_KEY ${PYTHON:-.venv/bin/python} -m megatron_async serve "$MODEL" \
        --served-model-name "$MODEL" "${NAMES[@]}" \
        --max-sequence-length 8192 --port 0 --no-progress >"$log" 2>&1 &
    server=$!
    trap 'kill $server 2>/dev/null; wait $server 2>/dev/null' EXIT
    for _ in $(seq 600); do
        grep -q "ready after" "$log" && break
        kill -0 $server 2>/dev/null || { cat "$log"; exit 1; }
        sleep 1
    done
    BASE_URL=$(grep -o 'http://127.0.0.1:[0-9]*' "$log" | head -1)/v1
fi
export BASE_URL
ROOT_URL=${BASE_URL%/v1}

# A tokenizer folder for clients that count tokens themselves.
tokenizer() {
    local folder="$ENVS/tokenizer-$MODEL"
    [ -d "$folder" ] || ${PYTHON:-.venv/bin/python} scripts/clients/save_tokenizer.py "$MODEL" "$folder"
    echo "$folder"
}

environment() { # NAME PACKAGE...: its Python
    local folder="$ENVS/$1"
    shift
    if [ ! -x "$folder/bin/python" ]; then
        "$UV" venv -q --python "$BASE_PYTHON" "$folder" && "$UV" pip install -q --python "$folder" "$@" || {
            rm -rf "$folder"
            return 1
        }
    fi
    echo "$folder/bin"
}

run_openai-1() { "$(environment openai-1 'openai<2')/python" scripts/clients/ask_openai.py; }
run_openai-2() { "$(environment openai-2 'openai>=2,<3')/python" scripts/clients/ask_openai.py; }
run_openai() { "$(environment openai openai)/python" scripts/clients/ask_openai.py; }
run_anthropic() { "$(environment anthropic anthropic)/python" scripts/clients/ask_anthropic.py; }
run_inspect-ai() {
    local bin
    bin=$(environment inspect-ai inspect-ai openai anthropic) || return 1
    "$bin/python" scripts/clients/ask_inspect_ai.py
}
run_litellm() { "$(environment litellm litellm)/python" scripts/clients/ask_litellm.py; }
run_instructor() { "$(environment instructor instructor)/python" scripts/clients/ask_instructor.py; }
run_pydantic-ai() {
    "$(environment pydantic-ai 'pydantic-ai-slim[openai]')/python" scripts/clients/ask_pydantic_ai.py
}
run_langchain-openai() {
    "$(environment langchain-openai langchain-openai)/python" scripts/clients/ask_langchain.py
}
run_llm() {
    local bin
    bin=$(environment llm llm) || return 1
    export LLM_USER_PATH="$ENVS/llm-user"
    mkdir -p "$LLM_USER_PATH"
    printf -- '- model_id: ours\n  model_name: %s\n  api_base: "%s"\n  api_key_name: ours\n' \
        "$MODEL" "$BASE_URL" >"$LLM_USER_PATH/extra-openai-models.yaml"
    printf '{"ours": "%s"}' "$API_KEY" >"$LLM_USER_PATH/keys.json"
    "$bin/llm" -m ours -o max_tokens 8 "Say hello."
}
run_lm-eval() {
    local bin tok
    bin=$(environment lm-eval 'lm-eval[api]' transformers) && tok=$(tokenizer) || return 1
    export OPENAI_API_KEY=$API_KEY HF_HUB_OFFLINE=1
    local common="model=$MODEL,num_concurrent=2,max_retries=1"
    "$bin/lm-eval" run --model local-completions --tasks toy --include_path scripts/clients/lm_eval \
        --model_args "$common,base_url=$BASE_URL/completions,tokenizer_backend=huggingface,tokenizer=$tok" &&
        "$bin/lm-eval" run --model local-chat-completions --tasks toy_gen --apply_chat_template \
            --include_path scripts/clients/lm_eval \
            --model_args "$common,base_url=$BASE_URL/chat/completions"
}
run_aiperf() {
    local bin tok
    bin=$(environment aiperf aiperf) && tok=$(tokenizer) || return 1
    "$bin/aiperf" profile --model "$MODEL" --url "$ROOT_URL" --endpoint-type chat --streaming \
        --api-key "$API_KEY" --tokenizer "$tok" --concurrency 4 --request-count 20 \
        --synthetic-input-tokens-mean 32 --output-tokens-mean 8 --ui none \
        --artifact-dir "$ENVS/logs/aiperf"
}
run_guidellm() {
    local bin tok
    bin=$(environment guidellm guidellm) && tok=$(tokenizer) || return 1
    HF_HUB_OFFLINE=1 "$bin/guidellm" run \
        --backend "kind=openai_http,target=$ROOT_URL,model=$MODEL,api_key=$API_KEY" \
        --profile kind=concurrent,streams=4 --constraint kind=max_requests,count=20 \
        --tokenizer "kind=huggingface_auto,model=$tok" \
        --data kind=synthetic_text,prompt_tokens=32,output_tokens=8 --disable-progress \
        --output "kind=json,path=$ENVS/logs/guidellm.json"
}
run_schemathesis() { # against the schema that the server itself shows
    local bin
    bin=$(environment schemathesis schemathesis) || return 1
    curl -sf -H "Authorization: Bearer $API_KEY" "$ROOT_URL/openapi.json" >"$ENVS/openapi.json" || return 1
    # A response without a limit may have thousands of tokens: longer than it waits for an answer.
    "$bin/python" - "$ENVS/openapi.json" <<'PYTHON' || return 1
import json, pathlib, sys
path = pathlib.Path(sys.argv[1])
document = json.loads(path.read_text())
body = document["components"]["schemas"]["ResponsesRequest"]
body["required"].append("max_output_tokens")
body["properties"]["max_output_tokens"] = {"type": "integer", "minimum": 1, "maximum": 16}
path.write_text(json.dumps(document))
PYTHON
    "$bin/schemathesis" run "$ENVS/openapi.json" --url "$ROOT_URL" --phases fuzzing -n 50 \
        --header "Authorization: Bearer $API_KEY" \
        --checks not_a_server_error,content_type_conformance
}
# Their own tests of servers, of which the plugins in scripts/clients/upstream say what applies.
run_llama.cpp() {
    local bin tests
    bin=$(environment llama.cpp pytest pytest-rerunfailures requests openai aiohttp wget filelock) || return 1
    tests=$("$bin/python" scripts/clients/upstream/fetch_tests.py llama-cpp-python "$LLAMA_CPP_PYTHON" \
        vendor/llama.cpp/tools/server/tests "$ENVS/upstream") || return 1
    local plugins=$PWD/scripts/clients/upstream
    (cd "$tests" && DEBUG_EXTERNAL=1 PORT="${ROOT_URL##*:}" PYTHONPATH="$plugins:." \
        "$bin/python" -m pytest -q -rs --tb=short -p llama_cpp_tests --noconftest \
        -p no:cacheprovider unit/test_chat_completion.py)
}
run_vllm() {
    local bin tests
    bin=$(environment vllm pytest pytest-asyncio openai requests httpx regex jsonschema transformers \
        jinja2 fastapi) || return 1
    tests=$("$bin/python" scripts/clients/upstream/fetch_tests.py vllm "$VLLM" tests "$ENVS/upstream") ||
        return 1
    TOKENIZER=$(tokenizer) HF_HUB_OFFLINE=1 PYTHONPATH=scripts/clients/upstream "$bin/python" -m pytest \
        -q -rs --tb=short -p vllm_tests --noconftest -p no:cacheprovider --rootdir "$tests" \
        -o asyncio_mode=auto "$tests"/entrypoints/openai/completion/test_completion.py \
        "$tests"/entrypoints/openai/chat_completion/test_{chat,chat_logit_bias_validation}.py \
        "$tests"/entrypoints/openai/chat_completion/test_completion_with_function_calling.py \
        "$tests"/entrypoints/serve/{tokenize/test_tokenization,instrumentator/test_basic}.py
}

declare -A rows
for name in "${ALL[@]}" guidellm; do
    rows[$name]=$(grep -s "^| $name |" "$REPORT")
done
failed=0
for name in "${names[@]}"; do
    log="$ENVS/logs/$name.log"
    start=$SECONDS
    export -f environment tokenizer "run_$name"
    export ENVS ROOT_URL
    if timeout "$TIME_LIMIT" bash -c "run_$name" >"$log" 2>&1; then result=well; else result=FAILED; failed=1; fi
    case $name in
    llama.cpp) version=$LLAMA_CPP_PYTHON ;;
    vllm) version=$VLLM ;;
    *) version=$("$ENVS/$name/bin/python" -c '
import importlib.metadata, re, sys
name = re.sub("-[12]$", "", sys.argv[1])
names = (name, name + "-slim")
found = {re.sub("_", "-", d.name): d.version for d in importlib.metadata.distributions()}
print(next(found[n] for n in names if n in found))' "$name" 2>/dev/null) ;;
    esac
    echo "$name ${version:-} $result ($((SECONDS - start)) s; $log)"
    last=$(grep -av "^[[:space:]]*$" "$log" | tail -n 1 | tr '|' ' ' | cut -c 1-120)
    rows[$name]="| $name | ${version:--} | $result | $(date -u +%Y-%m-%d) | $last |"
done
{
    echo "# Clients that were asked"
    echo
    echo "Written by \`bash scripts/check_clients.sh\`, model $MODEL."
    echo
    echo "| client | version | outcome | date | last line of its output |"
    echo "| --- | --- | --- | --- | --- |"
    for name in "${ALL[@]}" guidellm; do
        [ -z "${rows[$name]}" ] || printf '%s\n' "${rows[$name]}"
    done
} >"$REPORT"
exit $failed

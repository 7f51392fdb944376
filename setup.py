"""Package metadata. Tool configuration is in pyproject.toml, exact versions in the lock."""

from pathlib import Path

from setuptools import find_packages, setup

RUNTIME = [
    # Completion of shells: it asks the parser itself, so it is never older than the options.
    "argcomplete>=3.5,<4",
    # One torch series: results are compared bit for bit, and kernels change between series.
    "torch==2.11.*",
    # Exact: layer specs are ours, and saving a checkpoint uses private helpers of this version.
    "megatron-core==0.19.2",
    # Megatron-Core's attention and Mamba modules import it without declaring it.
    "einops>=0.8",
    "gguf>=0.19",
    # Grammars of structured output. Its matcher's interface is stable within a major series.
    "llguidance>=1.6,<2",
    # Models by their id. Earlier versions take a part of a model in the cache for the whole.
    "huggingface-hub>=1.33,<2",
    "jinja2>=3.1",  # chat templates
    # Loops of a CPU's decode step (ops/cpu). Earlier versions refuse the NumPy of the lock.
    "numba>=0.66,<1",
    "numpy>=2.0",
    # Custom collectors are stable within a major series, which is still 0.
    "prometheus-client>=0.22,<1",
    # What ranks tell each other is encoded by msgspec and travels through ZeroMQ.
    "msgspec>=0.19",
    "psutil>=7",  # free memory of the host
    "pyzmq>=26",
    "safetensors>=0.8",
    "tokenizers>=0.23",
    "tqdm>=4.67",
    # The HTTP server. Its protocol class is subclassed, and such internals move between series.
    "uvicorn>=0.38,<1",
    "httptools>=0.6",
    "uvloop>=0.21; sys_platform != 'win32'",
]

EXTRAS = {
    # Exact: a pre-release whose interface still moves. It compiles its kernels at run time.
    "gpu": ["flash-attn-4[cu13]==4.0.0b36"],
    # These and TransformerEngine's torch part are built from source beside the torch above
    # (CONTRIBUTING.md has the command). The first and the last version that were run here.
    "te": ["transformer-engine[core_cu13,pytorch]>=2.12,<2.21"],
    # What Megatron's own Mamba-2 mixer calls; our layers need neither. Exact: both follow torch and
    # Triton closely. mamba-ssm 2.3.2 asks for TileLang and another TVM FFI, for Mamba-3.
    "mamba": ["mamba-ssm==2.3.1", "causal-conv1d==1.7.0"],
    # Exact: its class for routers is alpha, and moves. Never ray[llm]: it brings another torch.
    "ray": ["ray[serve]==2.60.0"],
    # Spans of requests (docs/observing.md): imported by API processes that are told to send any.
    "tracing": ["opentelemetry-sdk>=1.37,<2", "opentelemetry-exporter-otlp-proto-http>=1.37,<2"],
    "dev": [
        # The reference that the engine's tokens are compared with; it reads GGUF by accelerate.
        "transformers>=5.17,<6",
        "accelerate",
        "hypothesis",
        "mypy",
        "openai",  # the client that the server's tests speak with
        "pre-commit",
        "pytest",
        "pytest-timeout",
        "pytest-xdist",
        "ruff",
        "uv",  # installs requirements.lock
    ],
}

setup(
    name="megatron_async",
    version="0.1.0",
    description="Async-scheduled continuous-batching inference engine for Megatron-Core models",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_async", "megatron_async.*"]),
    package_data={
        "megatron_async": [
            "py.typed",
            "choices.json",
            "lab/*.html",
            "checkpoints/layers/*",
            "server/page/*",
        ],
    },
    install_requires=RUNTIME,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["megatron-async = megatron_async.__main__:main"]},
    classifiers=[
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)

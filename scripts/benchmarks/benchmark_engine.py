"""Time the engine under a load: `benchmark_engine.py LOAD [options]`.

`benchmark_engine.py LOAD --help` says what a load is and takes. Some run under torchrun.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

LOADS = {
    "steady": "every request decodes: step time by shape, batch and lookahead",
    "churn": "requests end and arrive in every step",
    "events": "arrivals, aborts, stop words, pauses and evictions at once",
    "streams": "an event loop and a stream for each request",
    "ranks": "steady decode over several ranks (torchrun)",
    "arrivals": "requests arrive at several replicas, launches at once or late (torchrun)",
    "throughput": "requests arrive at random: latency and throughput",
    "features": "what each feature of a request costs",
    "mixed": "decode rows beside prompts: step time by tokens",
    "prefill": "time to first token of one prompt",
    "prefix-cache": "prompts that share tokens, and prompts that do not",
    "updates": "new weights while requests decode: the longest gap between tokens",
    "pipeline": "how busy each stage of a pipeline is (torchrun)",
}
"""Loads, each a module of `engine_loads` (with "_" for "-") whose `main` takes its options."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a load with the options after its name."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    loads = "\n".join(f"  {name:<14}{about}" for name, about in LOADS.items())
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"loads:\n{loads}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("load", metavar="LOAD", choices=LOADS, help="see below")
    args = parser.parse_args(given[:1])
    # Imported when it is asked for: loads need different packages.
    module = import_module(f"engine_loads.{args.load.replace('-', '_')}")
    module.main(given[1:])


if __name__ == "__main__":
    main()

"""What benchmarks print: a JSON line a case."""

import json
import statistics
from collections.abc import Sequence


def say(benchmark: str, **figures: object) -> None:
    """Prints the line of a case."""
    print(json.dumps({"benchmark": benchmark, **figures}), flush=True)


def spread(name: str, values: Sequence[float], digits: int | None = None) -> dict[str, float]:
    """Returns median, lowest and highest."""
    found = {name: statistics.median(values), "low": min(values), "high": max(values)}
    return {each: round(value, digits) for each, value in found.items()}

"""Several answers per prompt as one number, and how sure it is."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

Z95 = 1.959963984540054


def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k answers is right: 1 - C(n - c, k) / C(n, k), arXiv 2107.03374."""
    assert 0 <= num_right <= num_answers and 1 <= k <= num_answers
    return 1.0 - math.comb(num_answers - num_right, k) / math.comb(num_answers, k)


def half_width(values: Sequence[float]) -> float:
    """Half of the 95 percent interval of the mean over prompts, from their spread. Of prompts that are all right or
    all wrong the spread says nothing: then that of one more prompt of the other kind (rule of succession)."""
    if len(values) > 1 and statistics.variance(values) > 0:
        return Z95 * math.sqrt(statistics.variance(values) / len(values))
    share = 1 / (len(values) + 2)
    return Z95 * math.sqrt(share * (1 - share) / len(values))


def pass_metrics(rights: Sequence[tuple[int, int]]) -> dict[str, float]:
    """`pass@1, 2, 4, ...` and `avg@n` over prompts with (answers, right ones), each with the half of its interval."""
    most = min(num_answers for num_answers, _ in rights)
    values = {f"pass@{k}": [pass_at_k(n, c, k) for n, c in rights] for k in (2**i for i in range(most.bit_length()))}
    values[f"avg@{most}"] = [c / n for n, c in rights]
    metrics: dict[str, float] = {}
    for name, of_prompts in values.items():
        metrics[name] = statistics.fmean(of_prompts)
        metrics[f"{name}_ci95"] = half_width(of_prompts)
    return metrics

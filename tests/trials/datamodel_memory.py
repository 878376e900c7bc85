"""The datamodel's regression at any size, from made-up subsets: its peak of memory against its plan, and its seconds.

    python -m tests.trials.datamodel_memory --queries 10000 --examples 4750 --subsets 8000 --device cuda

On a CPU the peak is that of the whole process, less what it was before the regression and before its inputs were made.
"""

import argparse
import resource
import time

import numpy as np
import torch

from baselines.support.subset_regression import regress, workspace_bytes

RANK = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, size in (("queries", 2500), ("examples", 1188), ("subsets", 2000)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--covariance", action="store_true", help="also a covariance of examples, as BIF gives it")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    before = _peak(device)
    generator = np.random.default_rng(0)
    masks = generator.random((asked.subsets, asked.examples)) < 0.1
    weights = generator.normal(size=(asked.queries, RANK)) @ generator.normal(size=(RANK, asked.examples))
    weights = weights.astype(np.float32)
    losses = masks.astype(np.float32) @ weights.T
    losses += generator.standard_normal(losses.shape, dtype=np.float32) * losses.std()
    noise = generator.standard_normal(weights.shape, dtype=np.float32)
    priors = {"raw": torch.from_numpy(weights + 3 * noise), "normalised": torch.from_numpy(weights + 5 * noise)}
    del noise
    covariances: dict[str, torch.Tensor | None] = {"queries": None}
    if asked.covariance:
        traces = torch.from_numpy(weights)
        covariances["train"] = traces.T @ traces
    start = time.perf_counter()
    found = regress(masks, losses, priors, covariances, device=device)
    seconds = time.perf_counter() - start
    peak = _peak(device) - before
    sizes = (asked.subsets, asked.examples, asked.queries)
    planned = workspace_bytes(*sizes, len(priors), len(covariances) - 1)
    correlation = np.corrcoef(found.weights.flatten()[:100_000], weights.flatten()[:100_000])[0, 1]
    print(f"{sizes[2]:,} queries x {sizes[1]:,} examples x {sizes[0]:,} subsets on {device}: {seconds:.1f} s")
    print(f"peak {peak / 2**30:.2f} GiB, planned {planned / 2**30:.2f} GiB; correlation {correlation:.3f}")
    print(found.diagnostics)


def _peak(device: torch.device) -> int:
    """Bytes: the most there ever were."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()

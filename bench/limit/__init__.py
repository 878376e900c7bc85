"""BIF approaches the damped influence function on a regular model: how fast, in draws and in n_beta.

    python -m bench.limit --out results/limit      # minutes on two cores; `bench.figures --only limit` draws it

On a regular model the theory is plain. The localised posterior is nearly Gaussian, with covariance
(n_beta H + gamma)^-1, so n_beta BIF is the influence function of damping gamma / n_beta up to terms that are 1 / n_beta
of it, and an estimate from T draws is off by another part that falls like T^-1/2. Both are measured here with the
suite's own `bif`, and the first one also by summing the posterior over a grid, without any chain.
"""

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """The command, imported when it is called."""
    from bench.limit.command import main as run_command

    return run_command(argv)

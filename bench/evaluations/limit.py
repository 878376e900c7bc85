"""BIF approaches the damped influence function on a regular model: how fast, in draws and in n_beta.

    python -m bench.evaluations limit --out results/limit      # minutes on two cores

On a regular model the theory is plain. The localised posterior is nearly Gaussian, with covariance
(n_beta H + gamma)^-1, so n_beta BIF is the influence function of damping gamma / n_beta up to terms that are 1 / n_beta
of it, and an estimate from T draws is off by another part that falls like T^-1/2. Both are measured here with the
suite's own `bif`, and the first one also by summing the posterior over a grid, without any chain.

A chain of three parameters mixes slowly however fast the code is. So one model holds many copies of the regression,
each with weights of its own, and an example looks at those of its copy alone: the copies are independent chains, and
one run of the method has thousands of draws of one small posterior.
"""

import argparse
import itertools
import logging
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from baselines.bif.covariance import covariance
from baselines.bif.method import BIF
from baselines.method import Problem
from bench.arguments import RUNS, at_least
from bench.records import digest_of, provenance, write_json
from bench.tables import interval, number, table
from retrain.errors import UsageError
from retrain.examples import Examples, Indices
from retrain.losses import CrossEntropy
from retrain.progress import bar
from retrain.source import code_fingerprint
from retrain.store import Store, default_cache
from retrain.task import Task
from retrain.units import describe_device

DAMPING = 0.05  # gamma / n_beta, the influence function's
STEP_LENGTH = 0.04  # times the largest precision: the length of the step adds a hundredth to the variance
BURN_IN = 8  # draws; they are half a relaxation time apart
COPIES = 1000
N_BETAS = (10.0, 30.0, 100.0, 300.0, 1000.0)
NEWTON_STEPS = 40
LARGEST_NORM = 10.0  # of the minimum: beyond it lie separable classes, whose minimum is nowhere
GRID_POINTS, GRID_WIDTH = 49, 6.0  # of the posterior's grid: points an axis, standard deviations to each side


class CopiedRegression(nn.Module):
    """(batch, dimension + 1) inputs, the last column naming the copy -> (batch, 2) logits."""

    def __init__(self, solution: Tensor, copies: int):
        super().__init__()
        self.weights = nn.Parameter(solution.float().repeat(copies, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        own = nn.functional.embedding(inputs[:, -1].long(), self.weights)
        logit = (own * inputs[:, :-1]).sum(1, keepdim=True)
        return torch.cat([torch.zeros_like(logit), logit], 1)


@dataclass(frozen=True, kw_only=True)
class LogisticCopies(Task):
    """One logistic regression, `copies` times; inputs are white, so that every direction mixes alike."""

    loss_function: ClassVar = CrossEntropy()

    dimension: int = 3
    num_train: int = 16
    num_queries: int = 4
    copies: int = 1000
    data_seed: int = 5

    @cached_property
    def design(self) -> tuple[Tensor, Tensor]:
        """(train, then queries; dimension) inputs and their classes, in double precision."""
        generator = np.random.default_rng([self.data_seed, self.dimension])
        inputs = generator.normal(size=(self.num_train + self.num_queries, self.dimension))
        basis, _ = np.linalg.qr(inputs[: self.num_train])
        inputs[: self.num_train] = basis * self.num_train**0.5
        chances = 1 / (1 + np.exp(-inputs.sum(1)))
        classes = chances > generator.uniform(size=len(inputs))
        return torch.from_numpy(inputs), torch.from_numpy(classes).double()

    def losses_at(self, weights: Tensor) -> Tensor:
        """(..., examples) at weights (..., dimension)."""
        inputs, classes = self.design
        return nn.functional.softplus((1 - 2 * classes) * (weights @ inputs.T))

    @cached_property
    def minimum(self) -> Tensor:
        """Of the mean training loss, by Newton's method: there its gradient vanishes, and the localiser's with it."""
        weights = torch.zeros(self.dimension, dtype=torch.float64)
        assert self.design  # made here: a tensor that is first made inside a derivative stays there

        def mean_loss(at: Tensor) -> Tensor:
            return self.losses_at(at)[: self.num_train].mean()

        for _ in range(NEWTON_STEPS):
            step = torch.linalg.solve(torch.func.hessian(mean_loss)(weights), torch.func.grad(mean_loss)(weights))
            weights = weights - step
        if not float(torch.func.grad(mean_loss)(weights).norm()) < 1e-10 or float(weights.norm()) > LARGEST_NORM:
            raise UsageError(
                f"the classes of data_seed {self.data_seed} can be separated, or nearly: their mean loss has no "
                "minimum to stand at; take another seed or more training examples"
            )
        return weights

    # ---- as a task ----

    def _copied(self, chosen: slice) -> Examples:
        inputs, classes = (values[chosen] for values in self.design)
        copy = torch.arange(self.copies).repeat_interleave(len(inputs))[:, None]
        return Examples(torch.cat([inputs.float().repeat(self.copies, 1), copy], 1), classes.long().repeat(self.copies))

    def load_train_data(self) -> Examples:
        return self._copied(slice(0, self.num_train))

    def load_query_data(self) -> Examples:
        return self._copied(slice(self.num_train, None))

    def build_model(self, seed: int) -> nn.Module:
        return CopiedRegression(self.minimum, self.copies).eval()

    def train(self, indices: Indices, *, init_seed: int, order_seed: int, device: torch.device) -> nn.Module:
        return self.build_model(init_seed).to(device)

    # ---- what is known of it ----

    def hessian(self) -> Tensor:
        """Of the mean training loss at its minimum."""
        return torch.func.hessian(self.losses_at)(self.minimum)[: self.num_train].mean(0)

    def damped_influence(self, damping: float) -> Tensor:
        """(queries, train): -g_query (H + damping)^-1 g_train, this suite's sign."""
        gradients = torch.func.jacfwd(self.losses_at)(self.minimum)
        damped = self.hessian() + damping * torch.eye(self.dimension, dtype=torch.float64)
        scores = -gradients @ torch.linalg.solve(damped, gradients.T)
        return scores[self.num_train :, : self.num_train]

    def exact_bif(self, n_beta: float, damping: float) -> Tensor:
        """(queries, train): the covariance under the posterior summed over a grid, with neither chain nor expansion."""
        precision = n_beta * (self.hessian() + damping * torch.eye(self.dimension, dtype=torch.float64))
        widths = torch.linalg.inv(precision).diagonal().sqrt()
        steps = torch.linspace(-GRID_WIDTH, GRID_WIDTH, GRID_POINTS, dtype=torch.float64)
        points = torch.cartesian_prod(
            *(centre + width * steps for centre, width in zip(self.minimum, widths, strict=True))
        )
        losses = self.losses_at(points)
        away = (points - self.minimum).square().sum(1)
        potential = n_beta * losses[:, : self.num_train].mean(1) + damping * n_beta / 2 * away
        mass = torch.softmax(-potential, 0)[:, None]
        centred = losses - (mass * losses).sum(0)
        return -(centred[:, self.num_train :].T @ (mass * centred[:, : self.num_train]))


def relative_distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# ---- what is measured ----


def measured(task: LogisticCopies, n_beta: float, draws: int, seed: int, store: Store) -> dict[int, float]:
    """The distance at every number of draws, from one run of the method, kept in the cache."""
    config = {
        "task": task.config, "n_beta": n_beta, "draws": draws, "seed": seed, "damping": DAMPING, "step": STEP_LENGTH,
        "burn_in": BURN_IN, "code": code_fingerprint(),
    }  # fmt: skip
    entry = store.read("limit", config)
    if entry is None:
        found = distances(task, sampled_losses(task, n_beta, draws, seed), n_beta)
        arrays = {"draws": np.array(list(found)), "distance": np.array(list(found.values()))}
        entry = store.write("limit", config, arrays, {})
    return dict(zip(entry.arrays["draws"].tolist(), entry.arrays["distance"].tolist(), strict=True))


def sampled_losses(task: LogisticCopies, n_beta: float, draws: int, seed: int) -> Tensor:
    """(copies, draws, train + queries): one run of `bif` as it ships, full batch."""
    # The localised posterior's largest, gamma being damping x n_beta.
    precision = n_beta * (float(torch.linalg.eigvalsh(task.hessian())[-1]) + DAMPING)
    method = BIF(
        chains=1, draws=draws, burn_in=BURN_IN, thinning=round(1 / STEP_LENGTH), step_size=STEP_LENGTH / precision,
        gamma=DAMPING * n_beta, n_beta=n_beta * task.copies, minibatch=task.num_train * task.copies, batch_size=10**6,
        keep_traces=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="tda-bench-") as scratch:
        problem = Problem(
            task=task, model=task.build_model(0), train=task.train_data, queries=task.query_data, seed=seed,
            attributed_indices=np.arange(task.num_train * task.copies), device=torch.device("cpu"),
            scratch=Path(scratch),
        )  # fmt: skip
        traces = method.score(problem, None).arrays["loss_traces"][0].double()
    train, queries = traces.split([task.num_train * task.copies, task.num_queries * task.copies], dim=1)
    shape = (draws, task.copies, -1)
    return torch.cat([train.reshape(shape), queries.reshape(shape)], -1).transpose(0, 1)


def distances(task: LogisticCopies, losses: Tensor, n_beta: float) -> dict[int, float]:
    """Draws of ever larger groups of copies -> the root mean square over the groups of that size."""
    expected = task.damped_influence(DAMPING)
    found, groups = {}, 2 ** int(math.log2(task.copies // 8))
    while groups >= 1:
        size = task.copies // groups
        apart = []
        for part in losses[: groups * size].split(size):
            estimate = covariance(part[..., task.num_train :], part[..., : task.num_train], "pooled")[0]
            apart.append(relative_distance(-n_beta * estimate, expected))
        found[size * losses.shape[1]] = root_mean_square(apart)
        groups //= 2
    return found


def root_mean_square(values: Sequence[float]) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


# ---- the evaluation ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--draws", type=at_least(4), default=32, help="of each copy (default: %(default)s)")
    add("--seeds", "--seed", nargs="+", type=at_least(0), default=[1], help="of the chains (default: 1)")
    add("--cache", default=default_cache(), help="where finished chains are kept (default: %(default)s)")
    add("--out", default=f"{RUNS}/limit", help="folder of limit.json (default: %(default)s)")


@dataclass
class LimitResult:
    """What the command shows and keeps: here one record, and no rows of methods."""

    record: dict[str, Any]
    seconds: float = 0.0
    run_id: str = ""
    skipped: ClassVar[Mapping[str, str]] = {}
    problems: ClassVar[Sequence[str]] = ()
    notes: ClassVar[Sequence[str]] = ()

    def assign_run_id(self) -> None:
        self.run_id = digest_of(self.record)

    def save(self, out: str | Path, command: str = "") -> Path:
        path = Path(out) / "limit.json"
        made = {"run_id": self.run_id, "command": command, **provenance(describe_device(torch.device("cpu")))}
        write_json(path, {**self.record, **made, "seconds": round(self.seconds, 1)})
        return path


def evaluate(arguments: argparse.Namespace) -> LimitResult:
    logging.getLogger().setLevel(logging.ERROR)  # a warning of short chains says nothing here: they are many
    task, seeds, store = LogisticCopies(copies=COPIES), sorted(set(arguments.seeds)), Store(arguments.cache)
    expected = task.damped_influence(DAMPING)
    exact = [
        {"n_beta": n_beta, "distance": relative_distance(n_beta * task.exact_bif(n_beta, DAMPING), expected)}
        for n_beta in N_BETAS
    ]
    by_size: dict[tuple[float, int], list[float]] = {}
    for n_beta, seed in bar(list(itertools.product(N_BETAS, seeds)), desc="chains", unit="run"):
        for count, distance in measured(task, n_beta, arguments.draws, seed, store).items():
            by_size.setdefault((n_beta, count), []).append(distance)
    sampled = [
        {"n_beta": n_beta, "draws": count, "distance": root_mean_square(apart), "low": min(apart), "high": max(apart)}
        for (n_beta, count), apart in by_size.items()
    ]

    def slope(points: Sequence[Mapping[str, float]], axis: str) -> float:
        """Of the distance, both on logarithmic scales."""
        at, apart = ([one[name] for one in points] for name in (axis, "distance"))
        return float(np.polyfit(np.log(at), np.log(apart), 1)[0])

    last = [one for one in sampled if one["n_beta"] == max(N_BETAS)]
    return LimitResult({
        "task": "logistic regression",
        "description": "Damped logistic regression, 3 parameters",
        "config": {
            "regression": asdict(task), "damping": DAMPING, "step_times_precision": STEP_LENGTH, "burn_in": BURN_IN,
            "thinning": round(1 / STEP_LENGTH), "sampler": "sgld", "gradient": "full batch",
            "draws_of_a_copy": arguments.draws, "seeds": seeds,
        },
        "exact": exact,
        "sampled": sampled,
        "slopes": {
            "n_beta": {"theory": -1.0, "measured": slope(exact, "n_beta")},
            "draws": {"theory": -0.5, "measured": slope(last, "draws")},
        },
    })  # fmt: skip


def show(out: LimitResult) -> str:
    """Distances by n_beta; of several seeds their root mean square, with the smallest and the largest beside it."""
    record = out.record
    most = max(one["draws"] for one in record["sampled"])
    at_most = {one["n_beta"]: one for one in record["sampled"] if one["draws"] == most}
    header, lines = ["n_beta", "exact BIF", f"{most:,} draws", f"range of {len(record['config']['seeds'])} seeds"], []
    for one in record["exact"]:
        sampled = at_most[one["n_beta"]]
        ends = interval(sampled["low"], sampled["high"], 4)
        lines.append([f"{one['n_beta']:g}", number(one["distance"], 4), number(sampled["distance"], 4), ends])
    found = [f"{record['description']}: relative distance of BIF to the damped influence function"]
    found.append(table(header, lines, 0))
    for axis, slopes in record["slopes"].items():
        found.append(f"slope in {axis}: {slopes['measured']:.2f} measured, {slopes['theory']:.2f} in theory")
    return "\n".join(found)

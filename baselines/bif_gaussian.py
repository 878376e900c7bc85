"""bif_gaussian: BIF's covariance of losses, with weights drawn independently from the Gaussian that K-FAC gives.

No chain, no step size, nothing to mix: weights are the checkpoint's plus N(0, (H + damping)^-1 / n_beta), H the
curvature of the method `kfac`, and scores are minus the covariance of training and query losses over the draws. It is
BIF's posterior if the loss is the quadratic that K-FAC sees, at the same n_beta and gamma = n_beta x damping. `n_beta`
0 takes K-FAC's for a rise of the training loss by `rise` nats, or as much more as brings the loss itself down to that
on a few draws. K-FAC's picture does not tell: on a ResNet-9 where its quadratic rises by 0.1 nats, the loss rose by 34.

Draws come in pairs of opposite displacements, which cut each loss into an odd and an even part without correlation:

- `odd part`: to first order kfac's scores / n_beta, which `kfac` computes without sampling;
- `even part`: what only the loss's second and higher even orders give.

So the odd part against `kfac` shows sampling noise, all draws against the odd part show the higher order, and BIF
against all draws shows what its chains know of the posterior beyond K-FAC's Gaussian. `curve` keeps what 100, 300,
1000, ... draws gave on the way, as rows beside the scores.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from baselines.bif.covariance import StreamingCovariance
from baselines.bif.engine import copy_to_sample
from baselines.bif.passes import Measured
from baselines.kfac import KFAC
from baselines.method import Attribution, Problem, Size, batch_size_option
from baselines.support.curvature import Block
from baselines.support.damping import damped
from baselines.support.transfer import on_device, to_host
from retrain.examples import Examples
from retrain.outputs import output_of

BLOCK = 50  # pairs that are summed at once, and drawn from one stream
PILOT_PAIRS, PILOT_FACTOR, MOST_PILOTS = 8, 4.0, 20
PILOT_EXAMPLES = 5000  # of the training examples, whose loss's rise is measured
_DRAW_STREAM, _PILOT_STREAM = 51, 52
CURVE = tuple(factor * 10**power for power in range(2, 7) for factor in (1, 3))
PARTS = ("odd part", "even part")


@dataclass(frozen=True, kw_only=True)
class BIFGaussian(KFAC):
    version: ClassVar[int] = 2
    knows_output: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "Kreer et al. 2025, Bayesian Influence Functions for Hessian-Free Data Attribution (the covariance); Ritter et "
        "al. 2018, A scalable Laplace approximation for neural networks (the Gaussian)"
    )
    grid: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "relative_damping": (0.1, 1.0, 10.0, 100.0, 1000.0),
        "rise": (0.1, 0.01, 1.0),
    }
    warm_up: ClassVar[dict[str, Any]] = {"draws": 2}

    draws: int = 1000  # each pair is two
    n_beta: float = 0.0  # 0: the one that `rise` asks for
    rise: float = 0.1  # nats by which the mean training loss rises, at most
    curve: bool = False  # also what the first 100, 300, 1000, ... draws gave
    batch_size: int = batch_size_option(5000)  # of the examples whose losses are taken

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draws < 2 or self.draws % 2:
            raise ValueError(f"draws is {self.draws}; expected an even number of them: they come in pairs")
        if self.n_beta < 0 or self.rise <= 0:
            raise ValueError(f"n_beta is {self.n_beta} and rise {self.rise}; expected 0 or more, and more than 0")

    @property
    def fit_config(self) -> dict[str, Any]:
        of_scores = ("draws", "n_beta", "rise", "curve")
        return {name: value for name, value in super().fit_config.items() if name not in of_scores}

    def memory_bytes(self, size: Size) -> int:
        kept = 2 + 2 * self.curve * len(CURVE)
        return 40 * size.num_parameters + 4 * (kept + 2) * size.num_attributed * size.num_queries

    def score(self, problem: Problem, state: list[Block]) -> Attribution:
        gaussian = Gaussian(self, problem, state)
        num_pairs, num_queries = self.draws // 2, len(problem.queries)
        odd, even = (StreamingCovariance(num_queries, len(problem.attributed_indices), problem.device) for _ in PARTS)
        done, curve = 0, dict[str, Tensor]()
        if (saved := problem.work.load("bif_gaussian")) is not None:
            arrays = {name: torch.from_numpy(np.array(value)) for name, value in saved[0].items()}
            done = saved[1]["done"]
            odd, even = (StreamingCovariance.of(_within(arrays, part), done, problem.device) for part in PARTS)
            curve = {name: arrays[name] for name in arrays if "draws/" in name}
        starts = range(done, num_pairs, BLOCK)
        for start in problem.progress(starts, total=len(starts), description="bif_gaussian: draws"):
            for sums, losses in zip((odd, even), gaussian.pairs(start, min(BLOCK, num_pairs - start)), strict=True):
                sums.update(losses[:, :num_queries], losses[:, num_queries:])
            if self.curve and 2 * odd.count in CURVE and odd.count < num_pairs:
                scores, scale = _both(odd, even)
                curve |= {f"{2 * odd.count} draws/scores": to_host(scores), f"{2 * odd.count} draws/scale": scale.cpu()}
            if problem.work.due():
                held = {f"{p}/{n}": v for p, sums in zip(PARTS, (odd, even)) for n, v in sums.state().items()}
                so_far = {name: value.cpu().numpy() for name, value in {**held, **curve}.items()}
                problem.work.save("bif_gaussian", so_far, {"done": odd.count})
        components = {name: _attribution(*_covariance(sums)) for name, sums in zip(PARTS, (odd, even), strict=True)}
        for name in [name.removesuffix("/scores") for name in curve if name.endswith("/scores")]:
            components[name] = _attribution(curve[f"{name}/scores"], curve[f"{name}/scale"])
        shares = even.train_square.sum() / (odd.train_square.sum() + even.train_square.sum()).clamp(min=1e-30)
        found = _attribution(*_both(odd, even))
        return Attribution(
            scores=found.scores,
            train_scale=found.train_scale,
            components=components,
            diagnostics={
                "n_beta": gaussian.n_beta,
                "rise": float(even.train_mean.mean()),  # of the mean training loss
                "even_share": float(shares),  # of the training losses' variance
                "blocks": len(state),
            },
        )


class Gaussian:
    """Pairs of opposite displacements of one copy of the model, and every loss at them."""

    def __init__(self, method: BIFGaussian, problem: Problem, blocks: list[Block]):
        self.problem, self.blocks = problem, blocks
        gradients = method._gradients(problem)
        self.model, _ = copy_to_sample(problem.model, "")
        self.groups = [[self.model.get_parameter(name).data for name in group] for group in gradients.groups]
        self.origin = [[weight.clone() for weight in group] for group in self.groups]
        curvatures = [damped(block.eigenvalues, method.damping, method.relative_damping) for block in blocks]
        few = problem.train.select(range(min(PILOT_EXAMPLES, len(problem.train))))
        self.passes = [
            self._losses_of(examples, method.batch_size) for examples in (problem.queries, problem.attributed)
        ]
        self.pilot = self._losses_of(few, method.batch_size)
        self.start = self._losses().clone()
        self.curvatures = curvatures
        self.n_beta = method.n_beta or self._n_beta_of(method.rise)
        self.widths = self._widths(self.n_beta)

    def _losses_of(self, examples: Examples, batch_size: int) -> Measured:
        task, device = self.problem.task, self.problem.device
        return Measured(task, self.model, task.resident(on_device(examples, device), device), batch_size)

    def _widths(self, n_beta: float) -> list[Tensor]:
        return [(curvature * n_beta).rsqrt() for curvature in self.curvatures]

    @torch.no_grad()
    def _n_beta_of(self, rise: float) -> float:
        """From the one at which K-FAC's quadratic rises by as much, upwards until the loss itself rises by no more."""
        free = sum(float((b.eigenvalues.double() / c).sum()) for b, c in zip(self.blocks, self.curvatures, strict=True))
        n_beta, before = max(free, 1e-30) / (2 * rise), math.nan
        here = float(self.pilot().mean())
        for _ in range(MOST_PILOTS):
            self.widths = self._widths(n_beta)
            generator = self._generator(0, _PILOT_STREAM)
            losses = []
            for _ in range(PILOT_PAIRS):
                moved = list(self._displacement(generator))
                for sign in (1, -1):
                    self._move(moved, sign)
                    losses.append(float(self.pilot().mean()))
            self._move(moved, 0)
            found = sum(losses) / len(losses) - here
            if found <= rise:
                if found > 0 and math.isfinite(before):  # between the last two, where both rises are powers of n_beta
                    n_beta *= PILOT_FACTOR ** -(math.log(rise / found) / math.log(before / found))
                break
            n_beta, before = n_beta * PILOT_FACTOR, found
        return n_beta

    def _generator(self, block: int, stream: int) -> torch.Generator:
        generator = torch.Generator(self.problem.device)
        seed = np.random.SeedSequence([self.problem.seed, block, stream])
        generator.manual_seed(int(seed.generate_state(1, np.uint64)[0] >> 1))
        return generator

    @torch.no_grad()
    def pairs(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """(count, q + n) odd and even parts of the losses, less the checkpoint's own; of pairs from `first` on."""
        generator = self._generator(first // BLOCK, _DRAW_STREAM)
        odd = torch.empty(count, len(self.start), device=self.problem.device)
        even = torch.empty_like(odd)
        for number in range(count):
            moved = list(self._displacement(generator))
            self._move(moved, 1)
            plus = self._losses().clone()
            self._move(moved, -1)
            minus = self._losses()
            odd[number], even[number] = (plus - minus) / 2, (plus + minus) / 2 - self.start
        self._move(moved, 0)
        return odd, even

    def _displacement(self, generator: torch.Generator) -> Iterator[Tensor]:
        """One matrix a block, a bias being its weight's last column."""
        for block, width in zip(self.blocks, self.widths, strict=True):
            yield block.from_basis(width * torch.randn(width.shape, generator=generator, device=width.device))

    def _move(self, moved: list[Tensor], sign: int) -> None:
        for matrix, weights, origin in zip(moved, self.groups, self.origin, strict=True):
            parts = [matrix] if len(weights) == 1 else [matrix[:, :-1], matrix[:, -1]]
            for weight, start, part in zip(weights, origin, parts, strict=True):
                torch.add(start, part.reshape(start.shape), alpha=sign, out=weight)

    def _losses(self) -> Tensor:
        """(q + n,): the queries' outputs, then the training examples' losses."""
        queries, attributed = self.passes
        return torch.cat([output_of(queries(), self.problem.output), attributed()])


def _covariance(sums: StreamingCovariance) -> tuple[Tensor, Tensor]:
    """Minus the covariances (q, n), and the training losses' standard deviations; the sums stay as they are."""
    freedom = max(sums.count - 1, 1)
    return sums.cross / -freedom, (sums.train_square / freedom).sqrt()


def _both(odd: StreamingCovariance, even: StreamingCovariance) -> tuple[Tensor, Tensor]:
    (scores, scale), (more, further) = _covariance(odd), _covariance(even)
    return scores.add_(more), (scale.square() + further.square()).sqrt()


def _attribution(scores: Tensor, scale: Tensor) -> Attribution:
    return Attribution(scores=to_host(scores), train_scale=scale.cpu())


def _within(arrays: Mapping[str, Tensor], part: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{part}/"): value for name, value in arrays.items() if name.startswith(f"{part}/")}

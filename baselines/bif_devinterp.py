"""bif_devinterp: the same local BIF, sampled and summed by devinterp 2.0.1 (Timaeus).

    pip install "devinterp==2.0.1"                  # optional: without it the method is skipped, with this line
    python -m bench.lds --task tinylm --alpha 0.5 --methods bif bif_devinterp --set bif_devinterp.gamma=1e4

The options are BIF's own and mean the same; this is how they translate:

- `sgld`: devinterp's `sgmcmc_sgld` with `lr = step_size`, `n_beta`, `localization = gamma`. Both move by
  -lr/2 (n_beta g + gamma (w - w*)) + N(0, lr), with g the minibatch's mean gradient: nothing to convert.
- `rmsprop_sgld`: devinterp's running mean of squares is of g, ours of n_beta g, and both add their stability constant
  to its root. Ours is G = 1 / (stability + n_beta s), so theirs with `eps = stability / n_beta` is n_beta G, and
  `lr = step_size / n_beta` makes the same step of it. (At equal numbers the two are different samplers.)
- devinterp counts burn-in in steps and records a draw after the step, ours before: `burn_in * thinning - 1` steps of
  burn-in put its draws where ours are. With no burn-in its draws are one step later than ours.
- Its minibatches walk through one shuffled epoch again and again; ours are drawn afresh. Each chain has its own order.
- It knows token sequences only. Here a "sequence" is an example's number, and the loss function looks the example up,
  so any task will do. It puts models in training mode; a wrapper keeps ours in evaluation mode.
- Its `bif` is the covariance (or correlation) itself: the sign is flipped here.

devinterp keeps the traces in a zarr store on disk, so its memory is small and its disk use is not.
"""

import contextlib
import importlib.util
import os
import re
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from baselines.bif.collect import diagnosed_examples
from baselines.bif.diagnostics import diagnose, dropped_chains, judge_chain, require_healthy
from baselines.bif.method import BIF
from baselines.bif.sampler import RMSPROP_DECAY, RMSPROP_STABILITY
from baselines.bif.settings import FROM_PILOT
from baselines.method import Attribution, Method, Problem, Size
from baselines.support.copies import detached_copy
from baselines.support.gradients import trainable_parameters
from retrain.errors import UsageError
from retrain.outputs import LOSS
from retrain.task import Task

DEVINTERP_SAMPLERS = {"sgld": "sgmcmc_sgld", "rmsprop_sgld": "rmsprop_sgld"}
REQUIRED_PACKAGES = ("devinterp", "xarray", "zarr", "pydantic")
INSTALL = 'pip install "devinterp==2.0.1"'
OBSERVABLE = "losses"
_STREAM = 21


@dataclass(frozen=True, kw_only=True)
class BIFDevinterp(Method):
    """As `bif`, option for option; see there."""

    version: ClassVar[int] = 2
    libraries: ClassVar[tuple[str, ...]] = ("devinterp",)
    knows_output: ClassVar[bool] = True  # and refuses any but the loss
    paper: ClassVar[str] = BIF.paper
    grid: ClassVar[Sequence[Mapping[str, tuple[Any, ...]]]] = [
        {"gamma": (1e4,), "step_size": (1e-5, 1e-4), "n_beta": (200.0, 1000.0)},
        {"gamma": (1e5,), "step_size": (1e-5,), "n_beta": (200.0, 2000.0)},
        {"sampler": ("rmsprop_sgld",), "burn_in": (100,), "step_size": (1e-5,), "n_beta": (1.0, 10.0, 100.0)},
    ]

    sampler: str = "sgld"
    chains: int = 4
    draws: int = 100
    burn_in: int = 0
    thinning: int = 1
    step_size: float = 1e-5
    n_beta: float = 200.0
    gamma: float = 10_000.0
    minibatch: int = 1024
    micro_batch: int = 0  # examples in memory at once (a divisor of the minibatch is taken); 0: the minibatch
    parameters: str = ""
    query_normalised: bool = False
    divergence_limit: float = 5.0
    min_chains: int = 1
    keep_traces: bool = False

    def __post_init__(self) -> None:
        if self.sampler not in DEVINTERP_SAMPLERS:
            raise ValueError(f'sampler is "{self.sampler}"; devinterp offers: {", ".join(DEVINTERP_SAMPLERS)}')
        if self.micro_batch < 0:
            raise ValueError(f"micro_batch is {self.micro_batch}; expected 0 or a positive number")
        for name in FROM_PILOT:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a positive number: there is no pilot here")
        shared = {name: value for name, value in vars(self).items() if name != "micro_batch"}
        BIF(**shared)  # the same options, so the same checks

    def skip(self, task: Task) -> str | None:
        missing = [name for name in REQUIRED_PACKAGES if importlib.util.find_spec(name) is None]
        return f"{', '.join(missing)} not installed: {INSTALL}" if missing else None

    def memory_bytes(self, size: Size) -> int:
        """Every loss of every draw, twice while they are put in order, and the scores; until then they are on disk."""
        losses = 4 * (size.num_attributed + size.num_queries)
        return 2 * self.chains * self.draws * losses + 8 * size.num_attributed * size.num_queries

    def sampling_options(self, num_train: int) -> dict[str, Any]:
        """devinterp's own words for ours: the keyword arguments of its `sample`."""
        minibatch = min(self.minibatch, num_train)
        batch_size = _largest_divisor(minibatch, self.micro_batch or minibatch)
        options: dict[str, Any] = {
            "sampling_method": DEVINTERP_SAMPLERS[self.sampler],
            "lr": self.step_size,
            "n_beta": self.n_beta,
            "localization": self.gamma,
            "num_chains": self.chains,
            "num_draws": self.draws,
            "num_burnin_steps": max(0, self.burn_in * self.thinning - 1),
            "num_steps_bw_draws": self.thinning,
            "batch_size": batch_size,
            "gradient_accumulation_steps": minibatch // batch_size,
            "num_init_loss_batches": 1,  # not used by its BIF
            "match_sampling_input_ids_across_chains": False,
        }
        if self.sampler == "rmsprop_sgld":
            options["lr"] = self.step_size / self.n_beta
            options["rmsprop_eps"] = RMSPROP_STABILITY / self.n_beta
            options["rmsprop_alpha"] = RMSPROP_DECAY
        return options

    def score(self, problem: Problem, state: Any) -> Attribution:
        with tempfile.TemporaryDirectory(prefix="devinterp-", dir=problem.scratch) as folder:
            return self._score(problem, Path(folder))

    def _score(self, problem: Problem, folder: Path) -> Attribution:
        if problem.output != LOSS:
            raise UsageError(f"devinterp's covariance is of losses; the output is {problem.output}")
        devinterp_bif, devinterp_sampling = import_devinterp()
        samples, places = self._sampled(problem, devinterp_sampling, folder)
        traces = torch.from_numpy(samples[f"loss_{OBSERVABLE}"].values[..., 0])[..., places]  # (chains, draws, n + q)
        num_train = len(problem.attributed_indices)
        start = float(problem.task.losses(problem.model, problem.attributed, problem.device).mean())
        means = traces[..., :num_train].mean(-1).numpy()
        verdicts = [judge_chain(chain, losses, start, self.divergence_limit) for chain, losses in enumerate(means)]
        healthy = [verdict.chain for verdict in verdicts if verdict.healthy]
        hint = "try a smaller bif_devinterp.step_size or a larger bif_devinterp.gamma"
        require_healthy(verdicts, self.min_chains, means, "devinterp", hint)
        with _quiet():
            influences = devinterp_bif.compute_bif(
                samples.isel(chain=healthy),
                correlation_method="sequence",  # of the examples' losses
                batch_index_range_1=places[num_train:].tolist(),
                batch_index_range_2=places[:num_train].tolist(),
                compute_covariance=True,
                device=str(problem.device),
            )["influences"].values
        spread = traces[healthy].flatten(0, 1).std(0)
        scores = -torch.from_numpy(np.ascontiguousarray(influences)).float()
        if self.query_normalised:
            own = spread[num_train:, None]
            scores = scores / torch.where(own > 0, own, 1.0)
        arrays = {"mean_loss_trace": traces[healthy][..., :num_train].mean(-1)}
        if self.keep_traces:
            arrays["loss_traces"] = traces[healthy]
        return Attribution(
            scores=scores,
            train_scale=spread[:num_train],
            diagnostics={
                **diagnose(means[healthy], traces[healthy][..., diagnosed_examples(traces.shape[-1])].numpy()),
                "dropped_chains": dropped_chains(verdicts),
            },
            arrays=arrays,
        )

    def _sampled(self, problem: Problem, devinterp_sampling: Any, folder: Path) -> tuple[Any, np.ndarray]:
        """devinterp's samples, and where in them each attributed example and query (n + q,) is."""
        train, queries, device = problem.train, problem.queries, problem.device
        apart = [] if problem.pool is None else [problem.attributed]  # the model was trained on some of them only
        inputs = torch.cat([some.inputs for some in (train, *apart, queries)]).to(device)
        targets = torch.cat([some.targets for some in (train, *apart, queries)]).to(device)
        attributed = range(len(train), len(train) + len(problem.attributed)) if apart else problem.attributed_indices
        measured = [*map(int, attributed), *range(len(inputs) - len(queries), len(inputs))]
        options = self.sampling_options(len(train))
        batch_size = options["batch_size"]
        num_batches = -(-len(measured) // batch_size)
        # Only whole batches are measured: the last one is filled up with examples that are there already.
        filled = [measured[k % len(measured)] for k in range(num_batches * batch_size)]

        model = _Evaluated(detached_copy(problem.model)).to(device)
        names = [name for name in trainable_parameters(model.model) if re.search(self.parameters, name)]
        if not names:
            raise UsageError(
                f'bif_devinterp.parameters is "{self.parameters}", which no trainable parameter\'s name matches'
            )
        micro = options["gradient_accumulation_steps"]
        steps = options["num_burnin_steps"] + self.draws * self.thinning
        total = self.chains * (1 + steps * micro + self.draws * num_batches)
        ticks = iter(problem.progress(range(total), total=total, description="bif_devinterp: batches"))

        def loss_function(model: Any, numbers: Tensor) -> Tensor:
            next(ticks, None)
            chosen = numbers[:, 0].to(device)
            return problem.task.example_loss(model.model, (inputs[chosen], targets[chosen]))[:, None]

        with _quiet():
            samples = devinterp_sampling.sample(
                model=model,
                dataset=_Numbers(list(range(len(train)))),
                observables={OBSERVABLE: (_Numbers(filled), num_batches)},
                param_masks={f"model.{name}": None for name in names},
                init_seed=int(np.random.SeedSequence([problem.seed, _STREAM]).generate_state(1)[0] >> 2),
                device=str(device),
                output_path=folder / "samples.zarr",
                loss_fn=loss_function,
                **options,
            )
        list(ticks)  # closes the progress bar
        # It measures in a shuffled order, and keeps the numbers it was given.
        order = {int(number): place for place, number in enumerate(samples[f"input_ids_{OBSERVABLE}"].values[:, 0])}
        return samples, np.array([order[number] for number in measured])


class _Evaluated(nn.Module):
    """A model that stays in evaluation mode: losses are measured, and gradients taken, as everywhere in this suite."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        super().train(False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs)

    def train(self, mode: bool = True) -> "_Evaluated":
        return self


class _Numbers(torch.utils.data.Dataset):
    """Each example's number, twice: the shortest sequence devinterp takes."""

    def __init__(self, numbers: list[int]):
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor([self.numbers[index]] * 2)}


def import_devinterp() -> tuple[Any, Any]:
    """Its modules `slt.bif` and `slt.sampling`.

    devinterp imports `datasets` for a type annotation alone; where that large package is missing, a name stands in.
    """
    stand_in = importlib.util.find_spec("datasets") is None
    if stand_in:
        from transformers import PreTrainedModel  # noqa: F401  (asks for datasets itself, and must not see the name)

        module: Any = types.ModuleType("datasets")
        module.Dataset = torch.utils.data.Dataset
        sys.modules["datasets"] = module
    try:
        import devinterp.slt.bif
        import devinterp.slt.sampling
    finally:
        if stand_in:
            del sys.modules["datasets"]
    return devinterp.slt.bif, devinterp.slt.sampling


def _largest_divisor(number: int, limit: int) -> int:
    return max(divisor for divisor in range(1, min(number, limit) + 1) if number % divisor == 0)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """devinterp draws its own progress bars on stderr, over the harness's."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield

"""The base model's training run again, and looked at after equal numbers of steps: TracIn's and SOURCE's checkpoints.

    for one in snapshots(problem, 6, "source"):       # one.weights, one.rate, one.distance

It is `retrain/replays`' training: same initial weights, same order. The last snapshot is the base model itself.
"""

from dataclasses import dataclass

from torch import Tensor

from baselines.method import Problem
from retrain.backends import without_onednn
from retrain.replays import replay_of
from retrain.replays.replay import steps_of
from retrain.subsets import checkpoint_seeds


@dataclass(frozen=True)
class Snapshot:
    weights: dict[str, Tensor]  # a model's state
    rate: float  # the mean learning rate of the steps since the snapshot before
    distance: float  # the sum of these steps' sizes: how far they go along a constant gradient of the mean loss


def snapshots(problem: Problem, number: int, description: str) -> list[Snapshot]:
    """In order; as many as asked for, or as there are steps."""
    base = problem.model.state_dict()
    seeds = problem.training_seeds or checkpoint_seeds(problem.seed, problem.checkpoint_number)
    trained = range(len(problem.train)) if problem.trained_on is None else problem.trained_on(0)
    replay = replay_of(problem.task, trained, **seeds, device=problem.device)
    number = min(number, replay.num_steps)
    ends = [round((k + 1) * replay.num_steps / number) for k in range(number)]
    last = ends[-2] if number > 1 else 0
    models = []
    with without_onednn():
        states = enumerate(steps_of(replay, steps=range(last)), 1)
        for step, state in problem.progress(states, total=last, description=f"{description}: the base training"):
            if step in ends:
                weights = {name: value.clone() for name, value in replay.weights_of(state).items()}
                models.append({**base, **weights})
    found = []
    for weights, first, end in zip([*models, base], [0, *ends], ends):
        rate = sum(replay.learning_rate(step) for step in range(first, end)) / (end - first)
        distance = sum(replay.step_size(step) for step in range(first, end))
        found.append(Snapshot(weights, rate, distance))
    return found

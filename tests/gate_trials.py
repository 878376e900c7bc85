"""How often does the gate catch a broken method, and how often does it let an unchanged one pass?

    python tests/gate_trials.py [--unchanged 40] [--broken 20] [--baseline DIR] [--out FILE.json]

Not a test: it takes about 40 minutes on one core (`--first` and `--step` share it out over processes). Every trial has
seeds of its own, none of them the baseline's. Flipped, shuffled and zeroed scores are made from the unchanged runs;
"half the draws" is sampled anew, as often as the gate would.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from baselines.method import load_method
from bench.regress import (
    MORE_RUNS,
    Bench,
    default_baseline,
    derived_seed,
    judge,
    judge_agreement,
    judge_cost,
    read_reference,
    read_truth,
    run_as_often_as_needed,
    suspicious,
)
from retrain.tasks import load_task

METHODS = ("bif", "ekfac", "trak", "gradsim")
Spoil = Callable[[torch.Tensor, torch.Generator], torch.Tensor]
BREAKAGES: dict[str, Spoil] = {
    "sign flipped": lambda scores, generator: -scores,
    "examples shuffled": lambda scores, generator: scores[:, torch.randperm(scores.shape[1], generator=generator)],
    "10 % of the scores zeroed": lambda scores, generator: (
        scores * (torch.rand(scores.shape, generator=generator) >= 0.1)
    ),
    "10 % of the examples zeroed": lambda scores, generator: (
        scores * (torch.rand(scores.shape[1], generator=generator) >= 0.1)
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--task", default="digits")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--unchanged", type=int, default=40)
    parser.add_argument("--broken", type=int, default=20)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--step", type=int, default=1)
    parser.add_argument("--baseline", default=default_baseline())
    parser.add_argument("--out", help="a JSON line a trial is appended")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder, task = Path(arguments.baseline), load_task(arguments.task)
    truth = read_truth(folder, task)
    assert truth is not None
    bench = Bench(task, truth)
    references = {name: read_reference(folder, task.name, name) for name in arguments.methods}
    methods = {name: load_method(name, **task.method_settings.get(name, {})) for name in arguments.methods}

    for trial in range(arguments.first, arguments.unchanged, arguments.step):
        line: dict = {"trial": trial, "alarms": [], "caught_by": {}, "agreement": {}, "runs": {}}
        start = time.perf_counter()
        for name, method in methods.items():
            reference = references[name]
            attribution, seconds, cost = bench.attribute(method, trial)
            samples = [bench.reduce(attribution, seconds, cost)]
            if suspicious(samples[0], reference) and judge_agreement(samples, reference).passed:
                samples += [bench.sample(method, derived_seed(trial, run)) for run in range(1, MORE_RUNS + 1)]
            checks = judge(samples, reference, truth.losses)
            checks.append(judge_cost(bench, method, trial, samples[0], reference))
            line["agreement"][name] = next(check.value for check in checks if check.name == "agreement")
            line["runs"][name] = len(samples)
            line["alarms"] += [f"{name}: {c.name} {c.value:.4f}, limit {c.limit:.4f}" for c in checks if not c.passed]
            if trial < arguments.broken:
                for breakage, spoil in BREAKAGES.items():
                    spoilt = replace(
                        attribution, scores=spoil(attribution.scores, torch.Generator().manual_seed(trial))
                    )
                    # One run: what the gate's further ones would only confirm.
                    found = judge([bench.reduce(spoilt, seconds, cost)], reference, truth.losses)
                    line["caught_by"][f"{breakage}, {name}"] = [c.name for c in found if not c.passed]
        line["seconds"] = round(time.perf_counter() - start, 1)
        if trial < arguments.broken and "bif" in methods:
            half = replace(methods["bif"], draws=methods["bif"].draws // 2)  # type: ignore[attr-defined,call-arg]
            samples = run_as_often_as_needed(bench, half, references["bif"], trial)
            found = judge(samples, references["bif"], truth.losses)
            line["caught_by"]["half the draws, bif"] = [c.name for c in found if not c.passed]
            line["agreement"]["bif, half the draws"] = next(c.value for c in found if c.name == "agreement")
            line["runs"]["bif, half the draws"] = len(samples)
        print(json.dumps(line), flush=True)
        if arguments.out:
            with open(arguments.out, "a") as file:
                file.write(json.dumps(line) + "\n")


def summarise(lines: list[dict]) -> dict:
    """What the trials of all processes came to: results/regress/trials.json."""
    caught: dict[str, dict[str, int]] = {}
    for line in lines:
        for breakage, checks in line["caught_by"].items():
            counts = caught.setdefault(breakage, {"runs": 0, "caught": 0})
            counts["runs"] += 1
            counts["caught"] += bool(checks)
            for check in checks:
                counts[f"by {check}"] = counts.get(f"by {check}", 0) + 1
    return {
        "unchanged_runs": len(lines),
        "unchanged_runs_passed": sum(not line["alarms"] for line in lines),
        "false_alarms": [f"trial {line['trial']}, {alarm}" for line in lines for alarm in line["alarms"]],
        "caught": dict(sorted(caught.items())),
        "median_seconds_of_a_gate_run": round(float(np.median([line["seconds"] for line in lines])), 1),
        "longest_gate_run_seconds": max(line["seconds"] for line in lines),
    }


if __name__ == "__main__":
    main()

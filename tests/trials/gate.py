"""How often does the gate catch a broken method, let an unchanged one pass, and know a busy machine from a slow method?

    python tests/trials/gate.py scores [--unchanged 40] [--broken 20] [--baseline DIR] --out FILE.jsonl
    python tests/trials/gate.py cost [--runs 10] [--loops 4] [--baseline DIR] --out FILE.jsonl
    python tests/trials/gate.py summary FILE.jsonl ... > results/regress/trials.json

Not a test. `scores` takes about 40 minutes on one core (`--first` and `--step` share it out over processes); every
trial has seeds of its own, none of them the baseline's. Flipped, shuffled and zeroed scores are made from the unchanged
runs; "half the draws" is sampled anew, as often as the gate would. `cost` runs the whole gate beside busy loops, and
GradSim three times as slow with and without them; without, it needs a machine that is quiet for some seconds.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from baselines.method import Method
from bench.regress import (
    PACKAGED,
    GateRunner,
    MethodBaseline,
    gate,
    judge_cost,
    judge_scores,
    read_method_baseline,
    read_task_baseline,
    with_more_runs,
)
from bench.regress.__main__ import GATED_METHODS, build_gated_method
from retrain.tasks import load_task

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
SLOW_METHOD, SLOW_AGAINST = "tests.helpers.bad_methods:Slow", "gradsim"


def scores_trial(
    trial: int, runner: GateRunner, methods: dict[str, Method], references: dict[str, MethodBaseline], broken: bool
) -> dict:
    line: dict = {"kind": "scores", "trial": trial, "alarms": [], "caught_by": {}, "agreement": {}, "runs": {}}
    losses = runner.recorded.losses
    start = time.perf_counter()
    for name, method in methods.items():
        reference = references[name]
        attribution, timing = runner.attribute(method, trial)
        samples = with_more_runs([runner.reduce(attribution, timing)], runner, method, reference, trial)
        checks = judge_scores(samples, reference, losses)
        checks.append(judge_cost(timing, reference, lambda method=method: runner.attribute(method, trial)[1]))
        line["agreement"][name] = next(check.value for check in checks if check.name == "agreement")
        line["runs"][name] = len(samples)
        line["alarms"] += [f"{name}: {c.name} {c.value:.4f}, limit {c.limit:.4f}" for c in checks if not c.passed]
        for breakage, spoil in BREAKAGES.items() if broken else ():
            spoilt = spoil(attribution.scores, torch.Generator().manual_seed(trial))
            # One run: what the gate's further ones would only confirm.
            found = judge_scores([runner.reduce(replace(attribution, scores=spoilt), timing)], reference, losses)
            line["caught_by"][f"{breakage}, {name}"] = [c.name for c in found if not c.passed]
    line["seconds"] = round(time.perf_counter() - start, 1)
    if broken and "bif" in methods:
        half = replace(methods["bif"], draws=methods["bif"].draws // 2)  # type: ignore[attr-defined,call-arg]
        samples = with_more_runs([runner.sample(half, trial)], runner, half, references["bif"], trial)
        found = judge_scores(samples, references["bif"], losses)
        line["caught_by"]["half the draws, bif"] = [c.name for c in found if not c.passed]
        line["agreement"]["bif, half the draws"] = next(c.value for c in found if c.name == "agreement")
        line["runs"]["bif, half the draws"] = len(samples)
    return line


# ---- cost ----


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    code = f"import os\nwhile os.getppid() == {os.getpid()}: sum(range(100_000))"  # none outlives the trials
    loops = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def cost_trials(
    runner: GateRunner, methods: dict[str, Method], references: dict[str, MethodBaseline], runs: int, loops: int
) -> Iterator[dict]:
    """The unchanged methods beside busy loops, and the slow one beside them and without."""
    label, slow = build_gated_method(SLOW_METHOD, runner.task)
    for trial in range(runs):
        start = time.perf_counter()
        with busy_loops(loops):
            verdicts = [gate(runner, name, method, references[name], trial) for name, method in methods.items()]
            seconds = round(time.perf_counter() - start, 1)
            verdicts.append(gate(runner, label, slow, references[SLOW_AGAINST], trial))
        verdicts.append(gate(runner, label, slow, references[SLOW_AGAINST], trial))
        for verdict, where in zip(verdicts, [*["busy"] * (len(methods) + 1), "without loops"], strict=True):
            cost = next((check for check in verdict.checks if check.name == "cost"), None)
            yield {
                "kind": "cost",
                "trial": trial,
                "machine": where,
                "loops": loops if where == "busy" else 0,
                "method": verdict.method,
                "passed": verdict.passed,
                "failed": [check.name for check in verdict.checks if not check.passed]
                + [verdict.error] * bool(verdict.error),
                "cost": cost and cost.state,
                "ratio": cost and round(cost.value, 3),
                "note": cost and f"{cost.note}; {cost.warning}",
                "gate_seconds": seconds,
            }


# ---- what it all came to ----


def summarise(lines: list[dict]) -> dict:
    """results/regress/trials.json, from the lines of all processes."""
    return {**_summarise_scores([line for line in lines if line["kind"] == "scores"]), **_summarise_cost(lines)}


def _summarise_scores(lines: list[dict]) -> dict:
    if not lines:
        return {}
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


def _summarise_cost(lines: list[dict]) -> dict:
    lines = [line for line in lines if line["kind"] == "cost"]
    found: dict[str, dict] = {}
    for line in lines:
        loops = f"beside {line['loops']} busy loops" if line["loops"] else "without loops"
        counts = found.setdefault(
            f"{line['method']}, {loops}",
            {"runs": 0, "pass": 0, "warn": 0, "FAIL": 0, "failed_otherwise": 0, "ratio": []},
        )
        counts["runs"] += 1
        counts[line["cost"]] += 1
        counts["failed_otherwise"] += bool(set(line["failed"]) - {"cost"})
        counts["ratio"].append(line["ratio"])
    for counts in found.values():
        counts["ratio"] = {"median": float(np.median(counts["ratio"])), "largest": max(counts["ratio"])}
    return {"cost": found} if found else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("scores", "cost"):
        command = commands.add_parser(name)
        command.add_argument("--task", default="digits")
        command.add_argument("--methods", nargs="+", default=GATED_METHODS)
        command.add_argument("--baseline", default=PACKAGED, type=Path)
        command.add_argument("--out", required=True, help="a JSON line a trial is appended")
    commands.choices["scores"].add_argument("--unchanged", type=int, default=40)
    commands.choices["scores"].add_argument("--broken", type=int, default=20)
    commands.choices["scores"].add_argument("--first", type=int, default=0)
    commands.choices["scores"].add_argument("--step", type=int, default=1)
    commands.choices["cost"].add_argument("--runs", type=int, default=10)
    commands.choices["cost"].add_argument("--loops", type=int, default=4)
    commands.add_parser("summary").add_argument("files", nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "summary":
        lines = [json.loads(line) for file in arguments.files for line in Path(file).read_text().splitlines()]
        print(json.dumps({**summarise(lines), "cores": os.cpu_count()}, indent=1))
        return

    torch.set_num_threads(1)
    task = load_task(arguments.task)
    recorded = read_task_baseline(arguments.baseline, task)
    assert recorded is not None
    runner = GateRunner(task, recorded)
    references = {name: read_method_baseline(arguments.baseline, task.name, name) for name in arguments.methods}
    methods = {name: build_gated_method(name, task)[1] for name in arguments.methods}
    if arguments.command == "cost":
        trials = cost_trials(runner, methods, references, arguments.runs, arguments.loops)
    else:
        numbers = range(arguments.first, arguments.unchanged, arguments.step)
        trials = (scores_trial(trial, runner, methods, references, trial < arguments.broken) for trial in numbers)
    for line in trials:
        print(json.dumps(line), flush=True)
        with open(arguments.out, "a") as file:
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()

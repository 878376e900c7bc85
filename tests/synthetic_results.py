"""Run records of the shape that `bench.lds` writes, made up from a formula: for tests of figures and the report."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bench.lds import COLUMNS, METHODS, PAIR_COLUMNS

QUALITY = {"bif": 0.34, "ekfac": 0.40, "trak": 0.22, "gradsim": 0.31, "random": 0.0}
SECONDS = {"bif": 6.0, "ekfac": 24.0, "trak": 40.0, "gradsim": 3.0, "random": 0.2}


def write_run(
    folder: Path,
    *,
    run_id: str = "aaaabbbbcccc",
    task: str = "cifar10",
    protocols: tuple[str, ...] = ("paper",),
    methods: tuple[str, ...] = METHODS,
    alphas: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7),
    shares: tuple[float, ...] = (0.01, 0.1, 1.0),
    seeds: tuple[int, ...] = (1, 2, 3, 4, 42),
    device: str = "NVIDIA H200",
    split: str = "report",
) -> Path:
    """One record a call: <folder>/<run_id>/run.json, lds.csv and pairs.csv."""
    rows: list[dict[str, Any]] = []
    ceilings: list[dict[str, Any]] = []
    pairs: list[dict[str, Any]] = []
    for protocol, share, alpha, seed in product(protocols, shares, alphas, seeds):
        generator = np.random.default_rng([seed, round(1000 * share), round(100 * alpha)])
        where = {"task": task, "protocol": protocol, "alpha": alpha, "alpha_attribution": share, "seed": seed}
        ceiling = 0.85 - (0.9 if protocol == "paper" else 0.4) * alpha + 0.02 * generator.normal()
        ceilings.append(where | {"ceiling": ceiling, "num_replicates": 2})
        for normalised in (False, True):
            for method in methods:
                lds = (
                    QUALITY.get(method, 0.2) * (1.1 if normalised else 1) * (1 - 0.7 * alpha)
                    + 0.02 * generator.normal()
                )
                rows.append(
                    where
                    | {
                        "method": method, "normalised": normalised, "num_subsets": 100, "num_queries": 8000,
                        "num_undefined": 0, "lds": lds, "ci_low": lds - 0.03, "ci_high": lds + 0.03,
                        "lds_across_queries": 0.5 * lds, "ceiling": ceiling, "spread": 0.11, "fit_seconds": 0.0,
                        "score_seconds": SECONDS.get(method, 5.0) * (0.3 + share) * (1 + 0.05 * generator.random()),
                        "peak_memory_bytes": 2**31, "device": device, "run_id": run_id,
                    }
                )  # fmt: skip
            pairs.append(
                where
                | {
                    "method": "bif", "against": "ekfac", "normalised": normalised, "num_subsets": 100,
                    "num_queries": 8000, "num_undefined": 0, "difference": -0.05, "ci_low": -0.08, "ci_high": -0.02,
                    "p_value": 0.001, "run_id": run_id,
                }
            )  # fmt: skip
    place = folder / run_id
    place.mkdir(parents=True)
    record = {
        "run_id": run_id, "command": f"python -m bench.lds --task {task}", "description": task, "device": device,
        "config": {"task": {"name": task}, "query_split": split, "methods": [{"name": name} for name in methods]},
        "versions": {"torch": "2.13.0"}, "commit": "0123456789ab", "machine": {"cores": 2, "node": "vm"},
        "finished": "2026-11-15T00:00:00Z", "seconds": 100.0, "rows": rows, "ceilings": ceilings, "pairs": pairs,
        "diagnostics": [], "skipped": {}, "problems": [],
    }  # fmt: skip
    (place / "run.json").write_text(json.dumps(record))
    pd.DataFrame(rows, columns=COLUMNS).to_csv(place / "lds.csv", index=False)
    pd.DataFrame(pairs, columns=PAIR_COLUMNS).to_csv(place / "pairs.csv", index=False)
    return place


def write_sweep(folder: Path) -> None:
    folder.mkdir(parents=True)
    axes = {"burn_in": [0, 100], "n_beta": [300, 3000], "gamma": [1000, 10000]}
    cells = []
    for burn_in, n_beta, gamma in product(*axes.values()):
        generator = np.random.default_rng([burn_in, n_beta, gamma])
        diverged = n_beta > gamma
        traces = (
            (0.3 + 0.5 * (1 - np.exp(-np.arange(100) / 20)) + 0.05 * generator.normal(size=(2, 100))).round(3).tolist()
        )
        lds = None if diverged else round(0.2 + 0.05 * generator.random(), 4)
        cells.append(
            {"burn_in": burn_in, "n_beta": n_beta, "gamma": gamma, "lds": lds, "traces": [] if diverged else traces}
        )
    sweep = {
        "task": "cifar10", "protocol": "paper", "method": "bif", "alpha": 0.1, "alpha_attribution": 0.1, "seed": 1,
        "split": "tune", "run_id": "sweep0000000", "axes": axes, "cells": cells,
    }  # fmt: skip
    (folder / "sweep.json").write_text(json.dumps(sweep))


def write_budget(folder: Path) -> None:
    folder.mkdir(parents=True)
    curves = []
    for method, axis, values in (("bif", "draws", [10, 30, 100, 300, 1000]), ("trak", "projection", [256, 1024, 4096])):
        points = [
            {
                "value": value,
                "seconds": 0.02 * value,
                "lds": 0.3 - 1 / value,
                "ci_low": 0.27 - 1 / value,
                "ci_high": 0.33 - 1 / value,
            }
            for value in values
        ]
        curves.append({"method": method, "axis": axis, "normalised": method == "bif", "points": points})
    budget = {
        "task": "cifar10", "protocol": "paper", "alpha": 0.1, "device": "NVIDIA H200", "run_id": "budget000000",
        "curves": curves,
    }  # fmt: skip
    (folder / "budget.json").write_text(json.dumps(budget))


def write_scaling(folder: Path, devices: tuple[str, ...] = ("NVIDIA H200",)) -> None:
    folder.mkdir(parents=True)
    rows = []
    for device, (model, parameters) in product(devices, (("14m", 14e6), ("160m", 160e6), ("1b", 1e9), ("2.8b", 2.8e9))):
        for method, power in (("bif", 0.8), ("ekfac", 1.3)):
            seconds = (parameters / 1e6) ** power
            rows.append(
                {
                    "model": model, "parameters": parameters, "method": method, "fit_seconds": 0.3 * seconds,
                    "score_seconds": seconds, "peak_memory_bytes": 4 * parameters + 1e9, "device": device,
                    "projected": model == "2.8b", "error": "", "run_id": "scaling00000",
                }
            )  # fmt: skip
    pd.DataFrame(rows).to_csv(folder / "scaling.csv", index=False)

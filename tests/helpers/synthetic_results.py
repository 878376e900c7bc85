"""Run records of the shape that `bench.lds` writes, made up from a formula: for tests of figures and the report."""

import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

METHODS = ("bif", "ekfac", "trak", "gradsim", "random")
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
    subsets: int = 100,
    task_settings: Mapping[str, Any] = {},
    options: Mapping[str, Mapping[str, Any]] = {},
    finished: str = "2026-11-15T00:00:00Z",
    shift: float = 0.0,
    folder_name: str | None = None,
    linear_ceiling: bool = False,
) -> Path:
    """One record a call: <folder>/<run_id>/run.json. A method "ekfac@damping=1e-4" is that variant of ekfac.

    `options`: of a label; `shift`: added to every LDS.
    """
    rows: list[dict[str, Any]] = []
    ceilings: list[dict[str, Any]] = []
    pairs: list[dict[str, Any]] = []
    entries = []
    for label in methods:
        name, _, variant = label.partition("@")
        own = dict(part.split("=") for part in variant.split(",")) if variant else {}
        entries.append(
            {"name": name, "version": 1, **({"label": label} if variant else {}), **own, **options.get(label, {})}
        )
    for protocol, share, alpha, seed in product(protocols, shares, alphas, seeds):
        generator = np.random.default_rng([seed, round(1000 * share), round(100 * alpha)])
        where = {"task": task, "protocol": protocol, "alpha": alpha, "alpha_attribution": share, "seed": seed}
        sizes = {"num_subsets": subsets, "num_queries": 8000, "num_undefined": 0}
        ceiling = 0.85 - (0.9 if protocol == "paper" else 0.4) * alpha + 0.02 * generator.normal()
        reach = {"ci_low": ceiling - 0.02, "ci_high": ceiling + 0.02}
        linear = {"linear_share": 0.8 * ceiling**2, "linear_low": 0.85 * ceiling, "linear_high": 0.95 * ceiling}
        known = {"reliability": ceiling**2, "num_replicates": 2, **(linear if linear_ceiling else {})}
        ceilings.append(where | {"ceiling": ceiling, **known, **reach})
        for normalised in (False, True):
            for label in methods:
                method = label.partition("@")[0]
                lds = (
                    QUALITY.get(method, 0.2) * (1.1 if normalised else 1) * (1 - 0.7 * alpha)
                    + 0.02 * generator.normal()
                    + shift
                )
                seconds = SECONDS.get(method, 5.0) * (0.3 + share) * (1 + 0.05 * generator.random())
                rows.append(
                    {
                        **where, **sizes, "method": method, "normalised": normalised, "lds": lds, "ci_low": lds - 0.03,
                        "ci_high": lds + 0.03, "lds_across_queries": 0.5 * lds, "ceiling": ceiling, "spread": 0.11,
                        "fit_seconds": 0.2, "score_seconds": seconds,
                        "peak_memory_bytes": 2**31, "device": device, "run_id": run_id,
                        **({"label": label, "settings": label.partition("@")[2]} if "@" in label else {}),
                    }
                )  # fmt: skip
            for k, label in enumerate(methods):
                for against in methods[k + 1 :]:
                    gap = QUALITY.get(label.partition("@")[0], 0.2) - QUALITY.get(against.partition("@")[0], 0.2)
                    pairs.append(
                        {
                            **where, **sizes, "method": label.partition("@")[0], "label": label, "against": against,
                            "normalised": normalised, "difference": gap, "ci_low": gap - 0.03, "ci_high": gap + 0.03,
                            "p_value": 0.001, "run_id": run_id,
                        }
                    )  # fmt: skip
    place = folder / (folder_name or run_id)
    place.mkdir(parents=True)
    config = {
        "task": {"name": task, **task_settings}, "query_split": split, "queries": None, "scheme": "fixed",
        "subsets": subsets, "methods": entries,
    }  # fmt: skip
    record = {
        "run_id": run_id, "command": f"python -m bench.lds --task {task}", "description": task, "device": device,
        "config": config, "versions": {"torch": "2.13.0"}, "commit": "0123456789ab",
        "machine": {"cores": 2, "node": "vm"}, "finished": finished, "seconds": 100.0, "rows": rows,
        "ceilings": ceilings, "pairs": pairs, "diagnostics": [], "skipped": {}, "problems": [],
    }  # fmt: skip
    (place / "run.json").write_text(json.dumps(record))
    return place


def write_sweep(folder: Path, **more: Any) -> None:
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
        "split": "tune", "run_id": "sweep0000000", "axes": axes, "cells": cells, **more,
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


def write_examples(folder: Path, **images: Any) -> None:
    """Two queries of an image task with two methods, and one pair of token sequences."""
    from PIL import Image

    (folder / "images").mkdir(parents=True)
    tiles = np.random.default_rng(0).integers(0, 256, size=(8, 8 * 6), dtype=np.uint8)
    Image.fromarray(tiles).save(folder / "images" / "images.png")
    shown = [{"train": k, "label": str(k % 2), "score": -0.5 + k, "image": k} for k in (2, 3)]
    both = {"helpful": shown, "harmful": shown[::-1]}
    queries = [{"query": q, "label": str(q), "image": q, "methods": {"bif": both, "ekfac": both}} for q in (0, 1)]
    agreement = [
        {
            "one": "bif",
            "other": "ekfac",
            "side": side,
            "named": named,
            "shared": 0.6,
            "error": 0.02,
            "chance": named / 50,
        }
        for side in ("helpful", "harmful")
        for named in (1, 3, 10)
    ]
    images = {"agreement": agreement, "num_train": 50, "num_queries": 20, **images}
    content = {
        "kind": "images", "task": "digits", "description": "digits", "seed": 1, "scores": "raw", "sprite": "images.png",
        "methods": ["bif", "ekfac"], "tile": [8, 8], "queries": queries, **images,
    }  # fmt: skip
    (folder / "images" / "examples.json").write_text(json.dumps(content))
    (folder / "tokens").mkdir()
    pair = {
        "query": 3,
        "train": 5,
        "query_tokens": ["a", " b", "\n"],
        "train_tokens": ["</script>", "d"],
        "bif": [[0.1, -0.9]] * 3,
        "ekfac": [1, -2],
    }
    content = {"kind": "tokens", "description": "tinylm", "seed": 1, "scores": "normalised BIF", "pairs": [pair]}
    (folder / "tokens" / "examples.json").write_text(json.dumps(content))

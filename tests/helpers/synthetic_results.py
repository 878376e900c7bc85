"""Run records of the shape that `bench.lds` writes, made up from a formula: for tests of figures and the report."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np

from bench.scaling.rows import write_csv
from tests.helpers.scaling_laws import rows_by_law

METHODS = ("bif", "ekfac", "trak", "gradsim", "random")
QUALITY = {"bif": 0.34, "ekfac": 0.40, "trak": 0.22, "gradsim": 0.31, "random": 0.0}
CONTROLS = ("same_class", "random")
SECONDS = {"bif": 6.0, "ekfac": 24.0, "trak": 40.0, "gradsim": 3.0, "random": 0.2}


@contextmanager
def edited(path: Path) -> Iterator[dict[str, Any]]:
    """A record, which is written back with what was changed in it."""
    record = json.loads(path.read_text())
    yield record
    path.write_text(json.dumps(record))


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
    scheme: str = "fixed",
    reference: str = "full",
    within: Mapping[str, float | None] | None = None,
    quality: Mapping[str, float] = {},
) -> Path:
    """One record a call: <folder>/<run_id>/run.json. A method "ekfac@damping=1e-4" is that variant of ekfac.

    `options`: of a label; `shift`: added to every LDS; `quality`: a label's LDS before alpha takes its share;
    `within`: of a task with groups, each label's LDS within them.
    """
    rows, ceilings, pairs, entries = [], [], [], []
    for label in methods:
        name, _, variant = label.partition("@")
        own = dict(part.split("=") for part in variant.split(",")) if variant else {}
        own |= {"reference": reference} if reference != "full" and name not in CONTROLS else {}
        entries.append({"name": name, "version": 1, "label": label, **own, **options.get(label, {})})
    for protocol, share, alpha, seed in product(protocols, shares, alphas, seeds):
        generator = np.random.default_rng([seed, round(1000 * share), round(100 * alpha)])
        where = {"task": task, "protocol": protocol, "alpha": alpha, "alpha_attribution": share, "seed": seed}
        sizes = {"num_subsets": subsets, "num_queries": 8000, "num_undefined": 0}
        ceiling = 0.85 - (0.9 if protocol == "paper" else 0.4) * alpha + 0.02 * generator.normal()
        reach = {"ci_low": ceiling - 0.02, "ci_high": ceiling + 0.02}
        linear = {"linear_share": 0.8 * ceiling**2, "linear_low": 0.85 * ceiling, "linear_high": 0.95 * ceiling}
        known = {"reliability": ceiling**2, "num_replicates": 2, **(linear if linear_ceiling else {})}
        grouped = {"group_name": "class", "ceiling_within_groups": ceiling - 0.1, "ceiling_within_groups_low": 0.2,
                   "ceiling_within_groups_high": 0.9, "reliability_within_groups": (ceiling - 0.1) ** 2}  # fmt: skip
        ceilings.append(where | {"ceiling": ceiling, **known, **reach} | (grouped if within else {}))
        for normalised in (False, True):
            for label in methods:
                method = label.partition("@")[0]
                level = quality.get(label, QUALITY.get(method, 0.2)) * (1.1 if normalised else 1) * (1 - 0.7 * alpha)
                lds = level + 0.02 * generator.normal() + shift
                seconds = SECONDS.get(method, 5.0) * (0.3 + share) * (1 + 0.05 * generator.random())
                row = {
                    **where, **sizes, "method": method, "normalised": normalised, "lds": lds, "ci_low": lds - 0.03,
                    "ci_high": lds + 0.03, "lds_across_queries": 0.5 * lds, "ceiling": ceiling, "spread": 0.11,
                    "fit_seconds": 0.2, "score_seconds": seconds, "peak_memory_bytes": 2**31, "device": device,
                    "run_id": run_id, "label": label, "settings": label.partition("@")[2],
                }  # fmt: skip
                rows.append({**row, **(_within(within.get(label, 0.1), 1 - alpha) if within else {})})
            for label, against in combinations(methods, 2):
                name, other = (one.partition("@")[0] for one in (label, against))
                gap = QUALITY.get(name, 0.2) - QUALITY.get(other, 0.2)
                pair = {
                    **where, **sizes, "method": name, "label": label, "against": against, "normalised": normalised,
                    "difference": gap, "ci_low": gap - 0.03, "ci_high": gap + 0.03, "p_value": 0.001, "run_id": run_id,
                }  # fmt: skip
                more = _gap_within(within.get(label, 0.1), within.get(against, 0.1)) if within else {}
                pairs.append({**pair, **more})
    place = folder / (folder_name or run_id)
    place.mkdir(parents=True)
    config = {
        "task": {"name": task, **task_settings}, "query_split": split, "queries": None, "scheme": scheme,
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


def _within(value: float | None, share: float) -> dict[str, float | None]:
    """A row's columns within groups; None of what knows the groups alone."""
    value = None if value is None else share * value
    ends = {"within_groups_low": value and value - 0.02, "within_groups_high": value and value + 0.02}
    return {"lds_within_groups": value, **ends, "ceiling_within_groups": 0.8}


def _gap_within(one: float | None, other: float | None) -> dict[str, float | None]:
    gap = None if one is None or other is None else one - other
    ends = {"within_groups_low": gap and gap - 0.02, "within_groups_high": gap and gap + 0.02}
    return {"difference_within_groups": gap, **ends, "p_value_within_groups": gap and 0.001}


ASKED_OF = {  # method -> LDS within class at the full model, at one model like those asked about, at eight
    "kfac": (0.14, 0.66, 0.74), "ekfac": (0.13, 0.65, 0.73), "trak": (0.07, 0.57, 0.62), "gradsim": (0.07, 0.51, 0.55),
    "bif": (0.13, 0.45, 0.50), "repsim": (-0.01, 0.02, 0.03),
}  # fmt: skip


def write_question(folder: Path, **known: Any) -> None:
    """Records as a campaign leaves them: <folder>/question-<scheme>-<reference>, two schemes x two references."""
    controls: dict[str, float | None] = {"same_class": None, "random": 0.0}
    for scheme, reference in product(("fixed", "balanced"), ("full", "subset")):
        counts = (1,) if reference == "full" else (1, 8)
        within = dict(controls)
        for (method, values), count in product(ASKED_OF.items(), counts):
            label = method if count == 1 else f"{method}@models={count}"
            within[label] = values[0 if reference == "full" else 1 + (count > 1)]
        more = {"bif-paper": 0.03, "ekfac-library": 0.15} if reference == "full" else {}
        options = {label: {"label": label, "name": label.partition("-")[0]} for label in more}
        within |= more
        lds = {label: 0.4 + 0.5 * (0.4 if value is None else value) for label, value in within.items()}
        lds["random"] = 0.0
        name = f"question-{scheme}-{reference}"
        write_run(
            folder, run_id=f"{scheme[:3]}{reference[:3]}".ljust(12, "0"), folder_name=name, scheme=scheme,
            reference=reference, methods=tuple(within), options=options, within=within,
            quality=lds if scheme == "fixed" else {label: value or 0.0 for label, value in within.items()},
            **{"shares": (0.1,), "seeds": (1, 2), "alphas": (0.1, 0.5), "protocols": ("scratch",), **known},
        )  # fmt: skip


def write_budget(folder: Path, **more: Any) -> None:
    folder.mkdir(parents=True)
    curves = []
    for method, axis, values in (("bif", "draws", [10, 30, 100, 300, 1000]), ("trak", "projection", [256, 1024, 4096])):
        ends = {value: {"ci_low": 0.27 - 1 / value, "ci_high": 0.33 - 1 / value} for value in values}
        points = [{"value": value, "seconds": 0.02 * value, "lds": 0.3 - 1 / value, **ends[value]} for value in values]
        curve = {"method": method, "label": method, "axis": axis, "normalised": method == "bif", "options": {}}
        curves.append({**curve, "points": points})
    budget = {
        "task": "cifar10", "protocol": "paper", "alpha": 0.1, "device": "NVIDIA H200", "run_id": "budget000000",
        "description": "CIFAR-10", "split": "report", "seed": 1, "num_subsets": 100, "replicates": 2,
        "num_queries": 1000, "curves": curves, **more,
    }  # fmt: skip
    (folder / "budget.json").write_text(json.dumps(budget))


def write_scaling(folder: Path, devices: tuple[str, ...] = ("NVIDIA H200",)) -> None:
    rows = [
        row | {"device": device, "projected": row["model"] == "2.8b", "run_id": "scaling00000"}
        for device in devices
        for row in rows_by_law(("14m", "160m", "1b", "2.8b"))
    ]
    folder.mkdir(parents=True)
    write_csv(folder / "scaling.csv", rows)


def write_examples(folder: Path, **images: Any) -> None:
    """Two queries of an image task with two methods, and one pair of token sequences."""
    from PIL import Image

    (folder / "images").mkdir(parents=True)
    tiles = np.random.default_rng(0).integers(0, 256, size=(8, 8 * 6), dtype=np.uint8)
    Image.fromarray(tiles).save(folder / "images" / "images.png")
    shown = [{"train": k, "label": str(k % 2), "score": -0.5 + k, "image": k} for k in (2, 3)]
    both = {"helpful": shown, "harmful": shown[::-1]}
    query = {"methods": {"bif": both, "ekfac": both}, "chosen": ""}
    queries = [{"query": q, "label": str(q), "image": q, **query} for q in (0, 1)]
    pair = {"one": "bif", "other": "ekfac", "shared": 0.6, "error": 0.02}
    agreement = [
        pair | {"side": side, "named": named, "chance": named / 50}
        for side in ("helpful", "harmful") for named in (1, 3, 10)
    ]  # fmt: skip
    known = {"protocol": "scratch", "seed": 1, "methods": ["bif", "ekfac"], "settings": {}, "rule": ""}
    images = {"agreement": agreement, "num_train": 50, "num_queries": 20, "alpha_attribution": 1.0, **images}
    content = {
        "kind": "images", "task": "digits", "description": "digits", "scores": "raw", "sprite": "images.png",
        "tile": [8, 8], "queries": queries, **known, **images,
    }  # fmt: skip
    (folder / "images" / "examples.json").write_text(json.dumps(content))
    (folder / "tokens").mkdir()
    words = {"query_tokens": ["a", " b", "\n"], "train_tokens": ["</script>", "d"]}
    pair = {"query": 3, "train": 5, **words, "bif": [[0.1, -0.9]] * 3, "ekfac": [1, -2]}
    content = {
        "kind": "tokens", "task": "tinylm", "description": "tinylm", "scores": "normalised BIF", "pairs": [pair],
        "num_draws": 100, **known,
    }  # fmt: skip
    (folder / "tokens" / "examples.json").write_text(json.dumps(content))

"""What may be compared with what: the ground, the truth and the series of every row, and short names for them.

`ground` is what was asked: the task with all its settings, protocol, scheme, queries. `truth` adds how well it was
measured: subsets, replicates, queries. `series` is a method with its settings, fitting set included. Rows that differ
in any part of one of them get another name, whatever folder they lie in; `bench.records` gives the names to its rows.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from bench.publish.plots.style import look
from bench.tables import acting, setting_text

AXES = ("task", "protocol", "alpha", "alpha_attribution", "seed")  # one ground truth of a run
# A task's code, and earlier code that gave the same LDS to the last digit: SmolLM2's (5707b0d, 4ba789c).
SAME_CODE = {"0d3b720241f2f593": "a2aace149fd1b699"}
# Of a run's config: what is no part of its ground, because it is an axis, a series, how well the ground is measured, or
# how the task's own config, which has it all, came about.
NOT_GROUND = {
    "alpha", "alpha_attribution", "methods", "options", "replicated_subsets", "replicates", "seeds", "settings",
    "subsets", "task_options", "versions",
}  # fmt: skip
# As these nearly always are; a record that is older than one of them had this value.
USUAL_GROUND = {
    "initialisation": "shared", "queries": None, "query_split": "report", "scheme": "fixed", "stream": "report",
}  # fmt: skip
# Of a method's description: what changes no score.
NO_SETTING = {"asked", "keep_traces", "label", "name", "origin", "rows", "settings", "source", "train_covariance"}
# Nobody sets a version, batches follow the machine, and the models that a method looks at are told beside its name;
# where they differ, the name of the series says so.
UNTOLD = NO_SETTING | {"version", "fit_batch_size", "gradient_batch_size", "reference", "models"}
OWN_MODELS = ("daunce",)  # methods whose option `models` is their own, and counts no models that they look at
PILOTED = ("bif", "bif_cv")  # methods whose 0 leaves these to a pilot run
LEFT_TO_PILOT = ("draws", "gamma", "n_beta", "step_size")
LONG = 48  # letters of settings from which a name gives their digest instead

# Options as they nearly always are. A record older than the option had this value, and settings need not say it.
_BIF = {
    "burn_in": 0, "centring": "pooled", "control_variate": False, "damping": 0.1, "displacement": "float32",
    "divergence_limit": 5.0, "fit_examples": 0, "gradient": "minibatch", "localiser": "isotropic", "min_chains": 1,
    "parameters": "", "query_normalised": False, "sampler": "sgld", "shrinkage": False, "thinning": 1, "version": 1,
}  # fmt: skip
_BIF_CV = {**_BIF, "control_variate": True, "gradient": "difference"}
USUAL: dict[str, dict[str, Any]] = {
    "bif": _BIF,
    "bif_cv": _BIF_CV,
    "ekfac": {"self_influence": True, "strategy": "ekfac", "version": 1},
    "kfac": {"fit_examples": 0, "labels": "sampled", "layers": "all", "parameters": "", "self_influence": True},
    "trak": {"checkpoints": 1, "projector": "sketch", "version": 1},
    "gradsim": {"parameters": "", "version": 1},
    "datamodel": {"alpha": 0.0, "covariance": "likelier", "outcome": "ranks", "prior": "none", "version": 1},
    "random": {"version": 1},
}
# Of a task's options: other readings of its protocol, which a configuration has only where they are not the usual one.
UNUSUAL_READINGS = ("epoch_rate", "warmup_keeps")


class Identity:
    """Of one record: which ground, truth and series each of its rows and pairs belongs to."""

    def __init__(self, record: Mapping[str, Any]):
        self.config = record["config"]
        self.methods = self.config.get("methods", [])
        self.ceilings = {place(ceiling): ceiling for ceiling in record["ceilings"]}
        task = self.config["task"]
        asked = {name: value for name, value in self.config.items() if name not in NOT_GROUND}
        if asked.get("output") == "loss":  # named where it is not, as readings of a protocol are
            del asked["output"]
        self._asked = {**USUAL_GROUND, **asked, "task": {name: task[name] for name in task if name != "source"}}
        self._series: dict[tuple[str, str, bool], dict[str, Any]] = {}

    def of(self, row: Mapping[str, Any]) -> dict[str, str]:
        ground = canonical({**self._asked, "of": row["task"], "protocol": row["protocol"]})
        replicates = self.ceilings.get(place(row), {}).get("num_replicates")
        measured = [self.config.get("replicated_subsets"), row["num_subsets"], row["num_queries"], replicates]
        # The task's own code decides the losses as its settings do, but names no other question.
        code = self.config["task"].get("source")
        truth = ground + canonical([*measured, SAME_CODE.get(code, code)])
        asked = {name: value for name, value in self._asked.items() if name != "scheme"}
        question = short_digest(canonical({**asked, "of": row["task"], "protocol": row["protocol"]}))
        ids = {"ground_id": ground, "truth_id": truth, "question": question, "scheme": self._asked["scheme"]}
        return {**ids, **self.series(row, row.get("label") or row["method"])}

    def series(self, row: Mapping[str, Any], label: str) -> dict[str, Any]:
        """The base name, the label and the settings in full of the method that is called so in this row or pair."""
        key = (row.get("method", ""), label, row["normalised"])
        if key not in self._series:
            described = self.described(label, row["normalised"]) or {"name": row.get("method", label)}
            name = described["name"]
            known = {**USUAL.get(name, {}), **described}
            settings = acting({k: v for k, v in known.items() if k not in NO_SETTING})
            self._series[key] = {
                "method": name,
                "label": label,
                "settings": settings_words(name, settings),
                "options": canonical(settings),
                "series_id": canonical([name, label, settings]),
                "source": str(described.get("source", "")),
                "reference": str(described.get("reference", "full")),  # the models that it looks at, and how many
                "models": 1 if name in OWN_MODELS else int(described.get("models", 1)),
            }
        return self._series[key]

    def described(self, label: str, normalised: bool) -> Mapping[str, Any] | None:
        """By its label, and by the kind of its scores where that decides its settings; else as "label: part" of one."""
        kinds = ("both", "normalised" if normalised else "raw")
        fitting = [method for method in self.methods if method.get("rows", "both") in kinds]
        labels = {method.get("label") or method["name"]: method for method in fitting}
        wholes = [label, *sorted((known for known in labels if label.startswith(f"{known}: ")), key=len, reverse=True)]
        return next((labels[known] for known in wholes if known in labels), None)


def place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in AXES)


def canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]


def file_slug(text: str, most: int = 80) -> str:
    """Of any text, something that may stand in a file's name, whoever wrote it."""
    kept = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in text.lower())
    return "-".join(part for part in kept.split("-") if part)[:most].strip("-") or "unnamed"


def subsets_text(subsets: int, replicates: float, replicated: float) -> str:
    """100 subsets x 2; or 100 subsets, 25 of them x 2."""
    if pd.isna(replicates):
        return f"{subsets:,} subsets"
    some = "" if pd.isna(replicated) or replicated >= subsets or replicates < 2 else f", {replicated:.0f} of them"
    return f"{subsets:,} subsets{some} x {replicates:.0f}"


def give_names(frame: pd.DataFrame) -> None:
    """Adds the columns ground, ground_words, truth and series; equal names mean equal ids."""
    names = ground_names(sorted(frame["ground_id"].unique()))
    frame["ground"] = [names[text][0] for text in frame["ground_id"]]
    frame["ground_words"] = [names[text][1] for text in frame["ground_id"]]
    some = frame.get("num_subsets_replicated", pd.Series(math.nan, index=frame.index))
    columns = (frame["num_subsets"], frame["num_replicates"], some, frame["num_queries"])
    sizes = [f"{subsets_text(*subsets)}, {queries:,} queries" for *subsets, queries in zip(*columns)]
    frame["truth"] = _unique(frame["ground"], sizes, frame["truth_id"])
    series = {}
    for ground, group in frame.groupby("ground"):
        for identity, name in series_names(group).items():
            series[ground, identity] = name
    frame["series"] = [series[key] for key in zip(frame["ground"], frame["series_id"])]


def ground_names(grounds: Sequence[str]) -> dict[str, tuple[str, str]]:
    """(name for a file, words for a caption) of each; grounds of one task and protocol say what sets them apart."""
    bases = {text: _ground_base(json.loads(text)) for text in grounds}
    found = {}
    for text, (name, words) in bases.items():
        alike = [other for other in grounds if bases[other][0] == name]
        if len(alike) > 1:
            apart = differences([_flat(json.loads(other)) for other in alike])[alike.index(text)]
            if apart:
                name += f"-{file_slug(apart)}" if len(apart) <= LONG else f"-{short_digest(text)}"
                words += f", {apart[:200]}"
        found[text] = (name, words)
    files = _unique(["" for _ in found], [file_slug(name) for name, _ in found.values()], list(found))
    return {text: (file_slug(file, 100), words) for file, (text, (_, words)) in zip(files, found.items(), strict=True)}


def _ground_base(ground: Mapping[str, Any]) -> tuple[str, str]:
    parts = [ground["of"], ground["protocol"]]
    words = [f"task {ground['of']}", f"protocol {ground['protocol']}", f"{ground['query_split']} queries"]
    if ground["query_split"] != "report":
        parts.append(f"{ground['query_split']}-queries")
    if ground["queries"] is not None:
        parts.append(f"first-{ground['queries']}")
        words.append(f"the first {ground['queries']}")
    for name, noun in (("scheme", "subsets"), ("initialisation", "initialisation")):
        if ground[name] != USUAL_GROUND[name]:
            parts.append(f"{ground[name]}-{noun}")
            words.append(f"{ground[name]} {noun}")
    if "output" in ground:
        parts.append(ground["output"])
        words.append(f"measured by {ground['output']}")
    for name in UNUSUAL_READINGS:
        if name in ground["task"]:
            parts.append(f"{name}-{ground['task'][name]}")
            words.append(f"{name}={ground['task'][name]}")
    return "-".join(file_slug(part) for part in parts), ", ".join(words)


def series_names(group: pd.DataFrame) -> dict[str, str]:
    """EK-FAC; EK-FAC, damping=1e-4 where the label says so, or where one label has several settings."""
    names: dict[str, str] = {}
    for (method, label), alike in group.groupby(["method", "label"]):
        own = sorted(alike["series_id"].unique())
        apart = differences([json.loads(text)[2] for text in own])
        for text, words in zip(own, apart, strict=True):
            words = words if len(words) <= LONG else f"settings {short_digest(text)}"
            names[text] = ", ".join(filter(None, [series_label(str(method), str(label)), words]))
    return dict(zip(names, _unique(["" for _ in names], list(names.values()), list(names)), strict=True))


def series_label(method: str, label: str) -> str:
    name = str(look(method)["label"])
    if label == method:
        return name
    for sign, between in (("@", ", "), (": ", ": ")):
        if label.startswith(method + sign):
            return name + between + label.removeprefix(method + sign)
    return label


def model_words(label: str, reference: str, models: int) -> str:
    """The label; of a method that looks at other models than the full one, with those: kfac, subset x 8."""
    if reference == "full":
        return label
    return f"{without_models(label)}, {reference}" + (f" x {models}" if models > 1 else "")


def without_models(label: str) -> str:
    """kfac@damping=1,reference=subset,models=8 as kfac@damping=1."""
    name, *options = label.replace("@", ",").split(",")
    told = ("reference=",) if name in OWN_MODELS else ("models=", "reference=")
    kept = ",".join(option for option in options if not option.startswith(told))
    return f"{name}@{kept}" if kept else name


def differences(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """For each of them, what it has otherwise than the others: "draws=100, gamma=1000".

    An option that one of them does not name is as usual there, and nothing is said of it.
    """
    names = sorted({name for one in settings for name in one})
    apart = [name for name in names if len({canonical(one.get(name, "-")) for one in settings}) > 1]
    return [", ".join(f"{name}={setting_text(one[name])}" for name in apart if name in one) for one in settings]


def settings_words(method: str, options: Mapping[str, Any]) -> str:
    """A method's settings without what nearly always is as it is: "draws=250, gamma=100000, n_beta=2000"."""
    usual = USUAL.get(method, {})
    known = sorted(acting(options).items())
    untold = UNTOLD - {"models"} if method in OWN_MODELS else UNTOLD
    told = {name: value for name, value in known if value is not None and name not in untold}
    shown = [(name, value) for name, value in told.items() if name not in usual or usual[name] != value]
    return ", ".join(
        f"{name} by the pilot"
        if method in PILOTED and name in LEFT_TO_PILOT and value == 0
        else f"{name}={setting_text(value)}"
        for name, value in shown
    )


def _flat(value: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings side by side; long digests of data cut."""
    found: dict[str, Any] = {}
    for name, item in value.items():
        inner = _flat(item) if isinstance(item, Mapping) else {name: item}
        found |= {k: v[:8] if isinstance(v, str) and len(v) > 20 else v for k, v in inner.items()}
    return found


def _unique(groups: Iterable[str], names: Sequence[str], ids: Iterable[str]) -> list[str]:
    """`names`, with a digest of the id wherever one name of a group stands for several ids."""
    triples = list(zip(groups, names, ids, strict=True))
    owners: dict[tuple[str, str], set[str]] = {}
    for group, name, identity in triples:
        owners.setdefault((group, name), set()).add(identity)
    return [f"{name} ({short_digest(i)})" if len(owners[group, name]) > 1 else name for group, name, i in triples]

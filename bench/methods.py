"""Methods as they are asked for: METHOD@OPTION=VALUE, tuned settings, and ensembles of base models.

One method with its settings is one row of a table, and the same method with other settings is another:

    ekfac                              the method with the settings that --settings picks
    ekfac@damping=1e-4                 with these options on top
    stiff=ekfac@damping=1e-4           under a label of one's own
    mine.py:Residuals@temperature=2    anybody's
    kfac@reference=subset,models=8     the mean of its scores at eight models trained on subsets like those asked about

Where an option is set more than once, the last of these counts: the method's own default, the task's recommendation,
the chosen settings (tuned, library or paper), --set, and what stands behind the @.

Tuned settings lie in `bench/tuned_settings/`, a file a task and protocol with the record of the choice in it;
`$TDA_BENCH_TUNED` names a folder of one's own that is looked into first. Methods that were tuned later have a file of
their own, named as the first and something more (`digits-scratch-rivals.json`); the first that names a method counts.
"""

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from baselines.method import Method, available_methods, load_method
from baselines.support.nested import NONE, nested_text, parts_of
from bench.schema import TunedFile
from bench.tables import RELATIVE, in_place_of, relative_of, setting_text
from retrain.errors import UsageError
from retrain.plugins import option_value
from retrain.reference import FULL, REFERENCES
from retrain.safe_files import SafeFileError, read_checked
from retrain.task import Task

SETTINGS = ("auto", "tuned", "library", "paper", "default")
Kinds = Literal["both", "raw", "normalised"]
TUNED_WITH_US = Path(__file__).parent / "tuned_settings"
OWN_FOLDER = "TDA_BENCH_TUNED"
TUNED_FORMAT = "tda-bench tuned settings 1"
LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _.+:@/-]{0,59}")


@dataclass(frozen=True)
class MethodSpec:
    """A variant as it was asked for: `label=name@option=value,...`"""

    name: str
    options: Mapping[str, str] = field(default_factory=dict)
    label: str = ""


def parse_method_spec(text: str) -> MethodSpec:
    before, at, behind = text.partition("@")
    label, equals, name = before.rpartition("=")
    if equals and not label:
        raise UsageError(f'"{text}" has an empty label; expected LABEL={name} or {name}')
    if equals and not LABEL.fullmatch(label):
        raise UsageError(f'"{text}": the label "{label}" has characters that tables and file names cannot take')
    options: dict[str, str] = {}
    for one in behind.split(",") if at else []:
        option, is_set, value = one.partition("=")
        if not is_set or not option:
            expected = "METHOD@OPTION=VALUE,OPTION=VALUE such as ekfac@damping=1e-4"
            raise UsageError(f'"{text}" is no variant; expected {expected}')
        if options.setdefault(option, value) != value:
            raise UsageError(f'"{text}" has {option} twice, with {options[option]} and {value}')
    if not name:
        raise UsageError(f'"{text}" names no method; expected METHOD or METHOD@OPTION=VALUE')
    return MethodSpec(name, options, label)


@dataclass(frozen=True)
class Variant:
    """A method with its settings, and the rows it stands for."""

    method: Method
    label: str
    rows: Kinds = "both"  # settings chosen by raw LDS and by normalised LDS may differ
    origin: str = "default"  # where its settings come from: tuned, library, paper, default, as asked
    asked: str = ""  # how the method was named
    models: int = 1  # models whose scores are averaged
    reference: str = ""  # which models are looked at (retrain/reference.py); empty: what the experiment says

    @property
    def settings(self) -> str:
        """The options that are not the method's own defaults, as people write them."""
        own = {
            f.name: getattr(self.method, f.name)
            for f in fields(self.method)
            if f.metadata.get("key", True) and getattr(self.method, f.name) != f.default
        }
        options = own | self._models()
        return ",".join(f"{name}={setting_text(value)}" for name, value in options.items())

    def describe(self) -> dict[str, Any]:
        """For records: who it is, which options it had, and which code it was."""
        return {
            "asked": self.asked,
            "label": self.label,
            "rows": self.rows,
            "origin": self.origin,
            "settings": self.settings,
            "source": self.method.source,
            **self.method.config,
            **self._models(),
        }

    def _models(self) -> dict[str, Any]:
        models = {"models": self.models} if self.models > 1 else {}
        return models | ({"reference": self.reference} if self.reference not in ("", FULL) else {})


def changed_origin(origin: str) -> str:
    """Of settings some of which are spelled out: those of nobody else are as asked, and no defaults."""
    if origin in ("default", "as asked"):
        return "as asked"
    return origin if origin.endswith(", changed") else f"{origin}, changed"


def build_variants(
    wanted: Sequence[str | Mapping[str, Any]],
    task: Task,
    options: Mapping[str, Mapping[str, Any]],
    settings: str = "auto",
    tuned_at: tuple[str, Sequence[float]] = (FULL, ()),
) -> list[Variant]:
    """The variants that these words, or descriptions of a record, ask for; `options` are method -> option -> value.

    tuned_at: the reference and the alphas whose tuned settings are wanted.
    """
    made: list[Variant] = []
    for one in wanted:
        if isinstance(one, str):
            made += variants_of(parse_method_spec(one), task, options, settings, tuned_at)
        else:
            made.append(_described(one, task))
    check_named({name for variant in made for name in (variant.asked, variant.method.name)}, task.name, options)
    by_row: dict[tuple[str, str], Variant] = {}
    for variant in made:
        for kind in ("raw", "normalised") if variant.rows == "both" else (variant.rows,):
            other = by_row.setdefault((variant.label, kind), variant)
            same = [(one.method, one.method.source, one.reference, one.models) for one in (other, variant)]
            if same[0] != same[1]:
                raise UsageError(
                    f'two variants are called "{variant.label}" ({other.settings or "defaults"}; '
                    f"{variant.settings or 'defaults'}): give one a label of its own, LABEL={variant.method.name}@..."
                )
    return list(dict.fromkeys(by_row.values()))


def check_named(known: Collection[str], task: str, options: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuses options of a method that does not run: they would be ignored."""
    if unknown := sorted(set(options) - set(known)):
        raise UsageError(
            f'--set names "{unknown[0]}", which is neither the task ({task}) nor a method of this run '
            f"({', '.join(sorted(known))})"
        )


def variants_of(
    spelling: MethodSpec,
    task: Task,
    options: Mapping[str, Mapping[str, Any]],
    settings: str,
    tuned_at: tuple[str, Sequence[float]] = (FULL, ()),
) -> list[Variant]:
    name = spelling.name
    plain = load_method(name)
    set_before = {**options.get(name, {}), **options.get(plain.name, {})}
    for given in (set_before, spelling.options):
        acts = (option for option, value in given.items() if value is not None)
        if twice := sorted(relative_of(acts) & set(given)):
            beside = twice[0].removeprefix(RELATIVE)
            raise UsageError(f"{plain.name}: {twice[0]} does nothing beside {beside}; give one")
    looks_at, spelled = models_of(spelling, plain)
    own = {**without(in_place_of(spelled), set_before), **spelled}
    if "name" in own:  # which `load_method` takes for the method's
        raise UsageError(f'{plain.name} has no option "name"; available: {", ".join(f.name for f in fields(plain))}')
    tuned_at = (looks_at.get("reference", tuned_at[0]), tuned_at[1])
    origin, chosen = settings_of(plain, task, settings, tuned_at)
    label = spelling.label or plain.name
    if label != plain.name and label != name and label in available_methods():
        raise UsageError(f'"{label}={name}": {label} is another method; give {name} a label of its own')
    if spelling.options and not spelling.label:
        defaults = {f.name: f.default for f in fields(plain)}
        values = {name: option_value(text, defaults.get(name), name) for name, text in spelling.options.items()}
        label += "@" + ",".join(f"{name}={setting_text(value)}" for name, value in values.items())
    recommended = task.method_settings.get(plain.name, {})
    nested, whose = nested_settings(plain, {**recommended, **own}, task, settings, tuned_at)
    own = {**own, **nested}
    made: dict[Kinds, Method] = {
        kind: load_method(name, **without(in_place_of(own), {**recommended, **extra}), **own)
        for kind, extra in chosen.items()
    }
    if own:
        origin = "; ".join([changed_origin(origin), *(f"{option} {of}" for option, of in whose.items())])
    if len(set(made.values())) == 1:
        made = {"both": made["raw"]}
    return [Variant(method, label, kind, origin, name, **looks_at) for kind, method in made.items()]


def models_of(spelling: MethodSpec, method: Method) -> tuple[dict[str, Any], dict[str, str]]:
    """Which models a variant looks at and how many, where it says so (`reference`, `models`); and its other options."""
    others, found = dict(spelling.options), dict[str, Any]()
    own = {f.name for f in fields(method)}
    if "reference" in others and "reference" not in own:
        found["reference"] = others.pop("reference")
        if found["reference"] not in REFERENCES:
            raise UsageError(f'reference is "{found["reference"]}"; available: {", ".join(REFERENCES)}')
    if "models" in others and "models" not in own:
        count = others.pop("models")
        if not count.isdigit() or int(count) < 1:
            raise UsageError(f'models is "{count}"; expected a whole number from 1 on')
        found["models"] = int(count)
    if found and not method.uses_model and not others.get("prior"):
        raise UsageError(f"{spelling.name} looks at no model; leave {', '.join(found)} out")
    return found, others


def without(gone: Collection[str], options: Mapping[str, Any]) -> dict[str, Any]:
    return {option: value for option, value in options.items() if option not in gone}


def nested_settings(
    method: Method, options: Mapping[str, Any], task: Task, settings: str, tuned_at: tuple[str, Sequence[float]]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Option -> text of every method that is this one's option, with the settings that a row of its own would have.

    Those for train-normalised scores, which is how it is used there; and option -> whose they are, if not its defaults.
    """
    found: dict[str, Any] = {}
    whose: dict[str, str] = {}
    for option in fields(method):
        text = options.get(option.name, option.default)
        if option.metadata.get("method") and text != NONE:
            name, given = parts_of(str(text))
            inner = load_method(name)
            origin, chosen = settings_of(inner, task, "auto" if settings == "tuned" else settings, tuned_at)
            if chosen["normalised"]:
                whose[option.name] = changed_origin(origin) if given else origin
            recommended = task.method_settings.get(inner.name, {})
            found[option.name] = nested_text(name, {**recommended, **chosen["normalised"], **given})
    return found, whose


def _described(content: Mapping[str, Any], task: Task) -> Variant:
    """The variant that a record describes (`DescribedMethod`), with the very settings it had there."""
    name = content["asked"]
    known = {f.name for f in fields(load_method(name))}
    own = {option: value for option, value in content.items() if option in known}
    method = load_method(name, **{**task.method_settings.get(content.get("name", ""), {}), **own})
    looks_at = {option: content[option] for option in ("models", "reference") if option in {*content} - known}
    return Variant(method, content["label"], content["rows"], content.get("origin", "default"), name, **looks_at)


def settings_of(
    method: Method, task: Task, settings: str, tuned_at: tuple[str, Sequence[float]] = (FULL, ())
) -> tuple[str, dict[Kinds, dict[str, Any]]]:
    """(where they come from, raw and normalised -> options)"""
    both: dict[str, Any] = {}
    if settings in ("auto", "tuned"):
        found, origin = tuned_settings(task, method.name, *tuned_at), "tuned"
        if found is None and tuned_at[0] != FULL:
            found, origin = tuned_settings(task, method.name), "tuned at the full model"
        if found is not None:
            return origin, {"raw": dict(found["raw"]), "normalised": dict(found["normalised"])}
        if settings == "tuned" and method.grid:
            raise UsageError(
                f"there are no tuned settings of {method.name} on task {task.name}, protocol {task.protocol}; make "
                f"them with `tda-bench tune --task {task.name} --methods {method.name}`, or take --settings default"
            )
        settings = "default"
    if settings == "library":
        both = dict(method.library_settings)
    elif settings == "paper":
        both = dict(method.settings_in_paper(task))
    return settings, {"raw": both, "normalised": both}


def with_models(variants: Sequence[Variant], numbers: Sequence[int], reference: str = FULL) -> list[Variant]:
    """Each variant for each number of models; one that a record describes with its number stays as it is."""
    found: dict[tuple[str, str], Variant] = {}
    for variant in variants:
        asked = numbers if variant.method.uses_model else (1,)
        for number in (variant.models,) if variant.models > 1 else asked:
            label, origin = variant.label, variant.origin
            if number > 1 and variant.models != number:
                label += f"{',' if '@' in label else '@'}models={number}"
                origin = changed_origin(origin)
            looks_at = (variant.reference or reference) if variant.method.uses_model else FULL
            made = replace(variant, models=number, label=label, origin=origin, reference=looks_at)
            found.setdefault((label, variant.rows), made)
    return list(found.values())


# ---- tuned settings ----


def tuned_file(task: Task, reference: str = "", alpha: float = 0.0) -> str:
    """With a reference: of what was chosen at these models and for this alpha by itself."""
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", f"{task.name}-{task.protocol}").strip("-")
    return f"{name}-{reference}-alpha-{alpha:g}.json" if reference else f"{name}.json"


def tuned_settings(
    task: Task, method: str, reference: str = FULL, alphas: Sequence[float] = ()
) -> dict[str, dict[str, Any]] | None:
    """{"raw": options, "normalised": options} of a method on a task, or None where nobody chose any.

    Those chosen at this reference and for these alphas come first; of the full model, then those of any alpha.
    """
    first, general, own = Path(tuned_file(task)), None, os.environ.get(OWN_FOLDER)
    if own and not Path(own).is_dir():
        raise UsageError(f"{OWN_FOLDER} is {own}, which is no folder; give the --out of a `tda-bench tune`")
    for folder in [*([Path(own)] if own else []), TUNED_WITH_US]:
        later = sorted(folder.glob(f"{first.stem}-*.json"))  # of this task, or of one with a longer name
        for path in [folder / first, *later]:
            if not path.is_file():
                continue
            content = _read(path, path.stat().st_mtime_ns)
            if path in later and (content.get("task"), content.get("protocol")) != (task.name, task.protocol):
                continue
            found = content["methods"].get(method)
            if found is None:
                continue
            options = {kind: found[kind]["options"] for kind in ("raw", "normalised")}
            if "reference" not in content:
                general = general or options
            elif content["reference"] == reference and set(content["alphas"]) == set(alphas):
                return options
    return general if reference == FULL else None


@lru_cache(maxsize=64)
def _read(path: Path, stamp: int) -> dict[str, Any]:
    content = read_checked(path, TunedFile)
    if content["format"] != TUNED_FORMAT:
        raise SafeFileError(path, f'is no file of tuned settings; expected "format": "{TUNED_FORMAT}"')
    return content

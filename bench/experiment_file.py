"""An Experiment from a file: TOML with its names, or a run.json, which is that run again."""

import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from bench.experiment import Experiment
from retrain.errors import UsageError, error_line
from retrain.safe_files import read_json, read_text


def read_experiment(path: str | Path) -> Experiment:
    """From a TOML file with Experiment's names, or from a run.json, whose settings are taken as they were."""
    path = Path(path)
    if path.suffix == ".json":
        record = read_json(path, follow_links=True)
        content = record.get("experiment") if isinstance(record, dict) else None
        if not isinstance(content, dict):
            raise UsageError(f"{path} holds no experiment; expected a run.json of this version, or a .toml file")
        described = record.get("config", {}).get("methods")
        content = {**content, "methods": described} if isinstance(described, list) else content
    else:
        content = _toml(path)
    known = {f.name for f in fields(Experiment)}
    if unknown := sorted(set(content) - known):
        raise UsageError(
            f'{path} says "{unknown[0]}", which no experiment has; its names are {", ".join(sorted(known))}'
        )
    try:
        return Experiment(**content)
    except (TypeError, AttributeError) as error:
        raise UsageError(f"{path}: {error_line(error)}") from None


def _toml(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(read_text(path, follow_links=True))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path} is no TOML: {error}") from None

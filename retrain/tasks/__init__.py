"""One file a task; the file's name is its name on the command line. `retrain/task.py` is the interface."""

from typing import Any

from retrain import plugins
from retrain.task import Task

# One file's classes, which differ in their defaults.
PRESETS = {
    "digits": "digits:Digits",
    "smooth_digits": "digits:SmoothDigits",
    "language": "language:Language",
    "pythia14m": "language:Pythia14M",
    "smollm2": "language:SmolLM2",
    "stories15m": "language:Stories15M",
}


def available_tasks() -> list[str]:
    return list(plugins.available("retrain.tasks", "task"))


def load_task(name: str, **options: Any) -> Task:
    """The task of that name, with these options; text values are parsed."""
    return plugins.build(plugins.find("retrain.tasks", "task", Task, name), options)  # type: ignore[type-abstract]

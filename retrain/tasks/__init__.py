"""One file a task; the file's name is its name on the command line. `retrain/task.py` is the interface."""

from typing import Any

from retrain import plugins
from retrain.task import Task


def available_tasks() -> list[str]:
    return list(plugins.available("retrain.tasks", "task"))


def load_task(name: str, **options: Any) -> Task:
    """The task of that name, with these options; text values are parsed."""
    return plugins.build(plugins.find("retrain.tasks", "task", Task, name), options)  # type: ignore[type-abstract]

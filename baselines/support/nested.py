"""A method as the option of another: `ekfac`, or with options of its own `ekfac+relative_damping:10+strategy:kfac`.

Commas and = are taken by the variant around it (`datamodel@prior=ekfac+damping:1e-4,retrains=1000`).
"""

import re
from collections.abc import Mapping
from dataclasses import field, fields
from typing import Any

from baselines.method import Method, load_method
from retrain.errors import UsageError

NONE = "none"
_NEXT = re.compile(r"\+(?=[A-Za-z_]\w*:)")  # 1e+4 is a number


def method_option() -> Any:
    """A field that names another method, or none."""
    return field(default=NONE, metadata={"method": True})


def parts_of(text: str) -> tuple[str, dict[str, str]]:
    """The method's name and its options, as they were written."""
    name, *options = _NEXT.split(text)
    pairs = [option.partition(":") for option in options]
    return name, {option: value for option, _, value in pairs}


def nested_method(text: str) -> Method | None:
    if text == NONE:
        return None
    name, options = parts_of(text)
    if not name or "=" in text:
        raise UsageError(f'"{text}" is no method; expected none, a name, or one with options: ekfac+damping:1e-4')
    return load_method(name, **options)


def nested_text(name: str, options: Mapping[str, Any]) -> str:
    """The text that gives this method with these options, without those that are its defaults."""
    method = load_method(name, **options)
    changed = {f.name: getattr(method, f.name) for f in fields(method) if getattr(method, f.name) != f.default}
    return "+".join([name, *(f"{option}:{value}" for option, value in changed.items())])

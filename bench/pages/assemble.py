"""Puts a page together from a template, styles, scripts and data, so that nothing of the data can run.

Data is JSON in an element of its own, without any "<"; scripts are named to the browser by their digests, and whatever
else claims to be one is refused; nothing is fetched from anywhere. A page's markup is filled in one pass, so that text
which looks like a place to fill is text.
"""

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from bench.records import without_nan

HERE = Path(__file__).parent
PLACE = re.compile(r"\{\{([A-Z_]+)\}\}")
ENDS_SCRIPT = re.compile(r"</script|<!--", re.IGNORECASE)


@lru_cache
def part(name: str) -> str:
    """A file beside this one."""
    return (HERE / name).read_text(encoding="utf-8")


def filled(template: str, values: Mapping[str, str]) -> str:
    """`{{NAME}}` replaced by its value, once: what a value holds is not looked at again."""
    return PLACE.sub(lambda match: values[match[1]], template)


def inert_json(data: Any) -> str:
    """JSON for a script element, of letters that no parser of markup takes for anything."""
    text = json.dumps(without_nan(data), separators=(",", ":"), sort_keys=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def script_elements(scripts: Sequence[str], waiting: Mapping[str, str] | None = None) -> tuple[str, str]:
    """(the elements, what a Content-Security-Policy says so that these and no others run).

    `waiting`: id -> script that is text until one of the others puts it into a script element, as it stands.
    """
    waiting = waiting or {}
    for script in (*scripts, *waiting.values()):
        if ENDS_SCRIPT.search(script):
            raise ValueError("a script holds what would end its element")
    elements = [f'<script type="text/plain" id="{name}">{script}</script>' for name, script in waiting.items()]
    elements += [f"<script>{script}</script>" for script in scripts]
    digests = [
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in (*waiting.values(), *scripts)
    ]
    return "\n".join(elements), " ".join(digests)


def policy(digests: str) -> str:
    return (
        f"default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def built_page(
    template: str,
    scripts: Sequence[str],
    values: Mapping[str, str],
    data: Any,
    waiting: Mapping[str, str] | None = None,
) -> str:
    """`values` are markup that the caller has escaped; `data` is whatever the scripts read from #data."""
    elements, digests = script_elements(scripts, waiting)
    own = {"POLICY": policy(digests), "DATA": inert_json(data), "SCRIPTS": elements}
    return filled(template, {**values, **own})

"""The page of `bench.tokens`: sequences as coloured tokens, in one file that needs nothing else.

Matrices travel as one byte a number: k in -127..127 stands for sign(k) (k / 127)^2 times the matrix's largest size, so
that small scores keep two digits beside large ones.
"""

import base64
import html
import json
from typing import Any

import numpy as np

from bench.pages.assemble import built_page, part

LEVELS = 127


def packed(matrix: np.ndarray) -> dict[str, Any]:
    """What the page's script unpacks."""
    largest = float(np.abs(matrix).max()) or 1.0
    levels = np.round(np.sign(matrix) * np.sqrt(np.abs(matrix) / largest) * LEVELS).astype(np.int8)
    return {"rows": matrix.shape[0], "largest": largest, "bytes": base64.b64encode(levels.tobytes()).decode()}


def unpacked(content: dict[str, Any]) -> np.ndarray:
    """What the page shows for `packed`; the script does the same."""
    levels = np.frombuffer(base64.b64decode(content["bytes"]), dtype=np.int8).astype(np.float64)
    values = np.sign(levels) * (levels / LEVELS) ** 2 * content["largest"]
    return values.reshape(content["rows"], -1)


def page(title: str, lead: str, record: dict[str, Any], pairs: list[dict[str, Any]]) -> str:
    """`pairs`: query, train, query_tokens, train_tokens, score, and measures {name: packed matrix}."""
    values = {
        "STYLE": part("tokens/page.css"),
        "TITLE": html.escape(title),
        "LEAD": html.escape(lead),
        "RECORD": html.escape(json.dumps(record, indent=1)),
    }
    return built_page(part("tokens/page.html"), [part("tokens/page.js")], values, pairs)

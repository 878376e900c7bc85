"""Pages that open from a file: templates, Markdown, and data that cannot become part of them.

Every value that a template gets is escaped. Data is JSON in an element of its own, without any "<". The script is named
to the browser by its digest, whatever else claims to be one is refused, and nothing is fetched from anywhere.
"""

import base64
import hashlib
import io
import json
import re
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from bench.records import without_nan
from retrain.safe_files import SafeFileError, open_plain

if TYPE_CHECKING:
    from PIL import Image

MAX_PICTURE_BYTES = 32 * 2**20
MAX_PIXELS = 64 * 2**20
TEMPLATES = Path(__file__).parent / "templates"
ENDS_SCRIPT = re.compile(r"</script|<!--", re.IGNORECASE)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)  # the marks of numbers in pages, too


def read_png(path: Path) -> "Image.Image":
    """A PNG that is one, and is not too large to unpack."""
    from PIL import Image

    with open_plain(path, MAX_PICTURE_BYTES) as (file, _):
        data = io.BytesIO(file.read())
    try:
        picture = Image.open(data, formats=("PNG",))
        small = picture.width * picture.height <= MAX_PIXELS
        if small:
            picture.load()
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise SafeFileError(path, f"is no picture that can be shown ({type(error).__name__})") from None
    if not small:
        size = f"{picture.width:,} x {picture.height:,} pixels"
        raise SafeFileError(path, f"is a picture of {size}; at most {MAX_PIXELS:,} are shown")
    return picture


@lru_cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip


def inert_json(data: Any) -> str:
    """JSON for a script element, of letters that no parser of markup takes for anything."""
    text = json.dumps(without_nan(data), separators=(",", ":"), sort_keys=True, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def built_page(name: str, data: Any = None, **values: Any) -> str:
    """templates/NAME.html with NAME.css and NAME.js; `data` is what the script reads from #data."""
    script = (TEMPLATES / f"{name}.js").read_text(encoding="utf-8")
    if ENDS_SCRIPT.search(script):
        raise ValueError("a script holds what would end its element")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )
    own = {
        "policy": Markup(policy), "style": Markup((TEMPLATES / f"{name}.css").read_text(encoding="utf-8")),
        "scripts": Markup(f"<script>{script}</script>"), "data": Markup(inert_json(data)),
    }  # fmt: skip
    return _environment().get_template(f"{name}.html").render(**own, **values)


def markdown(text: str, base: str = "") -> Markup:
    """A page as HTML: never its own markup, no pictures, links to the web or to files below `base` alone."""
    renderer = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = renderer.parse(COMMENT.sub("", text))
    for inline in (token for token in tokens if token.children):
        for token in inline.children or []:
            if token.type == "image":  # its words stay
                token.type, token.tag, token.children = "text", "", None
            if token.type == "link_open":
                target = str(token.attrs.get("href", ""))
                if re.match(r"https?://", target):
                    token.attrs["rel"] = "noreferrer noopener"
                elif target.startswith(("#", "/")) or ":" in target:
                    token.attrs["href"] = "#"
                else:
                    token.attrs["href"] = base + quote(target, safe="/#%")
    return Markup(renderer.renderer.render(tokens, renderer.options, {}))

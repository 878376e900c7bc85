"""A drawing as part of a page: read by a real parser, rebuilt from a short list of what is known.

An SVG may hold scripts, links, styles, animations and references to other files. None of them is on the list, and a
file with anything that is not is refused as a whole. What is left is written anew, in the page's own colours, its ids
made unique, its numbers cut to what a screen shows.
"""

import html
import re
from pathlib import Path
from xml.parsers import expat

from bench.publish.plots.style import FAINT, INK, QUIET
from retrain.safe_files import SafeFileError, quoted, read_text

MAX_DRAWING_BYTES = 4 * 2**20
SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
ELEMENTS = {
    "svg", "g", "defs", "clipPath", "path", "use", "rect", "line", "polyline", "polygon", "circle", "ellipse", "text",
    "tspan", "image",
}  # fmt: skip
DROPPED = {"metadata", "style", "title", "desc"}  # what matplotlib adds and a page has no use for
# Letters only as commands and names: no colon, no slash, no quote, nothing that could name another file.
GEOMETRY = re.compile(r"[A-Za-z0-9\s,.()+\-]*")
WORD = re.compile(r"[A-Za-z0-9_.\-]+")
LOCAL = re.compile(r"#([A-Za-z0-9_.\-]+)")
LOCAL_URL = re.compile(r"url\(#([A-Za-z0-9_.\-]+)\)")
PICTURE = re.compile(r"data:image/png;base64,[A-Za-z0-9+/=\s]+")
STYLE_VALUE = re.compile(r"[#A-Za-z0-9\s,.%()'\-]*")
ATTRIBUTES = {
    "d", "transform", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "rx", "ry", "points", "width", "height",
    "viewBox", "preserveAspectRatio", "version", "clipPathUnits",
}  # fmt: skip
PROPERTIES = {
    "fill", "fill-opacity", "fill-rule", "clip-rule", "stroke", "stroke-width", "stroke-linejoin", "stroke-linecap",
    "stroke-dasharray", "stroke-dashoffset", "stroke-opacity", "stroke-miterlimit", "opacity", "font", "font-size",
    "font-family", "font-style", "font-weight", "font-stretch", "text-anchor", "image-rendering", "mix-blend-mode",
}  # fmt: skip
UNSAID = {"font-family", "font", "stroke-linejoin", "stroke-linecap"}  # the page says these for every drawing
PAGE_COLOURS = {INK: "currentColor", FAINT: "var(--grid)", QUIET: "var(--quiet)", "#ffffff": "var(--surface)"}
LONG_NUMBER = re.compile(r"-?\d+\.\d{2,}")


class _Rebuilding:
    def __init__(self, path: Path, prefix: str):
        self.path, self.prefix = path, prefix
        self.parts: list[str] = []
        self.depth = 0  # inside something that is dropped
        self.size = (1.0, 1.0)

    def refuse(self, what: str) -> None:
        raise SafeFileError(self.path, f"holds {what}, which no drawing of tda-bench has; draw it again")

    def start(self, name: str, attributes: dict[str, str]) -> None:
        space, _, tag = name.rpartition(" ")
        if self.depth or (space == SVG and tag in DROPPED):
            self.depth += 1
            return
        if space != SVG or tag not in ELEMENTS:
            self.refuse(f"the element {quoted(tag, 40)}")
        if tag == "svg" and self.parts:
            self.refuse("a drawing in a drawing")
        written = [self.attribute(tag, name, value) for name, value in attributes.items()]
        if tag == "svg":
            # Text without a colour of its own is black by default, which a dark page swallows.
            written = [text for text in written if not text.startswith((" width", " height"))]
            written.append(f' xmlns="{SVG}" fill="currentColor" role="img"')
        self.parts.append(f"<{tag}{''.join(written)}>")

    def end(self, name: str) -> None:
        if self.depth:
            self.depth -= 1
        else:
            self.parts.append(f"</{name.rpartition(' ')[2]}>")

    def text(self, data: str) -> None:
        if not self.depth and (data.strip() or "\n" not in data):
            self.parts.append(html.escape(data))

    def attribute(self, tag: str, name: str, value: str) -> str:
        space, _, name = name.rpartition(" ")
        if name == "href" and space in ("", XLINK):
            if tag == "image" and PICTURE.fullmatch(value):
                return f' href="{"".join(value.split())}"'
            if local := LOCAL.fullmatch(value):
                return f' href="#{self.prefix}{local[1]}"'
        elif space == "" and name == "id" and WORD.fullmatch(value):
            return f' id="{self.prefix}{value}"'
        elif space == "" and name == "clip-path" and (local := LOCAL_URL.fullmatch(value)):
            return f' clip-path="url(#{self.prefix}{local[1]})"'
        elif space == "" and name == "style":
            return self.style(value)
        elif space == "" and name in ATTRIBUTES and GEOMETRY.fullmatch(value):
            if name == "viewBox":
                _, _, width, height = map(float, value.split())
                self.size = (width, height)
            return f' {name}="{with_short_numbers(value)}"'
        self.refuse(f"the attribute {quoted(name, 40)} of {tag} as {quoted(value, 40)}")
        return ""

    def style(self, text: str) -> str:
        kept = []
        for declaration in filter(None, (part.strip() for part in text.split(";"))):
            name, _, value = (part.strip() for part in declaration.partition(":"))
            if name not in PROPERTIES or not STYLE_VALUE.fullmatch(value) or "url" in value.lower():
                self.refuse(f"the style {quoted(declaration, 60)}")
            if name not in UNSAID:
                kept.append(f"{name}:{PAGE_COLOURS.get(value.lower(), with_short_numbers(value))}")
        return f' style="{html.escape(";".join(kept))}"' if kept else ""


def with_short_numbers(text: str) -> str:
    return LONG_NUMBER.sub(lambda match: f"{float(match[0]):.2f}".rstrip("0").rstrip("."), text)


def inline_drawing(path: Path, prefix: str) -> tuple[str, tuple[float, float]]:
    """(markup, width and height in points) of an SVG file; ids begin with `prefix`."""
    text = read_text(path, MAX_DRAWING_BYTES)
    rebuilding = _Rebuilding(path, prefix)
    parser = expat.ParserCreate(namespace_separator=" ")
    parser.buffer_text = True
    parser.StartElementHandler = rebuilding.start
    parser.EndElementHandler = rebuilding.end
    parser.CharacterDataHandler = rebuilding.text
    # Entities are how a small file becomes a large one, or another file a part of this one.
    parser.EntityDeclHandler = lambda *_: rebuilding.refuse("an entity")
    parser.ProcessingInstructionHandler = lambda *_: rebuilding.refuse("a processing instruction")
    parser.SetParamEntityParsing(expat.XML_PARAM_ENTITY_PARSING_NEVER)
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        raise SafeFileError(path, f"is no XML ({error})") from None
    except (ValueError, IndexError) as error:
        if isinstance(error, SafeFileError):
            raise
        raise SafeFileError(path, f"is no drawing of tda-bench ({error})") from None
    return "".join(rebuilding.parts), rebuilding.size

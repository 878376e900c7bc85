"""Markdown as a page shows it: headings, paragraphs, lists, tables, code, emphasis and links; never its own markup.

Every letter is escaped first; what is then added are a dozen elements, and links that lead to a web page, to a file
beside the document, or to a heading of its own. Long documents fold: a section from a given depth on opens on request.
"""

import html
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

LINK = re.compile(r"\[([^\]\n]{1,300})\]\(([^)\s]{1,500})\)")
PICTURE_LINK = re.compile(r"!\[([^\]\n]{0,300})\]\([^)\s]{1,500}\)")
CODE = re.compile(r"`([^`\n]{1,500})`")
STRONG = re.compile(r"\*\*([^*\n]{1,500})\*\*")
EMPHASIS = re.compile(r"(?<![\w*])\*([^*\s][^*\n]{0,500})\*(?![\w*])")


@dataclass(frozen=True)
class Links:
    """Where a document's links lead on the page that shows it."""

    base: str = ""  # the document's folder, as the page reaches it
    anchors: str = ""  # what the ids of its headings begin with; without it, links to headings are plain words
    here: Mapping[str, str] = field(default_factory=dict)  # file that a link names -> id of what the page shows of it


def rendered(text: str, links: Links | None = None, level: int = 3, fold: int = 7) -> str:
    """HTML; headings start at `level`, and sections whose heading is `fold` deep or deeper in the text are folded."""
    links = links or Links()
    blocks: list[str] = []
    folded = False
    lines = text.replace("\r\n", "\n").split("\n")
    k = 0
    while k < len(lines):
        line = lines[k]
        if not line.strip():
            k += 1
        elif line.startswith("```"):
            end = next((j for j in range(k + 1, len(lines)) if lines[j].startswith("```")), len(lines))
            blocks.append(f"<pre>{html.escape(chr(10).join(lines[k + 1 : end]))}</pre>")
            k = end + 1
        elif heading := re.match(r"(#{1,6})\s+(.*)", line):
            words, depth = inline(heading[2], links), min(6, level + len(heading[1]) - 1)
            anchor = f' id="{links.anchors}{heading_slug(heading[2])}"' if links.anchors else ""
            if folded and len(heading[1]) <= fold:
                blocks.append("</details>")
                folded = False
            if len(heading[1]) == fold:
                blocks.append(f'<details class="fold"{anchor}><summary>{words}</summary>')
                folded = True
            else:
                blocks.append(f"<h{depth}{anchor}>{words}</h{depth}>")
            k += 1
        elif line.lstrip().startswith("|"):
            end = _while(lines, k, lambda one: one.lstrip().startswith("|"))
            blocks.append(_table(lines[k:end], links))
            k = end
        elif re.match(r"\s*[-*]\s+", line):
            end = _while(lines, k, lambda one: bool(one.strip()))
            blocks.append(_list(lines[k:end], links))
            k = end
        else:
            end = _while(lines, k, lambda one: bool(one.strip()) and not re.match(r"#|```|\s*\||\s*[-*]\s", one))
            end = max(end, k + 1)
            blocks.append(f"<p>{inline(' '.join(lines[k:end]), links)}</p>")
            k = end
    return "\n".join([*blocks, "</details>"] if folded else blocks)


def heading_slug(text: str) -> str:
    """As GitHub names a heading: small letters, hyphens for spaces, nothing else but letters, digits and hyphens."""
    kept = "".join(one for one in text.lower() if one.isalnum() or one in " -_")
    return "".join(one if one.isascii() else "-" for one in kept.replace(" ", "-"))


def _while(lines: list[str], start: int, belongs) -> int:  # type: ignore[no-untyped-def]
    return next((j for j in range(start, len(lines)) if not belongs(lines[j])), len(lines))


def _table(lines: list[str], links: Links) -> str:
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))] for line in lines]
    rows = [row for row in rows if not all(re.fullmatch(r":?-{2,}:?", cell) for cell in row)]
    head, *body = [[inline(cell.replace("\\|", "|"), links) for cell in row] for row in rows] or [[]]
    top = "".join(f'<th class="text">{cell}</th>' for cell in head)
    below = "".join("<tr>" + "".join(f'<td class="text">{cell}</td>' for cell in row) + "</tr>" for row in body)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{below}</tbody></table></div>'


def _list(lines: list[str], links: Links) -> str:
    items: list[str] = []
    for line in lines:
        if match := re.match(r"\s*[-*]\s+(.*)", line):
            items.append(match[1])
        elif items:
            items[-1] += f" {line.strip()}"
    return "<ul>" + "".join(f"<li>{inline(item, links)}</li>" for item in items) + "</ul>"


def inline(text: str, links: Links) -> str:
    """Code is set aside first, so that nothing inside it is taken for a link or emphasis."""
    kept: list[str] = []

    def aside(markup: str) -> str:
        kept.append(markup)
        return f"\0{len(kept) - 1}\0"

    text = text.replace("\0", "")
    text = CODE.sub(lambda match: aside(f"<code>{html.escape(match[1])}</code>"), text)
    text = PICTURE_LINK.sub(lambda match: aside(f"<i>{html.escape(match[1])}</i>"), text)
    text = LINK.sub(lambda match: aside(link(match[1], match[2], links)), text)
    text = html.escape(text).replace("&lt;br&gt;", "<br>")
    text = STRONG.sub(r"<b>\1</b>", text)
    text = EMPHASIS.sub(r"<i>\1</i>", text)
    while "\0" in text:
        text = re.sub("\0(\\d+)\0", lambda match: kept[int(match[1])], text)
    return text


def link(name: str, target: str, links: Links) -> str:
    words = html.escape(name)
    if "\0" in target:  # of something that was set aside: no address
        return words
    if re.match(r"https?://", target):
        return f'<a href="{html.escape(target)}" rel="noreferrer noopener">{words}</a>'
    if target in links.here:
        return f'<a href="#{html.escape(links.here[target])}">{words}</a>'
    if links.anchors and re.fullmatch(r"#[\w-]+", target):
        return f'<a href="#{links.anchors}{heading_slug(target[1:])}">{words}</a>'
    if target.startswith(("#", "/")) or ":" in target:
        return words
    return f'<a href="{quote(links.base + target, safe="/#")}">{words}</a>'

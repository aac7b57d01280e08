"""Build the site of docs/site/zensical.toml: `python -m proof.pages.site`, which `make docs` calls.

Pages are copied to runs/site-pages, because what GitHub shows and what Python-Markdown wants differ. zensical
makes runs/site of them. The navigation is the map of docs/README.md, with the API. A warning, a dead link and
markup that was not understood make it fail.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from proof.pages import diagrams, llms, names
from proof.pages.blocks import ROOT, read

HERE: Final = ROOT / "docs" / "site"
SCRATCH: Final = ROOT / "runs" / "site-pages"
SITE: Final = ROOT / "runs" / "site"
#: Pages outside of docs/ that the site has, too.
OTHERS: Final = ("README.md", "CHANGELOG.md", "SECURITY.md")
#: What the navigation has before the pages of a heading of the map, and after them.
_BEFORE: Final = {"Start": (("fencelock", "index.md"),)}
_AFTER: Final = {
    "Start": (("All pages", "map.md"),),
    "Run it": (("Report a weakness", "SECURITY.md"),),
    "Look up": (("Changes", "CHANGELOG.md"),),
}
_API: Final = {
    "locks": "Locks",
    "models": "Models",
    "writing": "Writing",
    "objects": "What the functions return",
    "errors": "Errors",
    "observing": "Watching, metrics, history",
    "triggers": "Triggers",
    "travelling": "Tokens that travel",
    "stores": "Values and files",
    "testing": "For tests",
}
_RENAMED: Final = {"README.md": "index.md", "docs/README.md": "map.md"}
_BLOCK: Final = re.compile(r"(?ms)(^ *```.*?^ *```$)")
_LINK: Final = re.compile(r"`[^`\n]+`|\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<to>[^)\s]+)\)")
_ITEM: Final = re.compile(r" *(?:[-*]|\d+\.) ")


def place(page: str) -> str:
    """Return where the site has a file of the repository."""
    return _RENAMED.get(page) or page.removeprefix("docs/")


def pages() -> dict[str, str]:
    """Return the pages of the repository that the site has, and where it has them."""
    found = (*OTHERS, *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
    return {page: place(page) for page in found}


def api() -> dict[str, list[names.Group]]:
    """Return the pages of the API, and the groups of names on each."""
    found: dict[str, list[names.Group]] = {}
    for group in names.GROUPS:
        found.setdefault(f"api/{group.page}.md", []).append(group)
    return found


def navigation() -> dict[str, list[tuple[str, str]]]:
    """Return title and place of each page, by the headings of the map; the API comes last."""
    found = {
        heading: [
            *_BEFORE.get(heading, ()),
            *((title, page) for title, page, _ in below),
            *_AFTER.get(heading, ()),
        ]
        for heading, below in llms.sections().items()
    }
    of_api = [(title, f"api/{page}.md") for page, title in _API.items()]
    return found | {"API": [("API", "api/index.md"), *of_api]}


def differences() -> list[str]:
    """Return a sentence for each page that only the navigation has, or only the repository."""
    listed = [page for below in navigation().values() for _, page in below]
    there = {*pages().values(), *api(), "api/index.md"}
    return [
        *(f"The navigation does not name {page}." for page in sorted(there - {*listed})),
        *(f"The navigation names {page}, and no such page exists." for page in listed if page not in there),
        *(f"The navigation names {page} twice." for page in sorted({*listed}) if listed.count(page) > 1),
    ]


def settings() -> str:
    """Return the configuration, with the navigation and the paths of this machine."""
    lines = []
    for heading, below in navigation().items():
        entries = "".join(f'    {{ "{title}" = "{page}" }},\n' for title, page in below)
        lines.append(f'  {{ "{heading}" = [\n{entries}  ] }},\n')
    text = (HERE / "zensical.toml").read_text().replace("nav = []", f"nav = [\n{''.join(lines)}]")
    return text.replace('"ROOT', f'"{ROOT}')


def moved(page: str, link: str, linked: set[str]) -> str | None:
    """Return a link of a page as the site has it, and note the file it needs; None if the site lacks it."""
    name, mark, anchor = link.partition("#")
    if not name or re.match(r"[a-z]+:", link):
        return link
    target = ((ROOT / page).parent / name).resolve().relative_to(ROOT)
    if (ROOT / target).is_dir() or (target.suffix == ".md" and str(target) not in pages()):
        return None
    if target.suffix != ".md":
        linked.add(str(target))
    return os.path.relpath(place(str(target)), Path(place(page)).parent) + mark + anchor


def for_site(page: str, text: str, linked: set[str]) -> str:
    """Return the text of a page for Python-Markdown, and note the files it needs."""

    def link(found: re.Match[str]) -> str:
        if not found["to"]:
            return found[0]  # code
        to = moved(page, found["to"], linked)
        if to is not None:
            return f"[{found['text']}]({to})"
        there = os.path.normpath(Path(page).parent / found["to"].partition("#")[0])
        return found["text"] if there in found["text"] else f"{found['text']} (`{there}`)"

    parts = _BLOCK.split(text)  # every second one is a block
    for number, part in enumerate(parts):
        if number % 2:
            parts[number] = re.sub("(?m)^", " ", part) if part.startswith("   `") else part
            if (found := diagrams.SOURCE.match(part + "\n")) is not None:
                file = diagrams.file_of(found[1])
                linked.add(str(file.relative_to(ROOT)))
                to = os.path.relpath(place(str(file.relative_to(ROOT))), Path(place(page)).parent)
                title = re.findall(r"(?m)^#+ (.+)$", parts[number - 1])[-1:] or ["a schedule"]
                parts[number] = f'<div class="diagram" markdown>\n\n![Diagram: {title[0]}]({to})\n\n</div>'
        else:
            parts[number] = "\n".join(_spaced(_LINK.sub(link, part).split("\n")))
    return "".join(parts)


def _spaced(lines: list[str]) -> Iterator[str]:
    """Yield lines with an empty one before each list, and with four blanks before text inside an item."""
    before = ""
    for line in lines:
        is_item = _ITEM.match(line)
        in_list = _ITEM.match(before) or before.startswith("  ")
        if is_item and before.strip() and not in_list and not before.startswith(("#", "|", ">")):
            yield ""
        yield re.sub(r"^ {2,3}(?=\S)", "    ", line)
        before = line


def api_page(title: str, groups: list[names.Group]) -> str:
    """Return the page of some groups of names: mkdocstrings makes it of the docstrings."""
    lines = [f"# {title}"]
    for group in groups:
        if len(groups) > 1 and not group.title:
            lines += ["", f"## In `{group.module.__name__}`"]
        for path in group.paths():
            lines += ["", f"::: {path}"]
            if (members := names.MEMBERS.get(path.rpartition(".")[2])) is not None:
                shown = ", ".join(members)
                lines += ["    options:", f"      members: [{shown}]", "      inherited_members: true"]
    return "\n".join(lines) + "\n"


def prepare() -> None:
    """Write the pages, and the configuration, to the scratch folder."""
    shutil.rmtree(SCRATCH, ignore_errors=True)
    shutil.rmtree(SITE, ignore_errors=True)
    titles = {page: title for below in navigation().values() for title, page in below}
    linked: set[str] = set()
    made = {to: for_site(page, read(page), linked) for page, to in pages().items()}
    made["index.md"] = f"---\ntitle: Distributed locks for SQLAlchemy\n---\n\n{made['index.md']}"
    made |= {to: api_page(titles[to], groups) for to, groups in api().items()}
    shown = "\n".join(f"- [{titles[to]}]({Path(to).name})" for to in api())
    made["api/index.md"] = f"# API\n\nMade of the docstrings, as `help()` shows them.\n\n{shown}\n"
    for to, text in made.items():
        (SCRATCH / "docs" / to).parent.mkdir(parents=True, exist_ok=True)
        (SCRATCH / "docs" / to).write_text(text)
    for file in linked:
        (SCRATCH / "docs" / place(file)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, SCRATCH / "docs" / place(file))
    shutil.copy(HERE / "extra.css", SCRATCH / "docs")
    (SCRATCH / "docs" / "llms.txt").write_text(llms.render(of_site=True))
    (SCRATCH / "zensical.toml").write_text(settings())


class Made(HTMLParser):
    """A page of the site: its anchors, its links, and what looks like markup outside of code."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.left: list[str] = []
        self._code = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what it is, and where it leads."""
        self._code += tag in {"code", "script", "style", "pre"}
        for name, value in attrs:
            if name == "id" and value:
                self.ids.add(value)
            elif name in {"href", "src"} and value:
                self.links.append(unquote(value))

    def handle_endtag(self, tag: str) -> None:
        """Note the end of code."""
        self._code -= tag in {"code", "script", "style", "pre"}

    def handle_data(self, data: str) -> None:
        """Look for signs of Markdown."""
        if not self._code:
            self.left += re.findall(
                r".*(?:(?<!\w)\*\*|\]\(|```|^\|.*\||(?<=\n)(?:[-*]|\d+\.) \S).*", data, re.MULTILINE
            )


def faults() -> list[str]:
    """Return the faults in the pages that were made."""
    made = {path: Made(path.read_text()) for path in sorted(SITE.rglob("*.html")) if path.name != "404.html"}
    listed = re.findall(r"\]\(([^)]+)\)", (SITE / "llms.txt").read_text())
    found = [
        f"llms.txt has the link {page}, which leads nowhere"
        for page in listed
        if not (SITE / page / "index.html").exists()
    ]
    for path, page in made.items():
        shown = path.relative_to(SITE)
        found += [f"{shown} shows its markup: {text.strip()[:100]}" for text in page.left]
        for link in page.links:
            name, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link):
                continue
            target = (path.parent / name).resolve() if name else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (
                anchor and target in made and anchor not in made[target].ids | {"__skip"}
            ):
                found.append(f"{shown} has the link {link}, which leads nowhere")
    return found


def main() -> None:
    """Build, and say how it went."""
    began = time.monotonic()
    if found := differences():
        sys.exit("\n".join(found))
    prepare()
    ended = subprocess.run(
        [Path(sys.executable).with_name("zensical"), "build", "--strict", "--clean"],
        cwd=SCRATCH,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"},  # spelled.py is loaded by griffe
    )
    said = ended.stdout + ended.stderr
    if ended.returncode or re.search(r"(?im)\bwarning|\berror|^griffe: ", said):
        is_strict = "Aborted because --strict" in said  # then the traceback says nothing
        sys.exit(said.rpartition("Traceback")[0] if is_strict else said)
    (SCRATCH / "site").rename(SITE)
    if found := faults():
        sys.exit("\n".join(found))
    count = sum(1 for _ in SITE.rglob("*.html"))
    print(f"{SITE.relative_to(ROOT)}/index.html: {count} pages in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()

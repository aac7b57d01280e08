"""Build the site of docs/site/zensical.toml: `python -m tests.pages.site`, which `make docs` calls.

Pages are copied to runs/site-pages, because what GitHub shows and what Python-Markdown wants differ. zensical
makes runs/site of them. What it says, a page outside the navigation, a dead link and markup that was not
understood make it fail.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from tests.pages import names
from tests.pages.blocks import ROOT, read

HERE: Final = ROOT / "docs" / "site"
SCRATCH: Final = ROOT / "runs" / "site-pages"
SITE: Final = ROOT / "runs" / "site"
#: Pages outside of docs/ that the site has, too.
OTHERS: Final = (
    *("README.md", "CHANGELOG.md", "SECURITY.md", "proof/spec/README.md"),
    *(f"proof/mutation/{name}.md" for name in ("results", "after-the-cut", "second-portion")),
)
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


def navigation() -> list[tuple[str, str]]:
    """Return title and place of each page of the navigation."""

    def flat(entries: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
        for entry in entries:
            for title, inner in entry.items():
                yield from [(title, inner)] if isinstance(inner, str) else flat(inner)

    return list(flat(tomllib.loads((HERE / "zensical.toml").read_text())["project"]["nav"]))


def differences() -> list[str]:
    """Return a sentence for each page that only the navigation has, or only the repository."""
    listed = [page for _, page in navigation()]
    there = {*pages().values(), *api(), "api/index.md"}
    return [
        *(f"docs/site/zensical.toml does not name the page {page}." for page in sorted(there - {*listed})),
        *(
            f"docs/site/zensical.toml names {page}, and no such page exists."
            for page in listed
            if page not in there
        ),
        *(
            f"docs/site/zensical.toml names {page} twice."
            for page in sorted({*listed})
            if listed.count(page) > 1
        ),
    ]


def moved(page: str, link: str, linked: set[str]) -> str | None:
    """Return a link of a page as the site has it, and note the file it needs; None if that is a folder."""
    name, mark, anchor = link.partition("#")
    if not name or re.match(r"[a-z]+:", link):
        return link
    target = ((ROOT / page).parent / name).resolve().relative_to(ROOT)
    if (ROOT / target).is_dir():
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
        return found["text"] if to is None else f"[{found['text']}]({to})"

    parts = _BLOCK.split(text)  # every second one is a block
    for number, part in enumerate(parts):
        if number % 2:
            parts[number] = re.sub("(?m)^", " ", part) if part.startswith("   `") else part
            if part.startswith("```mermaid"):
                parts[number] = f'<div class="diagram" markdown>\n\n{part}\n\n</div>'
        else:
            parts[number] = "\n".join(_spaced(_LINK.sub(link, part).split("\n")))
    return "".join(parts)


def _spaced(lines: list[str]) -> Iterator[str]:
    """Yield lines with an empty one before each list, and with four blanks for what is inside of an item."""
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
    titles = {page: title for title, page in navigation()}
    linked: set[str] = set()
    made = {to: for_site(page, read(page), linked) for page, to in pages().items()}
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
    shutil.copy(ROOT / "docs" / "llms.txt", SCRATCH / "docs")
    settings = (HERE / "zensical.toml").read_text().replace('"ROOT', f'"{ROOT}')
    if script := os.environ.get("MERMAID"):  # a copy of mermaid.min.js, for readers without a network
        shutil.copy(script, SCRATCH / "docs" / "mermaid.min.js")
        settings = settings.replace("extra_css", 'extra_javascript = ["mermaid.min.js"]\nextra_css', 1)
    (SCRATCH / "zensical.toml").write_text(settings)


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
    """Return what is wrong in the pages that were made."""
    made = {path: Made(path.read_text()) for path in sorted(SITE.rglob("*.html")) if path.name != "404.html"}
    found = []
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
    print(f"{SITE.relative_to(ROOT)}/index.html: {count} pages in {time.monotonic() - began:.0f} s")  # noqa: T201


if __name__ == "__main__":
    main()

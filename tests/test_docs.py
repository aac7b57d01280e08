"""The documentation does what it says: its blocks run as printed, its links lead somewhere."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import typer
from sqlalchemy import make_url

import fencelock
from fencelock import Redlock
from fencelock.cli.app import app
from proof.pages import docstrings, examples, names
from proof.pages.blocks import BESIDE, PAGES, ROOT, RUN, SHOWN, Block, blocks, prose, read
from proof.servers import Nodes, Postgres
from tests.conftest import mariadb_database

#: Blocks that must not run, as (page, a line of the block): the reason.
NOT_RUN: Final[dict[tuple[str, str], str]] = {
    (
        "docs/recover.md",
        "fencelock init redis://r1:6379 --after-loss --database postgresql+psycopg://user@host/shop",
    ): "it is for nodes that lost their data, and asks: tests/test_cli.py runs it on such nodes",
}
#: Pages that are about a project that exists: their blocks run in a copy of it.
PROJECTS: Final = {"docs/migrating.md": "examples/existing_app"}
#: Pages that say how to install their needs, because readers may begin with them.
INSTALLING: Final = (
    "docs/celery.md",
    "docs/django.md",
    "docs/fastapi.md",
    "docs/flask-sqlalchemy.md",
    "docs/sqlmodel.md",
)
#: Servers that a page names, and the fixture of a URL.
_CONSENSUS: Final = {
    "etcd://e1:2379,e2:2379,e3:2379": "etcd_url",
    "zookeeper://z1:2181,z2:2181,z3:2181": "zookeeper_url",
}
#: The page that prints the models of most pages, as shop.py.
SHOP: Final = "docs/writing.md"
#: Pages for readers that have configured nothing yet.
BEGINNING: Final = {"docs/first-hour.md"}
LONGEST_SENTENCE: Final = 25
SITE: Final = fencelock.errors.PAGES
LONGEST_README: Final = 500
MOST_PAGES: Final = 46
MOST_WORDS: Final = 42_800

_LINK: Final = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", re.MULTILINE)


@pytest.fixture
def mariadb_for_a_page(mariadb_url: str) -> Iterator[str]:
    """The URL of an empty database of MariaDB."""
    yield from mariadb_database(make_url(mariadb_url))


def urls_for(text: str, nodes: Nodes, request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """Yield what stands in a page for a server, and what the tests have in its place: here and only here."""
    postgres: Postgres = request.getfixturevalue("postgres")
    for printed, fixture in _CONSENSUS.items():
        if printed in text:
            yield printed, request.getfixturevalue(fixture)
    for number, node in enumerate(nodes, start=1):
        yield f"redis://r{number}:6379", node.url
    yield "redis://localhost:6379", nodes[0].url
    if "@host/shop" in text:
        url = postgres.create_database()
        yield "postgresql+psycopg://user@host/shop", url
        yield "postgresql+asyncpg://user@host/shop", url.replace("+psycopg", "+asyncpg")
        yield "postgresql://user@host/shop", url.replace("+psycopg", "")
    if "mysql+pymysql://user@host/shop" in text:
        yield "mysql+pymysql://user@host/shop", request.getfixturevalue("mariadb_for_a_page")
    if "@/shop?host=pg1" in text:
        hosts = "&".join(f"host=pg{number}:5432" for number in (1, 2, 3))
        attributes = "target_session_attrs=read-write"
        yield (
            f"postgresql+psycopg://user@/shop?{hosts}&{attributes}",
            f"{postgres.create_database()}&{attributes}",
        )
    for port in ("8000", "5000"):
        if f"--port {port}" in text or f"--bind localhost:{port}" in text:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                real = free.getsockname()[1]
            yield f"--port {port}", f"--port {real}"
            yield f"localhost:{port}", f"localhost:{real}"


def to_run(page: str) -> list[Block]:
    """Return the blocks of a page without those that must not run, behind the shop if they import it."""
    left_out = {line for of, line in NOT_RUN if of == page}
    found = [block for block in blocks(read(page)) if not left_out.intersection(block.text.splitlines())]
    has_shop = "shop.py" in {block.file for block in found}
    if not has_shop and any("from shop import" in block.text for block in found):
        found[:0] = [block for block in blocks(read(SHOP)) if block.file == "shop.py"]
    return found


#: Pages whose blocks start servers and programs again and again.
LONG = {"proof/torture/README.md", "proof/torture/long-run.md"} | {
    f"docs/{page}.md"
    for page in (
        "first-hour",
        "fastapi",
        "flask-sqlalchemy",
        "celery",
        "django",
        "recover",
        "migrating",
        "command-line",
        "testing",
        "langgraph",
        "schedulers",
        "services",
    )
}


def marks_of(page: str) -> tuple[pytest.MarkDecorator, ...]:
    """Return how the test of a page's blocks is marked."""
    return (pytest.mark.long,) if page in LONG else (pytest.mark.timed,) if page in BEGINNING else ()


@pytest.mark.parametrize("page", [pytest.param(page, marks=marks_of(page)) for page in (*PAGES, *BESIDE)])
def test_blocks_run_as_printed(page: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """In order, in one folder; on pages that do not initialise the nodes, they have been."""
    found = to_run(page)
    if not any(block.language in RUN for block in found):
        return
    text = "".join(block.text for block in found)
    folder = tmp_path / "folder"
    if page in PROJECTS:
        shutil.copytree(ROOT / PROJECTS[page], folder, ignore=shutil.ignore_patterns("__pycache__"))
    environment: dict[str, str] = {}
    with Nodes(max([1, *map(int, re.findall(r"redis://r(\d)", text))])) as nodes:
        if "fencelock init" not in text and "configure(" not in text and page not in BEGINNING:
            environment["FENCELOCK_URL"] = nodes[0].url
            with Redlock(nodes[0].url) as authority:
                authority.init()
        servers = tuple(urls_for(text, nodes, request))
        ended = play(page, found, tmp_path, environment, servers=servers)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("page", [*dict.fromkeys(group.page for group in names.GROUPS), "zookeeper"])
def test_examples_of_docstrings_run(page: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Those on a page of the API, in order, with what `proof/pages/shop.py` has."""
    found = [Block("python", 1, "from proof.pages.shop import *\n"), *docstrings.examples(page)]
    if page == "models":  # they define the tables of the shop themselves
        found.insert(1, Block("python", 1, "class Base(DeclarativeBase): ...\n"))
    text = "".join(block.text for block in found)
    with Nodes(max([1, *map(int, re.findall(r"redis://r(\d)", text))])) as nodes:
        with Redlock([node.url for node in nodes]) as authority:
            authority.init()
        ended = play(f"api/{page}", found, tmp_path, {}, servers=tuple(urls_for(text, nodes, request)))
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.timeout(600)
@pytest.mark.skipif(
    os.environ.get("FENCELOCK_TEST_INSTALLS") != "1",
    reason="FENCELOCK_TEST_INSTALLS=1 makes an environment for each of some pages, in two minutes",
)
@pytest.mark.parametrize("page", INSTALLING)
def test_page_needs_nothing_but_what_it_installs(
    page: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Its first block makes an empty environment into one in which the others run."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "empty"], check=True)
    found = to_run(page)
    text = "".join(block.text for block in found)
    with Nodes(1) as nodes:
        servers = tuple(urls_for(text, nodes, request))
        python = str(tmp_path / "empty" / "bin" / "python")
        ended = play(page, found, tmp_path, {"FENCELOCK_INSTALLS": "1"}, servers=servers, python=python)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def play(
    page: str,
    found: list[Block],
    folder: Path,
    variables: dict[str, str],
    *,
    servers: tuple[tuple[str, str], ...] = (),
    python: str = sys.executable,
) -> subprocess.CompletedProcess[str]:
    """Run blocks in `folder/folder`, warnings as errors, and return how it ended."""
    (folder / "folder").mkdir(exist_ok=True)
    job = {"page": page, "blocks": [[b.language, b.line, _on(servers, b.text)] for b in found]}
    (folder / "job").write_text(json.dumps(job))
    environment = {name: value for name, value in os.environ.items() if name != "FENCELOCK_URL"}
    environment |= {
        "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}.",
        "FENCELOCK_ROOT": str(ROOT),
        "FENCELOCK_EXPORTED": str(folder / "exported"),
        "COLUMNS": "160",
        "TERM": "dumb",
        "no_proxy": "localhost,127.0.0.1",  # a proxy of the shell's is for packages, and knows no server here
        "NO_PROXY": "localhost,127.0.0.1",
    }
    return subprocess.run(
        [python, "-W", "error", "-m", "proof.pages.play", str(folder / "job")],
        cwd=folder / "folder",
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=250 if python == sys.executable else 500,
        check=False,
    )


@pytest.mark.parametrize(
    ("language", "text", "said"),
    [
        ("python", "answer = 42\nanswer.missing\n", 'File "a page", line 8'),
        ("python", "import warnings\nwarnings.warn('old')\n", "UserWarning: old"),
        ("sh", "true\nfalse\ntrue\n", "a page:7 ended with 1"),
        ("sh", "pip install 'fencelock[nothing]'\n", "no extra nothing"),
        ("sh", "make nothing\n", "No rule to make target"),
        ("sh", "python -m proof.torture --nothing\n", "No such option"),
        ("sh", "uvicorn nothing:app\n", "did not start"),
        ("text", "another output\n", "shows another output"),
    ],
)
def test_block_that_does_not_do_as_it_says_is_noticed(
    tmp_path: Path, language: str, text: str, said: str
) -> None:
    """With its page and line."""
    ended = play("a page", [Block("sh", 3, "echo an output\n"), Block(language, 7, text)], tmp_path, {})
    assert ended.returncode == 1
    assert said in ended.stdout + ended.stderr


def _on(servers: tuple[tuple[str, str], ...], text: str) -> str:
    for printed, real in servers:
        text = text.replace(printed, real)
    return text


def test_blocks_name_their_language() -> None:
    """What no reader could run is tagged as what it is: text, sql, ini, yaml."""
    found = [(page, block) for page in (*PAGES, *BESIDE) for block in blocks(read(page))]
    assert [(page, block.line) for page, block in found if block.language not in RUN + SHOWN] == []


def test_what_does_not_run_is_there() -> None:
    """The list of what must not run names blocks that exist."""
    for page, line in NOT_RUN:
        assert any(line in block.text.splitlines() for block in blocks(read(page))), (page, line)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    found: list[str] = []
    seen: Counter[str] = Counter()
    for heading in re.findall(r"^#+ +(.+?) *$", prose(page.read_text()), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.append(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return set(found)


def broken_links(page: str) -> Iterator[str]:
    """Yield the links of a page that lead to no file of the repository, or to no heading in it."""
    text = re.sub(r"`[^`\n]*`", "", prose(read(page)))
    for first, second in _LINK.findall(text):
        link = first or second
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            yield link


def test_links_lead_somewhere() -> None:
    assert [(page, link) for page in (*PAGES, *BESIDE) for link in broken_links(page)] == []


def test_index_names_every_page() -> None:
    """Each page of docs/ is in its index, once."""
    linked = Counter(link.partition("#")[0] for link, _ in _LINK.findall(prose(read("docs/README.md"))))
    pages = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")} - {"README.md"}
    assert {page: linked[page] for page in pages if linked[page] != 1} == {}


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a page; a heading, an item of a list and a cell of a table end one, too."""
    for paragraph in re.split(r"\n\s*\n|\n(?=[#|>]|\s*[-*] |\s*\d+\. )", prose(text)):
        for cell in paragraph.split("|") if paragraph.lstrip().startswith("|") else [paragraph]:
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", cell)
            yield from re.split(r"(?<=[.!?])[*)”]*\s+", " ".join(plain.split()))


@pytest.mark.parametrize("page", ["README.md", "docs/first-hour.md", "docs/errors.md"])
def test_sentences_are_short(page: str) -> None:
    """The pages that users read first, or in a hurry, have no sentence of more than 25 words."""
    assert [line for line in sentences(read(page)) if len(line.split()) > LONGEST_SENTENCE] == []


def test_readme_is_short() -> None:
    """All of it, code included."""
    assert len(read("README.md").split()) <= LONGEST_README


def test_pages_are_few() -> None:
    """Those for users. The others lie beside what they describe."""
    pages = [page for page in PAGES if page.startswith("docs/")]
    assert len(pages) <= MOST_PAGES
    assert sum(len(read(page).split()) for page in pages) <= MOST_WORDS


def test_sentences_name_pages_that_the_site_has() -> None:
    """A user of the wheel has no docs/."""
    texts = [path.read_text() for path in sorted((ROOT / "fencelock").rglob("*.py"))]
    assert not [name for text in texts for name in re.findall(r"\bdocs/[\w-]+\.md", text)]
    named = {page for text in texts for page in re.findall(rf"(?:{SITE}|{{PAGES}})/([\w-]+)/", text)}
    assert len(named) > 5
    assert not {page for page in named if not (ROOT / "docs" / f"{page}.md").exists()}


def test_authority_has_one_name() -> None:
    """The glossary says that it grants the locks, and so does README, which comes first."""
    paraphrase = re.compile(r"\bgrant(?:s|ing)? (?:the |its |your )?(?:locks|leases)\b|\bwhat grants\b")
    saying = {page for page in (*PAGES, *BESIDE) if paraphrase.search(read(page))}
    assert saying == {"README.md", "docs/glossary.md"}


@pytest.mark.parametrize("page", examples.EXAMPLES)
def test_code_is_that_of_the_example(page: str) -> None:
    """`python -m proof.pages.examples` writes it again."""
    assert examples.render(page) == read(page)


def test_every_public_name_is_on_a_page_of_the_api() -> None:
    """Once."""
    grouped = (*names.LOCKS, *names.MODELS, *names.WRITING, *names.WATCHING, *names.OBJECTS, *names.errors())
    assert sorted(grouped) == sorted([*fencelock.__all__, "Etcd", "ZooKeeper"])


@pytest.mark.parametrize("function", [fencelock.fenced_lock, fencelock.fenced_transaction, Redlock.__init__])
def test_every_setting_is_on_the_page(function: Callable[..., object]) -> None:
    """With its default, as the signature has it."""
    page = read("docs/settings.md")
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            default = parameter.default
            shown = f'"{default}"' if isinstance(default, str) else f"{default}".removesuffix(".0")
            assert f"| `{name}` | `{shown}` |" in page, f"| `{name}` | `{shown}` |"


def test_every_variable_of_the_environment_is_on_the_page() -> None:
    """As the library asks for them."""
    sources = "".join(path.read_text() for path in (ROOT / "fencelock").rglob("*.py"))
    asked = set(re.findall(r'environ\.get\("(\w+)"', sources))
    assert asked == set(re.findall(r"^\| `(FENCELOCK_\w+)` ", read("docs/settings.md"), re.MULTILINE))


def test_every_option_of_the_command_line_is_on_the_page() -> None:
    """Under the heading of its command; `torture` has a page of its own."""
    sections = read("docs/command-line.md").split("\n## ")
    for name, command in commands(typer.main.get_command(app), "fencelock"):
        (section,) = (text for text in sections if text.startswith(f"`{name}`"))
        options = {option for parameter in command.params for option in parameter.opts if option[:2] == "--"}
        missing = {option for option in options if f"`{option}" not in section}
        assert name == "python -m proof.torture" or missing == set(), name


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the commands of the command line, by their full names."""
    for word, inner in getattr(command, "commands", {}).items():
        yield f"{name} {word}", inner
        yield from commands(inner, f"{name} {word}")

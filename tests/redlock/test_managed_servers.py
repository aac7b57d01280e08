"""The library works on servers without the commands that providers take away, as docs/redis.md says."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import pytest

from fencelock import Redlock
from fencelock.errors import LockLostError, NodesNotInitialisedError
from proof.pages.blocks import read
from proof.servers import Nodes
from tests.redlock.groups import ask
from tests.test_cli import fencelock

_ROW = re.compile(r"^\| \[([^\]]+)\]\([^)]+\) \| (`[A-Z` ]+) \| ([a-z]+)", re.MULTILINE)
#: By service: the commands that the page says to be taken away, and the first word of what it says of it.
SERVICES = {
    name: (words.replace("`", "").split(), verdict)
    for name, words, verdict in _ROW.findall(read("docs/redis.md"))
}
WORKS = [name for name, (_, verdict) in SERVICES.items() if verdict == "works"]
REFUSED = [name for name, (_, verdict) in SERVICES.items() if verdict == "refused"]


def without(words: list[str], **settings: str) -> dict[str, str]:
    return {"rename-command": "\nrename-command ".join(f'{word} ""' for word in words), **settings}


def test_page_has_services() -> None:
    assert {verdict for _, verdict in SERVICES.values()} == {"works", "refused"}
    assert all("CONFIG" in words for words, _ in SERVICES.values())


def use(url: str) -> None:
    assert fencelock("init", url).returncode == 0
    with Redlock(url) as authority:
        with authority.lock("order:1", ttl=2) as first, authority.lock("a", "b"):
            assert "order:1" in fencelock("inspect", "--url", url).stdout
        held = authority.lock("order:1", ttl=2)
        held.acquire()
        tokens: list[int] = []
        waiting = threading.Thread(target=lambda: tokens.append(token_of(authority)))
        waiting.start()
        waiting.join(0.2)
        held.extend(2)
        assert held.remint() > first
        held.release()
        waiting.join()
        assert tokens[0] > first
        held.acquire()
        assert fencelock("release", "order:1", "--url", url, "--force", "--reason", "test").returncode == 0
        assert not held.locked()
        with pytest.raises(LockLostError):
            held.release()
    for command in ("nodes", "leaks", "doctor"):
        url_option = "--current" if command == "nodes" else "--url"
        assert fencelock(command, url_option, url).returncode == 0, command


def token_of(authority: Redlock) -> int:
    with authority.lock("order:1", ttl=2, timeout=10) as token:
        return token


@pytest.mark.parametrize("service", WORKS)
def test_everything_works_without(service: str, make_nodes: Callable[..., Nodes]) -> None:
    words, _ = SERVICES[service]
    use(make_nodes(1, settings=without(words)).url)


def test_a_cluster_works_without(make_nodes: Callable[..., Nodes]) -> None:
    words = [word for words, verdict in SERVICES.values() if verdict == "works" for word in words]
    node = make_nodes(1, settings=without(sorted({*words} - {"CLUSTER"}), **{"cluster-enabled": "yes"}))[0]
    ask(node, "CLUSTER", "ADDSLOTSRANGE", 0, 16383)
    use(f"redis+cluster://{node.host}:{node.port}")


@pytest.mark.parametrize("service", REFUSED)
def test_init_refuses(service: str, make_nodes: Callable[..., Nodes]) -> None:
    """A server on which a restart could not be noticed: nothing is granted there."""
    words, _ = SERVICES[service]
    url = make_nodes(1, settings=without(words)).url
    ended = fencelock("init", url)
    assert (ended.returncode, "needs a usable answer" in ended.stderr) == (1, True)
    assert "the server lacks the command OBJECT" in ended.stderr
    with Redlock(url) as authority, pytest.raises(NodesNotInitialisedError):
        authority.lock("order:1").acquire()


@pytest.mark.parametrize(
    ("missing", "is_fit"),
    [
        ("OBJECT", False),
        ("TIME", False),
        ("CLIENT", True),
        ("SCRIPT", True),
        ("WAITAOF", True),
        ("SUBSCRIBE", True),
        ("PUBLISH", True),
        ("SCAN", True),
    ],
)
def test_what_is_needed(missing: str, make_nodes: Callable[..., Nodes], *, is_fit: bool) -> None:
    page = read("docs/redis.md")
    ((said, _),) = re.findall(rf"^\| [^|]*`{missing}`[^|]* \| (yes|no) \|(.*)", page, re.MULTILINE)
    assert (said == "yes") is is_fit
    url = make_nodes(1, settings=without([missing])).url
    ended = fencelock("init", url)
    assert (ended.returncode == 0) is is_fit
    if not is_fit:
        assert missing in ended.stderr  # the error names the command, and not only the unfit node
    else:
        with Redlock(url) as authority, authority.lock("order:1"):
            pass

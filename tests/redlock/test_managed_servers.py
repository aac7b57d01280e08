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
REFUSED = [name for name, (_, verdict) in SERVICES.items() if verdict == "refused"]


def without(words: list[str], **settings: str) -> dict[str, str]:
    return {"rename-command": "\nrename-command ".join(f'{word} ""' for word in words), **settings}


def test_page_has_services() -> None:
    assert {verdict for _, verdict in SERVICES.values()} == {"works", "refused"}
    assert all("CONFIG" in words for words, _ in SERVICES.values())


def use(url: str) -> None:
    assert fencelock("init", url).returncode == 0
    with Redlock(url) as authority:
        with authority.lock("order:1", ttl=20) as first, authority.lock("a", "b"):
            assert "order:1" in fencelock("inspect", "--url", url).stdout
        held = authority.lock("order:1", ttl=20)
        held.acquire()
        tokens: list[int] = []
        waiting = threading.Thread(target=lambda: tokens.append(token_of(authority)))
        waiting.start()
        waiting.join(0.2)
        held.extend(20)
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
    with authority.lock("order:1", ttl=20, timeout=60) as token:
        return token


def test_everything_works_without_all_that_services_take_away(make_nodes: Callable[..., Nodes]) -> None:
    """Nothing of fencelock needs these commands; in cluster mode it needs CLUSTER."""
    words = {word for words, verdict in SERVICES.values() if verdict == "works" for word in words}
    use(make_nodes(1, settings=without(sorted(words))).url)
    settings = without(sorted(words - {"CLUSTER"}), **{"cluster-enabled": "yes"})
    node = make_nodes(1, settings=settings)[0]
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


def said_of(missing: str) -> str:
    """Return whether the page says that fencelock works without a command."""
    ((said, _),) = re.findall(
        rf"^\| [^|]*`{missing}`[^|]* \| (yes|no) \|(.*)", read("docs/redis.md"), re.MULTILINE
    )
    return str(said)


@pytest.mark.parametrize("missing", ["OBJECT", "TIME"])
def test_what_is_needed_is_named(missing: str, make_nodes: Callable[..., Nodes]) -> None:
    """And not only the unfit node."""
    assert said_of(missing) == "no"
    ended = fencelock("init", make_nodes(1, settings=without([missing])).url)
    assert ended.returncode != 0
    assert missing in ended.stderr


def test_what_is_not_needed_may_be_missing(make_nodes: Callable[..., Nodes]) -> None:
    words = ["CLIENT", "SCRIPT", "WAITAOF", "SUBSCRIBE", "PUBLISH", "SCAN"]
    assert {said_of(word) for word in words} == {"yes"}
    url = make_nodes(1, settings=without(words)).url
    assert fencelock("init", url).returncode == 0
    with Redlock(url) as authority, authority.lock("order:1"):
        pass

"""What operators do with ZooKeeper: inspection, forced releases, and pruning; and how nodes are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote

from kazoo.exceptions import NoNodeError, NotEmptyError
from kazoo.security import make_digest_acl

from fencelock._generators import Steps
from fencelock.authority.hosts import Hosts
from fencelock.authority.line.entries import Head, Mark, quoted, tokens_of_age
from fencelock.authority.line.line import LineAuthority
from fencelock.authority.zookeeper import verbs
from fencelock.authority.zookeeper.session import Request
from fencelock.errors import AuthorityError


class Nodes(LineAuthority):
    """The nodes of lines, marks and the base."""

    _hosts: Hosts
    #: The node above all lines. Its data are the base, and it is made with the rights of the login; the root
    #: may have been made by others.
    _above: str

    def _line(self, resource: str) -> str:
        return f"{self._above}/{quoted(resource)}"

    def _checked(self, outcome: Any) -> Any:
        if isinstance(outcome, Exception):
            raise AuthorityError(f"{self._shown} refuses: {str(outcome) or type(outcome).__name__}")
        return outcome

    def _look_at_base(self) -> list[Request]:
        """Return the requests whose answers `_base_of` reads."""
        rights = [verbs.get_acls(self._above)] if self._hosts.user else []
        return [verbs.get(self._above), *rights]

    def _base_of(self, answers: Sequence[Any]) -> tuple[int, Any]:
        """Return the base and its `ZnodeStat`; AuthorityError if others than the login can write it."""
        (text, stat), *rights = answers
        for acls, _ in rights:
            own = make_digest_acl(self._hosts.user, self._hosts.password, all=True).id
            if others := verbs.others(acls, own):
                raise AuthorityError(
                    f"{self._shown} has a login, and {', '.join(others)} can write its node {self._above}: "
                    "give the rights to the login only (setAcl -R), or use another root"
                )
        return self._mark_of(text, self._above).token, stat

    def _mark_of(self, text: bytes, path: str) -> Mark:
        return self.read_mark(text, path) if text else Mark()

    def _heads(self, resources: tuple[str, ...]) -> Steps[list[Head]]:
        names = resources or (yield from self._names())
        lines = [*map(self._line, names)]
        found = yield from self.all_of([*map(verbs.children, lines), *map(verbs.get, lines)])
        heads = []
        for name, line, entries, its in zip(names, lines, found, found[len(lines) :], strict=False):
            if isinstance(entries, NoNodeError) or isinstance(its, NoNodeError):
                continue
            mark = self._mark_of(self._checked(its)[0], line)
            waiting = verbs.in_order(self._checked(entries))
            if mark.kept_for > 0:
                heads.append(Head(name, line, mark.nonce, mark.text, mark, len(waiting), mark.kept_for))
            elif waiting:
                path = f"{line}/{waiting[0]}"
                heads.append(Head(name, path, waiting[0][: verbs.NONCE_LENGTH], "", mark, len(waiting) - 1))
        texts = yield from self.all_of([verbs.get(head.key) for head in heads])
        return [
            head if head.text else head._replace(text=text[0].decode("utf-8", "replace"))
            for head, text in zip(heads, texts, strict=True)
            if head.text or not isinstance(text, NoNodeError)
        ]

    def _names(self) -> Steps[tuple[str, ...]]:
        (names,) = yield from self.all_of([verbs.children(self._above)])
        return () if isinstance(names, NoNodeError) else tuple(map(unquote, self._checked(names)))

    def _evict(self, head: Head) -> Steps[None]:
        if head.mark.kept_for > 0:
            freed = Mark(head.mark.token, head.nonce)
            (done,) = yield from self.all_of([verbs.set_data(head.key, str(freed).encode())])
        else:
            (done,) = yield from self.all_of([verbs.delete(head.key)])
        if not isinstance(done, NoNodeError):
            self._checked(done)

    def _raise_base(self, least: int) -> Steps[None]:
        while True:
            found = yield from self.all_of(self._look_at_base())
            if isinstance(found[0], NoNodeError):
                (made,) = yield from self.all_of([verbs.ensure_path(self._above)])
                self._checked(made)
                continue
            base, stat = self._base_of(list(map(self._checked, found)))
            if least <= base:
                return
            (done,) = yield from self.all_of([verbs.set_data(self._above, b"%020d" % least, stat.version)])
            if not isinstance(done, verbs.CHANGED):
                self._checked(done)

    def pruning(self, older_than: float) -> Steps[int]:
        (found,) = yield from self.all_of([verbs.get(self._above)])
        if isinstance(found, NoNodeError):
            return 0
        base = self._mark_of(self._checked(found)[0], self._above).token
        old = tokens_of_age(base, older_than)
        lines = [self._line(name) for name in (yield from self._names())]
        marks = yield from self.all_of(map(verbs.get, lines))
        text, above = found
        count, version = 0, above.version
        for line, its in zip(lines, marks, strict=True):
            if isinstance(its, NoNodeError):
                continue
            data, stat = self._checked(its)
            mark = self._mark_of(data, line)
            if mark.token in old and mark.kept_for <= 0:
                # Raise the version of the base, so that transactions with versions of the deleted line fail:
                # a line that is made again begins at version 0.
                raising = (verbs.SET, self._above, text, version)
                (done,) = yield from self.all_of(
                    [verbs.transaction((verbs.DELETE, line, stat.version), raising)]
                )
                if (refused := verbs.refusal(done)) is None:
                    count, version = count + 1, done[-1].version
                elif not isinstance(refused, (*verbs.CHANGED, NotEmptyError)):
                    self._checked(refused)
        return count

"""The class `Redlock`: its N nodes, their last known state, and its public methods."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from fencelock._backoff import chance
from fencelock._checks import check_seconds
from fencelock._generators import Call, Steps, run, run_async
from fencelock._owners import name_of_process
from fencelock._process import start_over_in_children
from fencelock.authority.base import Grant, Wish, before_closing, in_use
from fencelock.authority.generators import AsyncView, GeneratorAuthority
from fencelock.authority.redlock import admin
from fencelock.authority.redlock.admin import NodeStatus
from fencelock.authority.redlock.membership import initialise
from fencelock.authority.redlock.membership.members import Identity, MembershipView
from fencelock.authority.redlock.membership.recover import recover
from fencelock.authority.redlock.membership.reports import NodeGroup
from fencelock.authority.redlock.protocol import attempts, holding, inspecting
from fencelock.authority.redlock.protocol.acquire import Acquisition
from fencelock.authority.redlock.protocol.attempts import Attempt, Proof, names_of
from fencelock.authority.redlock.protocol.messages import INTRODUCE, Broadcast, Command
from fencelock.authority.redlock.protocol.queue import WaitQueue
from fencelock.authority.redlock.recovery import Recoverer
from fencelock.authority.redlock.transport.aio import LoopConnections
from fencelock.authority.redlock.transport.blocking import SharedConnections
from fencelock.authority.redlock.transport.connector import Node
from fencelock.authority.redlock.transport.endpoints import Source, sources_of
from fencelock.authority.redlock.wire.nodes import INTRODUCED_FOR
from fencelock.errors import FencelockError, NodesNotInitialisedError
from fencelock.holder import LockInfo
from fencelock.tokens import epoch_above, split

_T = TypeVar("_T")

DEFAULT_NAMESPACE = "fencelock"


class Redlock(GeneratorAuthority):
    """Grants leases on a quorum of independent Redis or Valkey nodes, and mints their fencing tokens.

    ```python
    authority = Redlock("redis://r1:6379,redis://r2:6379,redis://r3:6379")
    authority.init()                             # once in the life of the nodes
    with authority.lock("order:1") as token:
        authority.inspect("order:1")             # its token, its holder, the seconds left
    authority.force_release("order:1")           # None: it was free
    [node.state for node in authority.status()]
    authority.recover()                          # True: no node has to be admitted again
    authority.close()
    ```

    It connects at the first use. Threads may share it. A forked child opens its own connections.

    Args:
        nodes: the N nodes, each once: URLs (one string may hold several, with commas between) or clients of
            redis-py, whose TLS, ACL and socket settings are used. A node is a server, the primary of a
            service that Sentinel watches (`redis+sentinel://host:26379,host:26379/service`, or a client
            made by `master_for`), or a Redis Cluster (`redis+cluster://host:6379,host:6379`, or a
            `RedisCluster` client). One node is a quorum of one.
        namespace: prefix of every key on the nodes.
        node_timeout: seconds to wait for a silent node before deciding without it.
        connect_timeout: seconds that a node may take to accept a connection.
        outage_grace: seconds to go on trying when no majority answers, within the timeout of the
            acquisition.
        verify: "auto": every vote proves which process gave it if a connection cannot prove that (replicas,
            Sentinel, Redis Cluster). "vote": every vote does; use this behind a proxy.
        recover: admit nodes again that have restarted or lost their memory, in the background, once the
            longest lease has passed; False leaves this to other clients.

    Raises:
        ValueError: for a URL that cannot be understood, a node named twice, or settings out of range.
        TypeError: for a node that is neither a URL nor a client, and for seconds that are no number.
    """

    aio: AsyncRedlock
    _names: tuple[str, ...] = ()
    _namespace = DEFAULT_NAMESPACE

    def __init__(
        self,
        nodes: Source | Sequence[Source],
        *,
        namespace: str = DEFAULT_NAMESPACE,
        node_timeout: float = 1.0,
        connect_timeout: float = 2.0,
        outage_grace: float = 2.0,
        verify: str = "auto",
        recover: bool = True,
    ) -> None:
        sources = sources_of(nodes)
        if verify not in {"auto", "vote"}:
            raise ValueError(f"verify is 'auto' or 'vote', not {verify!r}")
        self._node_timeout = check_seconds("node_timeout", node_timeout)
        self._connect_timeout = check_seconds("connect_timeout", connect_timeout)
        self._outage_grace = check_seconds("outage_grace", outage_grace, zero=True)
        self._recover = recover
        self._namespace = _check_namespace(namespace)
        self._nodes = [Node(source, connect_timeout, verify_votes=verify == "vote") for source in sources]
        self._node_key = f"{{{self._namespace}}}"
        self._names = tuple(node.name for node in self._nodes)
        for name, count in Counter(self._names).items():
            if count > 1:
                raise ValueError(f"{name} is named {count} times: each node has one vote")
        self.aio = AsyncRedlock(self)  # the same authority for coroutines, with the operations that they need
        self.begin_in_child()
        start_over_in_children(self)
        in_use.add(self)

    def begin_in_child(self) -> None:
        self._client = os.urandom(attempts.CLIENT_DIGITS // 2).hex()
        itself = f"{self._node_key}:w:{self._client}", name_of_process(os.getpid())
        self._introduction = Command(INTRODUCE, "", (), (*itself, "PX", int(INTRODUCED_FOR * 1000)))
        self._view = MembershipView(self._names, self._node_key, self._node_timeout, self._init_command())
        self._current = self._view.current
        self._connections = self._connect()
        self._recoverer = self._new_recoverer()

    def __repr__(self) -> str:
        return f"<Redlock {', '.join(self._names)} namespace={self._namespace!r}>"

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes' addresses, without passwords."""
        return self._names

    def close(self) -> None:
        """Close the connections. Held leases end with their ttl; the next use connects again."""
        self._connections.close()
        recoverer, self._recoverer = self._recoverer, self._new_recoverer()
        recoverer.close()
        self.aio.close_everywhere()

    def connect_here(self, until: float) -> None:
        self._connections.connect_here(until)

    def settle(self) -> None:
        """Send the releases that are owed to the nodes, as after interrupted acquisitions."""
        read = Command("read", "", (self._node_key,), ("",))
        everyone, patience = range(len(self._nodes)), min(self._node_timeout, _FAREWELL)
        self._connections.settle(Broadcast(read, everyone, lambda new: len(new) == len(everyone), patience))

    def acquire_gen(
        self,
        resources: tuple[str, ...],
        *,
        ttl: float,
        timeout: float | None,
        fair: bool = False,
        go_on: Callable[[], None] = lambda: None,
        at_least: float = 0.0,
    ) -> Steps[Grant]:
        """See `Authority.acquire_gen`.

        Raises:
            LockTimeoutError: another holder kept a resource until the timeout, or votes stayed divided.
            QuorumError: too few nodes voted, or too slowly.
            NodesNotInitialisedError: too many nodes are blank.
            MembershipError: nodes and client disagree on the list of nodes, or two nodes are the same.
            CountersExhaustedError: too many nodes have no counters left in this epoch.
            ValueError: the ttl, or `at_least`, is longer than these nodes allow.
        """
        queue = yield Call(lambda: self._connections.queue, self.aio.queue)
        acquisition = Acquisition(resources, ttl, self._new_nonce, queue, fair=fair, at_least=at_least)
        initialised, since = False, time.time()
        while True:
            try:
                return (
                    yield from acquisition.acquire(
                        self._current,
                        began=time.monotonic(),
                        since=since,
                        timeout=timeout,
                        grace=self._outage_grace,
                        outage=max(self._connect_timeout, self._outage_grace),
                        jitter=chance,
                        go_on=go_on,
                    )
                )
            except NodesNotInitialisedError:
                if initialised or os.environ.get("FENCELOCK_AUTO_INIT") != "1":
                    raise
            initialised = True
            yield from self._initialising(None, None)

    def extend_gen(self, wishes: Sequence[Wish]) -> Steps[list[Grant | FencelockError]]:
        return holding.extend_many(self._current, wishes)

    def remint_gen(self, grant: Grant, ttl: float) -> Steps[Grant]:
        acquisition = Acquisition(grant.resources, ttl, self._new_nonce, instead_of=grant.proof)
        return holding.remint(self._current, acquisition, grant, jitter=chance)

    def release_gen(self, grant: Grant) -> Steps[bool | None]:
        return attempts.release(self._current, grant.proof)

    def keep_gen(self, grant: Grant, until: float) -> Steps[bool | None]:
        return holding.keep(self._current(), grant.proof, until - time.monotonic())

    def is_held_gen(self, resources: tuple[str, ...]) -> Steps[bool]:
        return inspecting.is_held(self._current, resources)

    def vouch_gen(self, grant: Grant) -> Steps[bool]:
        tokens = dict(zip(grant.resources, grant.tokens, strict=True))
        return inspecting.vouch(self._current, grant.proof.attempt.nonce, tokens)

    def inspect_gen(self, resources: tuple[str, ...]) -> Steps[list[LockInfo]]:
        return inspecting.look(self._current, resources)

    def force_gen(self, resource: str, token: int | None) -> Steps[LockInfo | None]:
        return inspecting.force(self._current, resource, token)

    def endless(self, pattern: str) -> dict[str, list[str]]:
        """Return, for each node that votes, its keys that have no expiry and match a pattern of Redis."""
        found = self.run(inspecting.look_for_endless(self._current, pattern))
        return {self._names[node]: keys for node, keys in found.items()}

    def dump(self, grant: Grant) -> dict[str, Any]:
        return {"namespace": self._namespace, "nonce": grant.proof.attempt.nonce}

    def load(self, resources: tuple[str, ...], tokens: tuple[int, ...], data: dict[str, Any]) -> Grant:
        if "namespace" in data and not attempts.NONCE.fullmatch(data["nonce"]):
            raise ValueError("its nonce has another form than those of Redlock")
        names, halves = tuple(sorted(resources)), dict(zip(resources, map(split, tokens), strict=True))
        attempt = Attempt(names, data["nonce"], 0.0, *names_of(self._node_key, names))
        counters = tuple(halves[name][1] for name in names)
        return Grant(resources, tokens, 0.0, Proof(attempt, halves[names[0]][0], counters))

    def run(self, steps: Steps[_T]) -> _T:
        return run(steps, self._connections.do)

    def init(
        self,
        *,
        base: int | None = None,
        max_ttl: float | None = None,
        above: int | None = None,
        allow_eviction: bool = False,
    ) -> bool:
        """Initialise N blank nodes, once in their life; all of them must answer.

        May be run by several clients at once, and again after an interruption.

        Args:
            base: where counters start; Unix milliseconds by default. 0 makes the first tokens 1, 2, 3.
            above: the highest fencing token that the storage has seen, if nodes have lost their grants: all
                new tokens are larger, because they are of a larger epoch. This is also so if another client
                has initialised the nodes before.
            max_ttl: the longest lease in seconds that these nodes grant. A node that lost its memory must
                stay out for this time. By default 60, or the value that the nodes have already.
            allow_eviction: also initialise nodes that drop keys when their memory is full. They may drop a
                held lock, and with `allkeys-` policies the record of all tokens.

        Returns:
            True, or False if these nodes had been initialised already.

        Raises:
            QuorumError: a node gave no usable answer, another client is at work, or too few vote for `above`.
            AuthorityError: a blank node drops keys when its memory is full.
            MembershipError: a node is in another list, has forgotten, has another max_ttl, or has two names.
            ValueError: for a base, ttl or token out of range.
        """
        epoch = 0 if above is None else epoch_above(above)
        return self._run_apart(self._initialising(base, max_ttl, epoch, allow_eviction=allow_eviction))

    def remains(self) -> dict[str, tuple[str, ...]]:
        """Return the nodes that remember a list which has lost its majority, with its addresses."""
        return self._run_apart(initialise.remains(self._group()))

    def clear(self) -> int:
        """Delete the memory, locks, queues and client names of the namespace on the nodes, and no other keys.

        Use it for a list that has lost its majority, before `init(above=…)`. Stop all clients before. It
        returns how many keys were deleted.
        """
        return self._run_apart(initialise.clear(self._group()))

    def status(self) -> tuple[NodeStatus, ...]:
        """Return the status of every node, in the order of `nodes`.

        It takes at least `node_timeout` if a node cannot be reached.
        """
        return self._run_apart(admin.status(self._group(), self._view))

    def compare_lists(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the addresses of members that are not in `nodes`, and of these nodes that are no members."""
        return self._run_apart(admin.compare_lists(self._group()))

    def recover(self) -> bool:
        """Admit nodes again that restarted or forgot, after a wait for the longest lease to pass.

        Clients do this in the background. Call it if no client of the nodes runs for that time.

        Returns:
            True when nothing is left to do; False if something is, as `status` tells.

        Raises:
            MembershipError: this version cannot read the nodes' list of nodes.
        """
        return self._run_apart(recover(self._group()))

    def _initialising(
        self, base: int | None, max_ttl: float | None, epoch: int = 0, *, allow_eviction: bool = False
    ) -> Steps[bool]:
        return admin.initialise(
            admin.group_of(self._names, self._node_key, self._connect_timeout),
            self._view,
            # Counters start at the time, so that they are above the old ones even after a loss. This is no
            # guarantee: it needs an old epoch of 0, sane clocks, less than 1,000 leases a second per stripe.
            base=time.time_ns() // 1_000_000 if base is None else base,
            max_ttl=max_ttl,
            epoch=epoch,
            allow_eviction=allow_eviction,
        )

    def _run_apart(self, generator: Steps[_T]) -> _T:
        """Run an operator's request on separate connections, because WAITAOF may block them for 2 seconds."""
        connections = self._connect()
        try:
            return run(generator, connections.do)
        finally:
            connections.close()

    def _connect(self) -> SharedConnections:
        return SharedConnections(self._nodes, self._node_key, **self._wiring())

    def connect_in(self, loop: asyncio.AbstractEventLoop) -> LoopConnections:
        return LoopConnections(loop, self._nodes, self._node_key, **self._wiring())

    def _new_nonce(self) -> str:
        # Random for each attempt, because a copy of this process must not make the same nonce.
        return f"{self._client}{int(time.time() * 1000):0{attempts.TIME_DIGITS}x}{os.urandom(8).hex()}"

    def _wiring(self) -> dict[str, Any]:
        return {
            "introduction": self._introduction,
            "on_identity": self._on_identity_of,
            "on_trouble": self._on_trouble,
            "connect_timeout": self._connect_timeout,
            "patience": self._node_timeout,
        }

    def _on_trouble(self) -> None:
        if self._recover:
            self._recoverer.on_trouble()

    def _new_recoverer(self) -> Recoverer:
        return Recoverer(self._connect, lambda: recover(self._group()))

    def _group(self) -> NodeGroup:
        return admin.group_of(self._names, self._node_key, self._node_timeout)

    def _on_identity_of(self, node: int, identity: Identity) -> None:
        if self._view.on_identity(node, identity) and identity.eviction and identity.membership is not None:
            admin.warn_of_eviction(self._names[node], identity.eviction)

    def _init_command(self) -> str:
        """Return the command to type, with placeholders for passwords."""
        namespace = "" if self._namespace == DEFAULT_NAMESPACE else f" --namespace {self._namespace}"
        return f"fencelock init{namespace} {' '.join(node.url_to_type for node in self._nodes)}"


class AsyncRedlock(AsyncView):
    """A `Redlock` for asyncio code, found as `Redlock.aio`.

    All tasks of a loop share one connection to each node, which is closed some time after the end of the
    loop. A cancelled acquisition leaves no lock behind. A cancelled release is sent all the same.
    """

    _authority: Redlock

    def __init__(self, authority: Redlock) -> None:
        super().__init__(authority)
        self.begin_in_child()
        start_over_in_children(self)

    def begin_in_child(self) -> None:
        self._lock = threading.Lock()
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopConnections] = WeakKeyDictionary()

    async def queue(self) -> WaitQueue:
        return self.here().queue

    def run(self, steps: Steps[_T]) -> Coroutine[Any, Any, _T]:
        """Run a generator; other tasks run meanwhile.

        After a cancellation, the steps that release what may have been acquired do not wait.
        """
        connections = self.here()

        def do(step: Any) -> Awaitable[Any]:
            nonlocal connections
            if connections.closed:  # while this task waited in line
                connections = self.here()
            return connections.broadcast(step) if type(step) is Broadcast else connections.sleep(step)

        def tell(step: Any) -> Any:
            return connections.tell(step)

        return run_async(steps, do, tell)

    async def init(
        self,
        *,
        base: int | None = None,
        max_ttl: float | None = None,
        above: int | None = None,
        allow_eviction: bool = False,
    ) -> bool:
        """Initialise N blank nodes, once in their life: see `Redlock.init`, also for the errors."""
        return await asyncio.to_thread(
            self._authority.init, base=base, max_ttl=max_ttl, above=above, allow_eviction=allow_eviction
        )

    async def status(self) -> tuple[NodeStatus, ...]:
        """Return the status of every node: see `Redlock.status`."""
        return await asyncio.to_thread(self._authority.status)

    async def close(self) -> None:
        """See `AsyncView.close`."""
        for end in before_closing:
            await end(self._authority)
        with self._lock:
            connections = self._by_loop.pop(asyncio.get_running_loop(), None)
        if connections is not None:
            connections.close()

    def here(self) -> LoopConnections:
        loop = asyncio.get_running_loop()
        connections = self._by_loop.get(loop)
        if connections is None or connections.closed:
            with self._lock:
                for each, orphan in list(self._by_loop.items()):
                    if each.is_closed():
                        orphan.close()
                        del self._by_loop[each]
                self._by_loop[loop] = connections = self._authority.connect_in(loop)
        return connections

    def close_everywhere(self) -> None:
        """Close the connections of every loop; those of a running loop in its own thread."""
        with self._lock:
            everywhere, self._by_loop = list(self._by_loop.values()), WeakKeyDictionary()
        for connections in everywhere:
            if connections.is_elsewhere:
                connections.do_there(connections.close)
            else:
                connections.close()


_FAREWELL: Final = 0.5  # the most seconds that `settle` waits for answers when the process ends


def _check_namespace(namespace: object) -> str:
    if isinstance(namespace, str) and namespace and namespace.isprintable() and not {*namespace} & {*"{} "}:
        return namespace
    raise ValueError(f"a namespace is a word without braces or spaces, not {namespace!r}")

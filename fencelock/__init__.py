"""fencelock: quorum locks that mint fencing tokens, and a database that refuses stale writers."""

from fencelock.authority.redlock.redlock import Redlock
from fencelock.lease import Lease
from fencelock.lock import FencedLock, fenced_lock
from fencelock.settings import configure

__all__ = ["FencedLock", "Lease", "Redlock", "configure", "fenced_lock"]

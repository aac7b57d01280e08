"""URLs that name several hosts: `etcd://user:password@host1:2379,host2:2379/root?ca=ca.pem`."""

from __future__ import annotations

import re
import ssl
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, unquote

from fencelock._checks import IN_URLS

DEFAULT_ROOT: Final = "fencelock"
_URL: Final = re.compile(r"(?s)([a-z]+)://(?:([^/?@]*)@)?([^/?@]*)(?:/([^?]*?)/?)?(?:\?(.*))?")
_HOST: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:,\[\]]+)(?::([0-9]{1,5}))?")
_ROOT: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,100}(/[A-Za-z0-9_-][A-Za-z0-9_.-]{0,100})*")
_MAX_PORT: Final = 65535


@dataclass(frozen=True, slots=True)
class Hosts:
    """The parts of a URL; `root` is the folder below which all keys are, without a slash at either end."""

    scheme: str
    addresses: tuple[tuple[str, int], ...]
    root: str
    user: str
    password: str = field(repr=False)
    options: Mapping[str, str]

    def __str__(self) -> str:
        """Return the URL without user, password and query."""
        return f"{self.scheme}://{','.join(map(shown, self.addresses))}/{self.root}"


def shown(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse(url: object, schemes: Collection[str], port: int, options: Collection[str]) -> Hosts:
    """Return the parts of a URL; `options` are the names that its query may have. No error has a password."""
    form = f"{next(iter(schemes))}://host1:{port},host2:{port}"
    if not isinstance(url, str):
        raise TypeError(f"a URL is a str such as {form!r}, not {type(url).__name__}")
    match = _URL.fullmatch(url.strip())
    if url.count("@") > (match is not None and match[2] is not None):  # before a message shows a password
        raise ValueError(IN_URLS)
    if match is None or match[1] not in schemes:
        raise ValueError(f"the URL begins with none of {', '.join(schemes)}: write {form}")
    scheme, login, hosts, root, query = match.groups()
    user, _, password = map(unquote, (login or "").partition(":"))
    addresses = []
    for host in (hosts or "").split(","):
        found = _HOST.fullmatch(host)
        if found is None or not 0 < int(found[2] or port) <= _MAX_PORT:
            hidden = re.sub(r":(?!\d+$).*", ":***", host)  # perhaps a login, whose host was forgotten
            raise ValueError(f"{hidden!r} is not a host with a port: write {form}")
        addresses.append((found[1].strip("[]"), int(found[2] or port)))
    if twice := next((each for each in addresses if addresses.count(each) > 1), None):
        raise ValueError(f"{shown(twice)} is named twice")
    if root and not _ROOT.fullmatch(root):
        raise ValueError(f"the path {root!r} is no valid root: use letters, digits, - and _, with / between")
    its = dict(parse_qsl(query or "", keep_blank_values=True))
    if unknown := its.keys() - set(options):
        raise ValueError(f"{', '.join(sorted(unknown))} is no setting; the settings are {', '.join(options)}")
    return Hosts(scheme, tuple(addresses), root or DEFAULT_ROOT, user, password, its)


def tls_of(hosts: Hosts, *protocols: str) -> ssl.SSLContext | None:
    """Return how to connect with TLS, None for a plain scheme; with `?ca=` no other authority is trusted."""
    files = {name: hosts.options[name] for name in ("ca", "cert", "key") if name in hosts.options}
    if not hosts.scheme.endswith("s"):
        if files:
            raise ValueError(f"{', '.join(files)}: certificates are for {hosts.scheme}s://")
        return None
    if "key" in files and "cert" not in files:
        raise ValueError("a key needs its certificate: ?cert=client.pem&key=client-key.pem")
    try:
        context = ssl.create_default_context(cafile=files.get("ca"))
        if "cert" in files:
            context.load_cert_chain(files["cert"], files.get("key"))
    except OSError as error:  # also if a file contains no certificate
        raise ValueError(f"the certificates of {hosts} cannot be read: {error}") from error
    if protocols:
        context.set_alpn_protocols(protocols)
    return context

"""Certificates for servers on the loopback interface and for their clients, by the program `openssl` (3.0).

Apart from `etcd.py`, because any server that speaks TLS could use them.
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from proof.servers.workspace import ServerError

_NEW_KEY: Final = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "30")
_NAMES: Final = "subjectAltName=DNS:localhost,IP:127.0.0.1"
#: A client whose certificate has no CN: etcd's JSON gateway refuses a CN once there are users.
NAMELESS: Final = "nameless"
# etcd is a client of its own, with the server's certificate.
_USES: Final = "extendedKeyUsage=serverAuth,clientAuth"


@dataclass(frozen=True, slots=True)
class Certificate:
    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Certificates:
    """An authority of its own, a server's certificate, that of a client `alice`, and one without a name."""

    folder: Path
    ca: Path
    server: Certificate
    client: Certificate
    nameless: Certificate

    @classmethod
    def make(cls, folder: Path) -> Self:
        folder.mkdir()
        _request(folder, "ca", "-addext", "keyUsage=critical,keyCertSign,cRLSign")
        server = _signed(folder, "server", "-addext", _NAMES, "-addext", _USES)
        return cls(folder, folder / "ca.pem", server, _signed(folder, "alice"), _signed(folder, NAMELESS))

    @property
    def certificate(self) -> Path:
        return self.client.certificate

    @property
    def key(self) -> Path:
        return self.client.key

    def make_client(self, name: str) -> Certificate:
        """Sign a certificate for another client, whose CN is this name."""
        return _signed(self.folder, name)


def _signed(folder: Path, name: str, *options: str) -> Certificate:
    authority = ("-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=critical,CA:FALSE")
    _request(folder, name, *authority, *options)
    return Certificate(folder / f"{name}.pem", folder / f"{name}.key")


def _request(folder: Path, name: str, *options: str) -> None:
    subject = "/O=fencelock" if name == NAMELESS else f"/CN={name}"
    command = ["openssl", "req", "-x509", *_NEW_KEY, "-subj", subject, *options]
    command += ["-keyout", f"{name}.key", "-out", f"{name}.pem"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError as error:
        raise ServerError(f"certificates need the program openssl: {error}") from error
    if done.returncode != 0:
        raise ServerError(f"openssl made no certificate for {name}:\n{done.stderr}")

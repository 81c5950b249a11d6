"""The keys and certificates that the processes of a job show each other over TLS: files of the user, or a certificate
that the job has made.

A certificate of the job is made by the `openssl` command. Python's ssl module has no means for it, and the library
`cryptography` would be a dependency of some megabytes, with an OpenSSL of its own, for one call in the life of a job.
TLS without certificates, by a key that both ends know, begins with Python 3.13.

What must not happen: that a private key is written to a file, or is part of a repr, a log or what a job saves.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field

from penstock.runtime.errors import PenstockError

_END = "-----END PRIVATE KEY-----\n"
# The machine's own configuration of the command does not matter. All processes of a job show the same certificate, at
# both ends of connections.
_REQUEST = b"""\
[req]
distinguished_name = name
x509_extensions = use
prompt = no
[name]
CN = a Penstock job
[use]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth, clientAuth
"""
_MAKE = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 36500 -config /dev/stdin "
    "-keyout /dev/stdout"
)
_MAKE_S = 60.0


class BadCertificate(PenstockError):
    """A certificate cannot be used for TLS, or a job cannot make one."""


@dataclass(frozen=True)
class Tls:
    """The files with which the processes of a job encrypt their traffic to other machines, for `run(tls=Tls(...))`.

    Each process shows `certificate`, whose private key is in `key`, and accepts the certificates that `authority` has
    signed. All are files in PEM format, and have the same paths on all machines of the job. What they contain may
    differ between machines. A certificate must be good for both ends of a connection; names in it do not matter. Files
    that are replaced while the job runs are read again.
    """

    certificate: str | os.PathLike[str]
    key: str | os.PathLike[str]
    authority: str | os.PathLike[str]


@dataclass(frozen=True)
class JobCertificate:
    """A private key and its certificate, which only the processes of one job show and accept."""

    key: str = field(repr=False)
    certificate: str = field(repr=False)

    @classmethod
    def make(cls) -> JobCertificate:
        """Makes new ones. Raises BadCertificate."""
        try:
            made = subprocess.run(_MAKE.split(), input=_REQUEST, capture_output=True, timeout=_MAKE_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BadCertificate(
                f"a job with tls=True makes its certificate by the command openssl on the machine of its JobMaster, "
                f"where this fails: {error}. Install openssl there, or give certificates: tls=penstock.Tls(...)"
            ) from None
        key, end, certificate = made.stdout.decode().partition(_END)
        if made.returncode or not end:
            lines = made.stderr.decode(errors="replace").strip().splitlines()
            raise BadCertificate(
                f"openssl made no certificate for the job (exit code {made.returncode}): "
                f"{lines[-1] if lines else 'it says nothing'}. Give certificates: tls=penstock.Tls(...)"
            )
        return cls(key + end, certificate)


#: What a process shows, and by what it knows its peers.
Credentials = Tls | JobCertificate

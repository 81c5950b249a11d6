"""Certificates for tests, made by openssl: authorities, and what they have signed."""

from __future__ import annotations

import subprocess
from pathlib import Path

from penstock.runtime.transport.certificates import Tls


class Folder:
    """A folder of certificates. The files of NAME are NAME.pem and NAME.key."""

    def __init__(self, folder: Path) -> None:
        self.path = folder

    def openssl(self, command: str) -> None:
        """Runs a command of openssl in the folder."""
        subprocess.run(["openssl", *command.split()], cwd=self.path, check=True, capture_output=True)

    def authority(self, name: str) -> None:
        """Makes an authority, whose certificate also serves its own."""
        self.openssl(
            f"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout {name}.key -out {name}.pem -days 2 "
            f"-subj /CN={name}"
        )

    def sign(self, name: str, authority: str, *, use: str = "serverAuth,clientAuth", expired: bool = False) -> None:
        """Makes a certificate that an authority has signed."""
        (self.path / "use.cnf").write_text(f"extendedKeyUsage = {use}\n")
        self.openssl(
            f"req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout {name}.key -out {name}.csr "
            f"-subj /CN={name}"
        )
        self.openssl(
            f"x509 -req -in {name}.csr -CA {authority}.pem -CAkey {authority}.key -CAcreateserial -out {name}.pem "
            f"-days {-1 if expired else 2} -extfile use.cnf"
        )

    def tls(self, name: str, authority: str) -> Tls:
        """The files for a process that shows NAME and accepts what an authority has signed."""
        return Tls(self.path / f"{name}.pem", self.path / f"{name}.key", self.path / f"{authority}.pem")

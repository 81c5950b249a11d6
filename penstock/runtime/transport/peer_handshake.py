"""How two workers' processes prove to each other that they belong to one job, when one connects to the other.

Each end knows the job's key, and says who it is and whom it means: worker, and incarnation, a random name of one
process. The proofs cover all of this and the nonces of both ends, so a handshake that is replayed, reflected to its
sender, or led to another process than the one that was meant, proves nothing. Nothing here waits: a handshake takes
bytes as they come, and every message has a fixed size. So a stranger can make a process hold some hundred bytes, and
have nothing decoded but the fields of HELLO.

    connecting end                                 end that was connected to
    HELLO: nonce, both workers and incarnations,
           proof                                ->
                                                <- nonce, proof
    proof                                       ->

The first proof can be replayed, and proves nothing about the one who sends it: it tells processes with another key, and
saves the second one. The end that was connected to proves itself before its peer has to, so the connecting end can
choose, among several connections that it tries, the first one that is answered.
"""

from __future__ import annotations

import hmac
import os
import struct
from dataclasses import dataclass

from penstock.runtime.transport.handshake import NotProved, bound, proof

_MAGIC = b"penstock peer 1\n"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
INCARNATION_BYTES = 16

# Magic, nonce; worker and incarnation of the connecting end and of the other one; which connection of the connecting
# end this is; the capacity of its send region.
_HELLO = struct.Struct(f"<16s{_NONCE_BYTES}sI{INCARNATION_BYTES}sI{INCARNATION_BYTES}sQQ")


@dataclass(frozen=True)
class Process:
    """A process of the job: a worker, and a random name that no other process has."""

    worker: int
    incarnation: bytes


class Introducing:
    """The connecting end. `output` is to be sent, and `need` the number of bytes to be received next; when both are
    empty, both ends have proved themselves."""

    def __init__(self, key: bytes, own: Process, peer: Process, number: int, capacity: int) -> None:
        """`number`: higher for each connection. `capacity`: of the send region."""
        self._key = key
        hello = _HELLO.pack(
            _MAGIC,
            os.urandom(_NONCE_BYTES),
            own.worker,
            own.incarnation,
            peer.worker,
            peer.incarnation,
            number,
            capacity,
        )
        self._say(hello)
        self.need = _NONCE_BYTES + _PROOF_BYTES

    def bind(self, binding: bytes) -> None:
        """Goes over a TLS connection with this binding; see `bound`. Called before anything else."""
        self._key = bound(self._key, binding)
        self._say(self._hello[: _HELLO.size])

    def _say(self, hello: bytes) -> None:
        self._hello = self.output = hello + proof(self._key, b"hello", hello)

    def take(self, data: bytes) -> None:
        """Takes the `need` bytes. Raises NotProved."""
        said = self._hello + data[:_NONCE_BYTES]
        if not hmac.compare_digest(data[_NONCE_BYTES:], proof(self._key, b"accepting", said)):
            raise NotProved("the peer does not know the job's key")
        self.output = proof(self._key, b"connecting", said)
        self.need = 0


class Admitting:
    """The end that was connected to; otherwise like Introducing. Its peer's words count only when `need` is 0."""

    def __init__(self, key: bytes, own: Process) -> None:
        self._key = key
        self._own = own
        self._said = b""
        self.output = b""
        self.need = _HELLO.size + _PROOF_BYTES
        self.known = False  # the stranger has said, or repeated, what a process of the job says
        self.peer = Process(0, b"")
        self.number = 0
        self.capacity = 0

    def bind(self, binding: bytes) -> None:
        """See Introducing."""
        self._key = bound(self._key, binding)

    def take(self, data: bytes) -> None:
        """Takes the `need` bytes. Raises NotProved."""
        if self._said:
            if not hmac.compare_digest(data, proof(self._key, b"connecting", self._said)):
                raise NotProved("the peer does not know the job's key")
            self.need = 0
            return
        hello = data[: _HELLO.size]
        if not hmac.compare_digest(data[_HELLO.size :], proof(self._key, b"hello", hello)):
            raise NotProved("the peer does not know the job's key")
        magic, _, worker, incarnation, to_worker, to_incarnation, self.number, self.capacity = _HELLO.unpack(hello)
        if magic != _MAGIC:
            raise NotProved("the peer speaks another version of the protocol")
        self.known = True
        if Process(to_worker, to_incarnation) != self._own:
            raise EOFError("the peer means an earlier process at this port")
        self.peer = Process(worker, incarnation)
        nonce = os.urandom(_NONCE_BYTES)
        self._said = data + nonce
        self.output = nonce + proof(self._key, b"accepting", self._said)
        self.need = _PROOF_BYTES

"""Prove to each other that two processes of this service know the same secret.

The caller sends a random number. The server answers with its own random number and a proof. The
caller checks that proof and sends its own. A proof is an HMAC of both numbers under the secret. So
the secret itself is never sent, and a recorded proof cannot be used again.

The caller's number follows the version of its protocol. A server of another version answers with
its own version only.

Between machines the connection is encrypted when Ray's is, which RAY_USE_TLS enables. It uses the
certificates in RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT. The proofs then also
cover the server's certificate. This prevents a man in the middle with another certificate of the
same CA.
"""

import hashlib
import hmac
import os
import secrets
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from skyrl_actors.messages.errors import ConfigError, InternalError

# Of calls, answers and their types: raise it when a message type changes.
PROTOCOL_VERSION = 15
VERSION_BYTES = 2
NONCE_BYTES = PROOF_BYTES = TOKEN_BYTES = 32
CERTIFICATE_BEGIN, CERTIFICATE_END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"
Side = Literal["caller", "server"]


@dataclass(frozen=True, slots=True)
class Challenge:
    """The values that the proofs of one connection cover."""

    caller_nonce: bytes
    server_nonce: bytes
    certificate: bytes = b""  # SHA-256 of the server's certificate; empty without TLS

    def proof(self, secret: bytes, side: Side) -> bytes:
        """Return one side's HMAC. It covers the side, so it cannot be sent back to its sender."""
        content = self.caller_nonce + self.server_nonce + self.certificate + side.encode()
        return hmac.new(secret, content, hashlib.sha256).digest()

    def is_proven(self, secret: bytes, side: Side, given: bytes) -> bool:
        return hmac.compare_digest(self.proof(secret, side), given)


def new_nonce() -> bytes:
    """Return a random number that is used for one connection."""
    return secrets.token_bytes(NONCE_BYTES)


def new_token() -> bytes:
    """Return the secret that a server shares with the processes that may call it."""
    return secrets.token_bytes(TOKEN_BYTES)


def own_version() -> bytes:
    """Encode this process's version. It begins a caller's first message, in every version."""
    return PROTOCOL_VERSION.to_bytes(VERSION_BYTES)


def nonce_in(hello: bytes) -> bytes | None:
    """Return the number in a caller's first message, or None if it has another version."""
    version, nonce = hello[:VERSION_BYTES], hello[VERSION_BYTES:]
    return nonce if version == own_version() and len(nonce) == NONCE_BYTES else None


def check_not_refused(answer: bytes) -> None:
    """Raise InternalError if the server answered with its version only."""
    if len(answer) == VERSION_BYTES:
        raise InternalError(
            f"the actor has version {int.from_bytes(answer)} of the RPC protocol and this process "
            f"has version {PROTOCOL_VERSION}: install the same release of skyrl-actors for both, "
            "then restart the service and this process"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RayTls:
    """The certificates that Ray itself uses between machines."""

    certificate: str
    key: str
    ca: str

    @staticmethod
    def configured(environment: Mapping[str, str] = os.environ) -> "RayTls | None":
        """Read the environment; None without TLS. Raises ConfigError when a file is not named."""
        if environment.get("RAY_USE_TLS", "0").lower() not in ("1", "true"):
            return None
        names = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
        if missing := [name for name in names if not environment.get(name)]:
            raise ConfigError(
                f"RAY_USE_TLS is set and {', '.join(missing)} is not: "
                "name the files, or unset RAY_USE_TLS"
            )
        certificate, key, ca = (environment[name] for name in names)
        return RayTls(certificate=certificate, key=key, ca=ca)

    def context(self, side: Side) -> ssl.SSLContext:
        """Build a context in which both sides show a certificate of the CA, as in Ray.

        Host names are not compared: the addresses of a cluster change, and the proofs cover the
        certificate itself.
        """
        context = ssl.SSLContext(
            ssl.PROTOCOL_TLS_SERVER if side == "server" else ssl.PROTOCOL_TLS_CLIENT
        )
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self.certificate, self.key)
        context.load_verify_locations(self.ca)
        return context

    def digest(self) -> bytes:
        """Return the SHA-256 of this process's own certificate, as its peer sees it."""
        text = Path(self.certificate).read_text()
        first = text[
            text.index(CERTIFICATE_BEGIN) : text.index(CERTIFICATE_END) + len(CERTIFICATE_END)
        ]
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(first)).digest()


def digest_of_peer(connection: ssl.SSLObject | None) -> bytes:
    """Return the SHA-256 of the peer's certificate; empty without TLS."""
    certificate = connection.getpeercert(binary_form=True) if connection else None
    return hashlib.sha256(certificate).digest() if certificate else b""

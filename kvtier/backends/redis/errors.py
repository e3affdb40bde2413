"""Convert Redis errors to outcomes, redirections and messages.

Error codes: https://github.com/redis/redis/blob/7.0/src/server.c (``shared``) and the cluster specification,
https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/#redirection-and-resharding.
"""

from __future__ import annotations

import os
import ssl
from typing import NamedTuple

from kvtier.backends.base import Outcome
from kvtier.backends.redis.protocol import ErrorReply, Refused
from kvtier.backends.redis.settings import Endpoint
from kvtier.backends.redis.topology import ControlFailed
from kvtier.concurrency.sockets.connection import ClosedUnanswered
from kvtier.logs import causes_of, printable

OTHER_NODE_CODES = frozenset({"CLUSTERDOWN", "LOADING", "MASTERDOWN", "MOVED", "READONLY", "TRYAGAIN"})
"""Another server may accept the command: refresh the topology."""

_MESSAGES = {
    "CLUSTERDOWN": "{} reports that its cluster is down: check CLUSTER INFO there",
    "LOADING": "{} is still loading its data",
    "MASTERDOWN": "{} is a replica that has lost its primary",
    "MOVED": "{} is a cluster node: use a +cluster:// `url`",
    "NOAUTH": "{} requires a password: set `password`",
    "NOPERM": (
        "{} denies its user the commands that kvtier needs: allow GET, SET, EXISTS and UNLINK on keys that "
        "begin with `prefix`, and INFO, with ACL SETUSER `user` ~`prefix`* +get +set +exists +unlink +info, "
        "and +strlen for a tier with a codec"
    ),
    "OOM": "{} is full and evicts nothing: raise its maxmemory, or set its maxmemory-policy to allkeys-lru",
    "READONLY": "{} is a read-only replica: set `url` to its primary, or to the sentinels that monitor it",
    "WRONGPASS": "{} rejects the user or password: check `user` and `password`",
}
_MESSAGES_BY_PHRASE = {
    "DB index is out of range": "{} has no database of this number: check the end of `url`",
    "invalid bulk length": (
        "{} rejects values as large as a chunk: raise its proto-max-bulk-len, or lower `chunk_tokens`"
    ),
    "cluster support disabled": "{} is not a cluster node: use a `url` without +cluster",
    "SELECT is not allowed in cluster mode": _MESSAGES["MOVED"],
    "SENTINEL": "{} is not a sentinel: use its own form of `url`, without +sentinel",
    "max number of clients": "{} has reached its client limit: raise its maxclients, or lower `connections`",
}
"""Messages for errors with a generic code, by a phrase in the reply."""
_CODES_OF_ERRORS = {
    "AuthenticationError": "WRONGPASS",
    "AuthenticationWrongNumberOfArgsError": "WRONGPASS",
    "BusyLoadingError": "LOADING",
    "NoPermissionError": "NOPERM",
}
"""Error codes by exception of redis-py and compatible libraries, which drop the code of the reply."""
_RENEW = "renew it on the server, and check the clocks"
_OTHER_NAME = "name the server in `url` as its certificate does"
_CERTIFICATE_REMEDIES = {9: _RENEW, 10: _RENEW, 62: _OTHER_NAME, 64: _OTHER_NAME}
"""Remedies by OpenSSL's ``X509_V_ERR_*``: not yet valid, expired, another host name, another IP address."""
_CHECK_CERTIFICATE = "check `certificate_file` and `key_file`"
_CLOSED = f"does `url` match its TLS? If so, {_CHECK_CERTIFICATE}"
_PLAIN = "its port is probably a plain one: use a `url` without TLS"
_NOT_TLS = {"WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE", "HTTP_REQUEST"}
"""OpenSSL's reasons for an answer that is not TLS."""


class Fault(NamedTuple):
    """A problem with a server, and what to do."""

    found: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.found}: {self.remedy}" if self.remedy else self.found


class Target(NamedTuple):
    """The server to send a command to."""

    endpoint: Endpoint
    asking: bool = False
    """Whether to send ASKING first, after an ``-ASK`` redirection."""


def outcome_of(reply: ErrorReply) -> Outcome:
    """Return the outcome for an error reply."""
    if reply.code == "OOM":
        return Outcome.FULL
    # The key holds another type, which a SET would replace.
    return Outcome.MISS if reply.code == "WRONGTYPE" else Outcome.FAILED


def redirection_of(reply: ErrorReply, asked: Endpoint) -> Target | None:
    """Parse a redirection by ``asked``, ``MOVED slot host:port`` or ``ASK ...``; ``None``: another error."""
    fields = reply.message.split(" ")
    if reply.code not in ("MOVED", "ASK") or len(fields) != 3:
        return None
    host, _, port = fields[2].rpartition(":")
    if not (port.isascii() and port.isdecimal()) or not 0 < int(port[:6]) < 1 << 16:
        return None
    # A node that does not know its own host name sends an empty one.
    return Target(Endpoint(host.strip("[]") or asked.host, int(port)), reply.code == "ASK")


def describe_refusal(reply: ErrorReply, endpoint: Endpoint) -> Fault:
    """Return a one-line message for an error reply."""
    message = _MESSAGES.get(reply.code)
    for phrase, by_phrase in _MESSAGES_BY_PHRASE.items():
        if message is None and phrase in reply.message:
            message = by_phrase
    if message is None:
        return Fault(f"{endpoint} replied: {printable(reply.message)}")
    found, _, remedy = message.partition(": ")
    return Fault(found.format(endpoint), remedy)


def describe_failure(error: OSError, endpoint: Endpoint) -> Fault:
    """Return a one-line message for a failed connection."""
    if isinstance(error, Refused):
        return describe_refusal(error.reply, endpoint)
    if isinstance(error, ssl.SSLCertVerificationError):
        remedy = _CERTIFICATE_REMEDIES.get(error.verify_code, "check `ca_file`")
        return Fault(f"the certificate of {endpoint} cannot be verified: {error.verify_message}", remedy)
    if isinstance(error, ssl.SSLError):
        # A server that requires a client certificate closes the connection, with or without an alert.
        remedy = _PLAIN if error.reason in _NOT_TLS else _CHECK_CERTIFICATE
        return Fault(f"TLS error from {endpoint}: {error.reason or error}", remedy)
    if isinstance(error, ClosedUnanswered):
        return Fault(f"{endpoint} failed: the server closed the connection", _CLOSED)
    # asyncio replaces the system's message with one that contains addresses.
    reason = (
        os.strerror(error.errno) if isinstance(error, ConnectionError) and error.errno else error.strerror
    )
    if "handshake operation timed out" in str(error):
        return Fault(f"{endpoint} accepts connections, but does not answer the TLS handshake in time", _PLAIN)
    return Fault(f"{endpoint} failed: {reason or error}")


def describe_control_failure(failed: ControlFailed) -> Fault:
    """Return a one-line message for a failed query of the client library."""
    error: BaseException | None = failed.__cause__
    if error is None:
        return Fault(str(failed))
    text = str(error)
    for phrase in _MESSAGES_BY_PHRASE:
        if phrase in text:
            return describe_refusal(ErrorReply("ERR", text), failed.endpoint)
    code = _CODES_OF_ERRORS.get(type(error).__name__)
    if code == "WRONGPASS" and "required" in text:
        code = "NOAUTH"
    if code is not None:
        return describe_refusal(ErrorReply(code, code), failed.endpoint)
    causes = list(causes_of(error))
    for kind in (ssl.SSLError, ConnectionError, OSError):
        for cause in causes:
            # The library's own ConnectionError is not an OSError, and is less specific.
            if isinstance(cause, kind) and not isinstance(cause, TimeoutError):
                if isinstance(cause, (ConnectionResetError, BrokenPipeError)):
                    cause = ClosedUnanswered()
                return describe_failure(cause, failed.endpoint)
    if "Connection closed by server" in text:
        return describe_failure(ClosedUnanswered(), failed.endpoint)
    if any("Timeout" in type(cause).__name__ for cause in causes):
        return Fault(
            f"{failed.endpoint} does not answer in time", "is it running, and does `url` match its TLS?"
        )
    return Fault(f"{failed.endpoint} sent an unexpected reply: {printable(text)}")

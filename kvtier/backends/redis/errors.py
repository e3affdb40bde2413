"""What a Redis refuses, as an outcome, as a redirection and in words.

The codes: https://github.com/redis/redis/blob/7.0/src/server.c (``shared``) and the cluster specification,
https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/#redirection-and-resharding.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from typing import NamedTuple

from kvtier.backends.base import Outcome
from kvtier.backends.redis.commands import Refused
from kvtier.backends.redis.control import ControlFailed
from kvtier.backends.redis.resp import ErrorReply
from kvtier.backends.redis.url import Endpoint

OTHER_NODE_CODES = frozenset({"CLUSTERDOWN", "LOADING", "MASTERDOWN", "MOVED", "READONLY", "TRYAGAIN"})
"""Another server may do what this one does not: look again which is which."""

LOGIN_CODES = frozenset({"NOAUTH", "NOPERM", "WRONGPASS"})

_WORDS = {
    "CLUSTERDOWN": "{} says that its cluster is down: look at CLUSTER INFO there",
    "LOADING": "{} is still loading its data",
    "MASTERDOWN": "{} is a replica that has lost its primary",
    "MOVED": "{} is a node of a cluster: write a +cluster:// `url`",
    "NOAUTH": "{} wants a password: see `password`",
    "NOPERM": (
        "{} forbids its user what kvtier does: allow it GET, SET, EXISTS and UNLINK on the keys that begin "
        "with `prefix`, and INFO"
    ),
    "OOM": (
        "{} has no room and evicts nothing: raise its maxmemory, or set its maxmemory-policy to allkeys-lru"
    ),
    "READONLY": "{} is a read-only replica: name its primary, or the sentinels that know it, in `url`",
    "WRONGPASS": "{} refuses the user or the password: see `user` and `password`",
}
_PHRASES = {
    "invalid bulk length": (
        "{} admits no value as large as a chunk: raise its proto-max-bulk-len, or lower `chunk_tokens`"
    ),
    "max number of clients": (
        "{} has as many clients as it admits: raise its maxclients, or lower `connections`"
    ),
}
"""What tells refusals apart that have no code of their own."""
_CODES_OF_ERRORS = {
    "AuthenticationError": "WRONGPASS",
    "AuthenticationWrongNumberOfArgsError": "WRONGPASS",
    "BusyLoadingError": "LOADING",
    "NoPermissionError": "NOPERM",
}
"""Exceptions of redis-py and its kin, which have lost the code that the server answered."""
LONGEST_MESSAGE = 200


class Target(NamedTuple):
    """A server that is asked for keys."""

    endpoint: Endpoint
    asking: bool = False
    """Whether it has them for this one command, since another server said so."""


def outcome_of(reply: ErrorReply) -> Outcome:
    """What became of the key whose command was refused."""
    if reply.code == "OOM":
        return Outcome.FULL
    # Something else has the key; a SET would take its place.
    return Outcome.MISS if reply.code == "WRONGTYPE" else Outcome.FAILED


def redirection_of(reply: ErrorReply, asked: Endpoint) -> Target | None:
    """Where ``asked`` sends us, ``None`` where it does not: ``MOVED slot host:port`` or ``ASK ...``."""
    words = reply.message.split(" ")
    if reply.code not in ("MOVED", "ASK") or len(words) != 3:
        return None
    host, _, port = words[2].rpartition(":")
    if not (port.isascii() and port.isdecimal()) or not 0 < int(port[:6]) < 1 << 16:
        return None
    # A node that does not know its own name leaves it out.
    return Target(Endpoint(host.strip("[]") or asked.host, int(port)), reply.code == "ASK")


def refusal_in_words(reply: ErrorReply, endpoint: Endpoint) -> str:
    """One sentence about a refused command."""
    words = _WORDS.get(reply.code)
    for phrase, meaning in _PHRASES.items():
        if words is None and phrase in reply.message:
            words = meaning
    return (words or "{} answers: " + _printable(reply.message)).format(endpoint)


def failure_in_words(error: OSError, endpoint: Endpoint) -> str:
    """One sentence about a connection that could not be made, or broke."""
    if isinstance(error, Refused):
        return refusal_in_words(error.reply, endpoint)
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate of {endpoint} is not verified: {error.verify_message}: see `ca_file`"
    if isinstance(error, ssl.SSLError):
        return f"{endpoint} does not speak TLS as it should: {error.reason or error}"
    # asyncio writes addresses where the system's words should be.
    words = os.strerror(error.errno) if isinstance(error, ConnectionError) and error.errno else error.strerror
    return f"{endpoint} fails: {words or error}"


def control_failure_in_words(failed: ControlFailed) -> str:
    """One sentence about a question that the client library brought no answer to."""
    error: BaseException | None = failed.__cause__
    if error is None:
        return str(failed)
    code = _CODES_OF_ERRORS.get(type(error).__name__)
    if code == "WRONGPASS" and "required" in str(error):
        code = "NOAUTH"
    if code is not None:
        return refusal_in_words(ErrorReply(code, code), failed.endpoint)
    causes = list(_causes(error))
    for kind in (ssl.SSLError, ConnectionError, OSError):
        for cause in causes:
            # The library's own ConnectionError is no OSError, and says less.
            if isinstance(cause, kind) and not isinstance(cause, TimeoutError):
                return failure_in_words(cause, failed.endpoint)
    if any("Timeout" in type(cause).__name__ for cause in causes):
        return f"{failed.endpoint} does not answer in time: is it up, and does it speak TLS if `url` says so?"
    return f"{failed.endpoint} does not answer as it should: {_printable(str(error))}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _printable(text: str) -> str:
    shown = "".join(letter if letter.isprintable() else "?" for letter in text[:LONGEST_MESSAGE])
    return shown.replace("{", "{{").replace("}", "}}")

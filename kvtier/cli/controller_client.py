"""A controller, over HTTP. Every call blocks until the answer is there, or raises ``ControllerError``.

A controller that has just been started, or is being started anew, is waited for: what was refused a
connection is tried again for ``PATIENCE_SECONDS``, and so is a question whose answer was cut off. What
would change something is sent once, as it may have arrived.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import msgspec

import kvtier
from kvtier.cli.controller_answers import (
    Accepted,
    Event,
    Events,
    Found,
    Instance,
    Instances,
    Place,
    Prompt,
    Refusal,
)
from kvtier.errors import ControllerError

PATIENCE_SECONDS = 3.0
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.05, 0.5
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 60.0
"""For one answer: an instance may have to tokenize a long prompt first."""
STREAM_SECONDS = 30.0
"""Of silence, after which a stream is taken for dead: it tells of all instances every ten."""

AnswerT = TypeVar("AnswerT")


class Controller:
    """The controller at ``url``, asked as the one who holds ``token``."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self._url = url
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"} if token is not None else {},
            timeout=httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
            # The system's certificates, and those that SSL_CERT_FILE names. A proxy is for the world outside.
            verify=ssl.create_default_context(),
            trust_env=False,
        )

    def __enter__(self) -> Controller:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def lookup(self, prompt: Prompt) -> Found:
        """Which instances hold how much of a prompt's beginning."""
        return self._post(Found, "/lookup", prompt)

    def move(self, source: Place, target: Place, prompt: Prompt, *, copy: bool) -> Accepted:
        """Take a prompt's chunks from one tier to another, of one instance or of two."""
        return self._post(Accepted, "/move", prompt, old_position=source, new_position=target, copy=copy)

    def prefetch(self, place: Place, prompt: Prompt, *, deadline: float | None) -> Accepted:
        """Bring a prompt's chunks up into a tier, for ``deadline`` seconds at most."""
        return self._post(Accepted, "/prefetch", prompt, **_at(place), deadline=deadline)

    def pin(self, place: Place, prompt: Prompt, *, ttl: float | None) -> Accepted:
        """Keep a prompt's chunks from being evicted, for ``ttl`` seconds or for good."""
        return self._post(Accepted, "/pin", prompt, **_at(place), ttl=ttl)

    def unpin(self, place: Place, prompt: Prompt) -> Accepted:
        """Let a prompt's chunks be evicted again."""
        return self._post(Accepted, "/unpin", prompt, **_at(place))

    def clear(self, instance: str, tier: str | None, prompt: Prompt | None) -> Accepted:
        """Remove a prompt's chunks, or all, from one tier of an instance or from all."""
        return self._post(Accepted, "/clear", prompt, instance=instance, tier=tier)

    def events(self, limit: int) -> Events:
        """The last events, the newest first."""
        return self._get(Events, "/events", limit=limit)

    def event(self, event_id: str, *, wait: float | None = None) -> Event:
        """One event; with ``wait`` as soon as it has ended, or after so many seconds."""
        return self._get(Event, f"/events/{quote(event_id, safe='')}", wait=wait)

    def instances(self) -> Instances:
        """All instances that are registered."""
        return self._get(Instances, "/instances")

    def instance(self, name: str) -> Instance:
        """One instance, with its history."""
        return self._get(Instance, f"/instances/{quote(name, safe='')}")

    def stream(self) -> Iterator[Event]:
        """Events as they change, without end; raises where the controller goes away."""
        timeout = httpx.Timeout(STREAM_SECONDS, connect=CONNECT_SECONDS)
        with self._explained(), self._http.stream("GET", "/stream", timeout=timeout) as response:
            if response.is_error:
                response.read()
                raise self._refusal(response)
            name = ""
            for line in response.iter_lines():
                field, _, value = line.partition(":")
                if field == "event":
                    name = value.strip()
                elif field == "data" and name == "event":
                    yield self._decoded(Event, value.encode())
        raise ControllerError(f"the controller at {self._url} has ended the stream of events")

    def _post(self, kind: type[AnswerT], path: str, prompt: Prompt | None, **values: object) -> AnswerT:
        given = {name: value for name, value in values.items() if value is not None}
        body = given if prompt is None else {**given, **msgspec.to_builtins(prompt)}
        return self._decoded(kind, self._answer("POST", path, body=body))

    def _get(self, kind: type[AnswerT], path: str, **query: float | None) -> AnswerT:
        given = {name: value for name, value in query.items() if value is not None}
        return self._decoded(kind, self._answer("GET", path, query=given))

    def _answer(
        self, method: str, path: str, *, body: object = None, query: dict[str, float] | None = None
    ) -> bytes:
        pause = FIRST_PAUSE_SECONDS
        until = time.monotonic() + PATIENCE_SECONDS
        with self._explained():
            while True:
                try:
                    response = self._http.request(method, path, json=body, params=query)
                    break
                except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
                    asked_only = method == "GET" and not isinstance(error, httpx.ConnectError)
                    if not (asked_only or _is_refused(error)) or time.monotonic() + pause > until:
                        raise
                time.sleep(pause)
                pause = min(pause * 2, LAST_PAUSE_SECONDS)
        if not response.is_success:
            raise self._refusal(response)
        return response.content

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Say what went wrong on the way there, and what to do about it."""
        try:
            yield
        except httpx.ConnectError as error:
            raise ControllerError(
                f"no controller answers at {self._url} ({error}): start one with `kvtier controller`, or "
                "name another with --url or controller.url"
            ) from error
        except httpx.TimeoutException as error:
            raise ControllerError(
                f"the controller at {self._url} does not answer in time: see whether --url or controller.url "
                "names the right one, and whether it is overloaded"
            ) from error
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise ControllerError(
                f"the controller at {self._url} went away before it had answered ({error}): what it was "
                "asked for may have begun; `kvtier events` shows it"
            ) from error

    def _refusal(self, response: httpx.Response) -> ControllerError:
        if response.status_code == httpx.codes.UNAUTHORIZED:
            has = "Authorization" in self._http.headers
            said = "does not know this token" if has else "lets in nobody without a token"
            return ControllerError(
                f"the controller at {self._url} {said}: name the file that holds its token with "
                "--token-file, or set controller.token"
            )
        try:
            refusal = msgspec.json.decode(response.content, type=Refusal)
        except msgspec.DecodeError:
            return ControllerError(
                f"what answers at {self._url} with {response.status_code} {response.reason_phrase} is no "
                "controller: name it with --url or controller.url"
            )
        return ControllerError(_sentence(refusal))

    def _decoded(self, kind: type[AnswerT], content: bytes) -> AnswerT:
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.DecodeError as error:
            raise ControllerError(
                f"what answers at {self._url} is no controller that kvtier {kvtier.__version__} understands "
                f"({error}): name it with --url or controller.url, or install the version that it has"
            ) from error


def _at(place: Place) -> dict[str, str]:
    instance, tier = place
    return {"instance": instance, "tier": tier}


def _is_refused(error: httpx.TransportError) -> bool:
    """Whether nobody listens there: then nothing has arrived."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _sentence(refusal: Refusal) -> str:
    detail: Any = refusal.detail
    if isinstance(detail, list):  # What FastAPI says of a body that is not what it should be.
        parts = [part for part in detail if isinstance(part, dict)]
        detail = "; ".join(f"{'.'.join(map(str, part.get('loc', ())))}: {part.get('msg')}" for part in parts)
    # The detail names them as a rule.
    named = not refusal.known or any(name in str(detail) for name in refusal.known)
    return str(detail) if named else f"{detail} (known: {', '.join(refusal.known)})"

"""HTTP client of the controller. Calls block until the response has arrived, and raise ``ControllerError``.

To bridge a restart of the controller, refused connections are retried for ``TIMEOUT_SECONDS``, and so are GET
requests whose response was cut off. Other requests are not retried once sent, as they may have taken effect.
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

TIMEOUT_SECONDS = 3.0
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.05, 0.5
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 60.0
"""Timeout of a response: an instance may have to tokenize a long prompt first."""
STREAM_SECONDS = 30.0
"""Idle timeout of the stream, which sends a list of instances every 10 s."""

AnswerT = TypeVar("AnswerT")


class Controller:
    """A client of the controller at ``url``, authenticated with ``token``."""

    def __init__(self, url: str, token: str | None = None) -> None:
        self._url = url
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {token}"} if token is not None else {},
            timeout=httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
            # The system's certificates, and SSL_CERT_FILE. Ignore HTTP proxies from the environment.
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
        """Return which tiers hold how much of a prompt's prefix."""
        return self._post(Found, "/lookup", prompt)

    def move(self, source: Place, target: Place, prompt: Prompt, *, copy: bool) -> Accepted:
        """Move a prompt's chunks to another tier, of the same or another instance."""
        return self._post(Accepted, "/move", prompt, old_position=source, new_position=target, copy=copy)

    def prefetch(self, place: Place, prompt: Prompt, *, deadline: float | None) -> Accepted:
        """Prefetch a prompt's chunks into a tier, within ``deadline`` seconds."""
        return self._post(Accepted, "/prefetch", prompt, **_at(place), deadline=deadline)

    def pin(self, place: Place, prompt: Prompt, *, ttl: float | None) -> Accepted:
        """Protect a prompt's chunks from eviction, for ``ttl`` seconds or until unpinned."""
        return self._post(Accepted, "/pin", prompt, **_at(place), ttl=ttl)

    def unpin(self, place: Place, prompt: Prompt) -> Accepted:
        """Allow a prompt's chunks to be evicted again."""
        return self._post(Accepted, "/unpin", prompt, **_at(place))

    def clear(self, instance: str, tier: str | None, prompt: Prompt | None) -> Accepted:
        """Remove a prompt's chunks, or all chunks, from one tier or all tiers of an instance."""
        return self._post(Accepted, "/clear", prompt, instance=instance, tier=tier)

    def events(self, limit: int) -> Events:
        """Return the latest events, newest first."""
        return self._get(Events, "/events", limit=limit)

    def event(self, event_id: str, *, wait: float | None = None) -> Event:
        """Return an event. With ``wait``, once it has ended or after so many seconds."""
        return self._get(Event, f"/events/{quote(event_id, safe='')}", wait=wait)

    def instances(self) -> Instances:
        """Return all registered instances."""
        return self._get(Instances, "/instances")

    def instance(self, name: str) -> Instance:
        """Return one instance, with its history."""
        return self._get(Instance, f"/instances/{quote(name, safe='')}")

    def stream(self) -> Iterator[Event]:
        """Yield events as they change, until the stream ends. Raises: ControllerError: also at its end."""
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
        until = time.monotonic() + TIMEOUT_SECONDS
        with self._explained():
            while True:
                try:
                    response = self._http.request(method, path, json=body, params=query)
                    break
                except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
                    is_cut_off_get = method == "GET" and not isinstance(error, httpx.ConnectError)
                    if not (is_cut_off_get or _is_refused(error)) or time.monotonic() + pause > until:
                        raise
                time.sleep(pause)
                pause = min(pause * 2, LAST_PAUSE_SECONDS)
        if not response.is_success:
            raise self._refusal(response)
        return response.content

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Translate transport errors into ``ControllerError`` with a remedy."""
        try:
            yield
        except httpx.ConnectError as error:
            raise ControllerError(
                f"no controller answers at {self._url} ({error}): start one with `kvtier controller`, or set "
                "another --url or controller.url"
            ) from error
        except httpx.TimeoutException as error:
            raise ControllerError(
                f"the controller at {self._url} did not respond in time: check --url or controller.url, and "
                "whether it is overloaded"
            ) from error
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise ControllerError(
                f"the controller at {self._url} disconnected before it responded ({error}): the operation "
                "may have started; `kvtier events` shows it"
            ) from error

    def _refusal(self, response: httpx.Response) -> ControllerError:
        if response.status_code == httpx.codes.UNAUTHORIZED:
            has_token = "Authorization" in self._http.headers
            reason = "rejects this token" if has_token else "requires a token"
            return ControllerError(
                f"the controller at {self._url} {reason}: set --token-file to the file of its token, or set "
                "controller.token"
            )
        try:
            refusal = msgspec.json.decode(response.content, type=Refusal)
        except msgspec.DecodeError:
            return ControllerError(
                f"the server at {self._url} responded {response.status_code} {response.reason_phrase} and is "
                "not a controller: set --url or controller.url"
            )
        return ControllerError(_sentence(refusal))

    def _decoded(self, kind: type[AnswerT], content: bytes) -> AnswerT:
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.DecodeError as error:
            raise ControllerError(
                f"the server at {self._url} is not a controller that kvtier {kvtier.__version__} understands "
                f"({error}): set --url or controller.url, or install the controller's version"
            ) from error


def _at(place: Place) -> dict[str, str]:
    instance, tier = place
    return {"instance": instance, "tier": tier}


def _is_refused(error: httpx.TransportError) -> bool:
    """Return whether the connection was refused: then the request was not sent."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _sentence(refusal: Refusal) -> str:
    detail: Any = refusal.detail
    if isinstance(detail, list):  # A validation error of FastAPI.
        parts = [part for part in detail if isinstance(part, dict)]
        detail = "; ".join(f"{'.'.join(map(str, part.get('loc', ())))}: {part.get('msg')}" for part in parts)
    # Usually the detail already names them.
    named = not refusal.known or any(name in str(detail) for name in refusal.known)
    return str(detail) if named else f"{detail} (known: {', '.join(refusal.known)})"

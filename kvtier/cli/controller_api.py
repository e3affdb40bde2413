"""Client of the controller's HTTP API. Calls block until the response has arrived.

Errors are raised as ``ControllerError``. To bridge a restart of the controller, refused connections are
retried for ``TIMEOUT_SECONDS``, at the next one if there are several, and so are GET requests whose response
was cut off. Other requests are not retried once sent, as they may have taken effect.
"""

from __future__ import annotations

import ssl
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ValidationError

from kvtier.errors import ControllerError
from kvtier.fleet.controller.answers import (
    Accepted,
    EventsAnswer,
    FindingsAnswer,
    InstancesAnswer,
    InstanceWithHistory,
    LookupAnswer,
    PinsAnswer,
    WhyAnswer,
    WhyPromptAnswer,
)
from kvtier.fleet.controller.events import Event
from kvtier.logs import causes_of
from kvtier.version import __version__

TIMEOUT_SECONDS = 3.0
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.05, 0.5
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 60.0
"""Timeout of a response: an instance may have to tokenize a long prompt first."""
STREAM_SECONDS = 30.0
"""Idle timeout of the stream, which sends a list of instances every 10 s."""

AnswerT = TypeVar("AnswerT", bound=BaseModel)


class ControllerAPI:
    """The HTTP API of the controllers at ``urls``, any of which answers, authenticated with ``token``."""

    def __init__(self, urls: Sequence[str], token: str | None = None) -> None:
        self._urls = deque(urls)
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {token}"} if token is not None else {},
            timeout=httpx.Timeout(ANSWER_SECONDS, connect=CONNECT_SECONDS),
            # The system's certificates, and SSL_CERT_FILE, which take 30 ms to load. Ignore HTTP proxies from
            # the environment.
            verify=not all(url.startswith("http:") for url in urls) and ssl.create_default_context(),
            trust_env=False,
        )

    @property
    def _url(self) -> str:
        return self._urls[0]

    def __enter__(self) -> ControllerAPI:
        return self

    def __exit__(self, *_error: object) -> None:
        self._http.close()

    def lookup(self, prompt: Mapping[str, object]) -> LookupAnswer:
        """Return which tiers hold how much of a prompt's prefix."""
        return self._answer(LookupAnswer, "POST", "/lookup", prompt)

    def why(self, request: str, last: int) -> WhyAnswer:
        """Return what became of the last requests of all instances."""
        return self._answer(WhyAnswer, "GET", "/why", {"request": request, "last": last})

    def why_prompt(self, prompt: Mapping[str, object]) -> WhyPromptAnswer:
        """Return what each instance holds of a prompt, and why the rest is not held."""
        return self._answer(WhyPromptAnswer, "POST", "/why", prompt)

    def operate(self, operation: str, fields: Mapping[str, object]) -> Accepted:
        """Request an operation, such as ``move``. Fields that are ``None`` are omitted."""
        return self._answer(Accepted, "POST", f"/{operation}", fields)

    def events(self, limit: int) -> EventsAnswer:
        """Return the latest events, newest first."""
        return self._answer(EventsAnswer, "GET", "/events", {"limit": limit})

    def event(self, event_id: str, *, wait: float | None = None) -> Event:
        """Return an event. With ``wait``, once it has ended, or after ``wait`` seconds."""
        return self._answer(Event, "GET", f"/events/{quote(event_id, safe='')}", {"wait": wait})

    def pins(self, instance: str | None, limit: int) -> PinsAnswer:
        """Return the pins of an instance, or of all, newest first."""
        return self._answer(PinsAnswer, "GET", "/pins", {"instance": instance, "limit": limit})

    def instances(self) -> InstancesAnswer:
        """Return all registered instances."""
        return self._answer(InstancesAnswer, "GET", "/instances")

    def instance(self, name: str) -> InstanceWithHistory:
        """Return one instance, with its history."""
        return self._answer(InstanceWithHistory, "GET", f"/instances/{quote(name, safe='')}")

    def findings(self) -> FindingsAnswer:
        """Return what keeps instances from sharing chunks."""
        return self._answer(FindingsAnswer, "GET", "/findings")

    def stream(self) -> Iterator[Event]:
        """Yield events as they change, until the stream ends. Raises: ControllerError: also at its end."""
        timeout = httpx.Timeout(STREAM_SECONDS, connect=CONNECT_SECONDS)
        with self._explained(), self._http.stream("GET", f"{self._url}/stream", timeout=timeout) as response:
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

    def _answer(
        self, kind: type[AnswerT], method: str, path: str, fields: Mapping[str, object] | None = None
    ) -> AnswerT:
        """Send ``fields`` as JSON or, with GET, as a query."""
        given: Any = {name: value for name, value in (fields or {}).items() if value is not None}
        data: Any = {"params": given} if method == "GET" else {"json": given}
        pause = FIRST_PAUSE_SECONDS
        until = time.monotonic() + TIMEOUT_SECONDS
        with self._explained():
            while True:
                try:
                    response = self._http.request(method, self._url + path, **data)
                    break
                except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
                    is_cut_off_get = method == "GET" and not isinstance(error, httpx.ConnectError)
                    if not (is_cut_off_get or _is_refused(error)) or time.monotonic() + pause > until:
                        raise
                    self._urls.rotate(-1)
                time.sleep(pause)
                pause = min(pause * 2, LAST_PAUSE_SECONDS)
        if not response.is_success:
            raise self._refusal(response)
        return self._decoded(kind, response.content)

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
            refusal = response.json()
            return ControllerError(_sentence(refusal["detail"], refusal.get("known", ())))
        except (ValueError, LookupError, TypeError):
            return ControllerError(
                f"the server at {self._url} responded {response.status_code} {response.reason_phrase} and is "
                "not a controller: set --url or controller.url"
            )

    def _decoded(self, kind: type[AnswerT], content: bytes) -> AnswerT:
        try:
            return kind.model_validate_json(content)
        except ValidationError as error:
            raise ControllerError(
                f"the server at {self._url} is not a controller that kvtier {__version__} understands "
                f"({_issue(error.errors()[0])}): set --url or controller.url, or install the controller's "
                "version"
            ) from error


def _is_refused(error: httpx.TransportError) -> bool:
    """Return whether the connection was refused: then the request was not sent."""
    # httpx and httpcore have each wrapped it.
    return any(isinstance(cause, ConnectionRefusedError) for cause in causes_of(error))


def _sentence(detail: Any, known: Sequence[str]) -> str:  # noqa: ANN401 - JSON
    if isinstance(detail, list):  # A validation error of FastAPI.
        detail = "; ".join(_issue(part) for part in detail if isinstance(part, dict))
    # Usually the detail already names them.
    named = not known or any(name in str(detail) for name in known)
    return str(detail) if named else f"{detail} (known: {', '.join(known)})"


def _issue(error: Any) -> str:  # noqa: ANN401 - an error of Pydantic, which has more fields
    return f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg')}".removeprefix(": ")

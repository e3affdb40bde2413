"""Requests of LMCache's controller: other names for fields, and its own endpoints."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends
from msgspec import Meta
from pydantic import Field

from kvtier.fleet.controller.answers import LookupAnswer
from kvtier.fleet.controller.bodies import Bodies, BodyT, Decoder, Name, PromptBody, request_body_schema
from kvtier.fleet.controller.errors import UnknownName, WrongRequest
from kvtier.fleet.controller.operations import Operations
from kvtier.fleet.controller.registry import BACKENDS, PING_SECONDS, Registry
from kvtier.fleet.member.protocol import Hello
from kvtier.settings.peer import split_address

FIELDS = {"instance_id": "instance", "location": "tier", "should_copy": "copy"}
TAG = "LMCache"
WORKER, UNRESPONSIVE = 0, -1001
"""The id of the cache process, which serves all ranks, and the error code if it does not answer."""
CODECS = (
    "chunks are compressed as they are written to a tier below the first: set `codec` of that tier in the "
    "settings of instance {!r}"
)


class Layout(LookupAnswer):
    """The answer to a lookup, for clients of either controller."""

    event_id: str = Field(default="", description="For clients of LMCache. A lookup is no event.")
    layout_info: dict[str, tuple[str, int]] = Field(
        description="For clients of LMCache: the tier of each instance that holds most, and how many tokens."
    )


class EventBody(PromptBody, frozen=True, kw_only=True):
    """Ask for the state of an event."""

    event_id: Annotated[Name, Meta(description="What a response has named.")]
    _prompt_optional = True


class AddressBody(PromptBody, frozen=True, kw_only=True):
    """Ask which instance has an address."""

    ip: Annotated[Name, Meta(description="The host in the address for peers, or its name.")]
    event_id: Annotated[str, Meta(description="Is in the response.")] = ""
    _prompt_optional = True


class InstanceBody(PromptBody, frozen=True, kw_only=True):
    """Ask for the state of an instance."""

    instance_id: Annotated[Name, Meta(description="The instance's `controller.instance_id`.")]
    worker_ids: Annotated[list[int] | None, Meta(description="Default: all. There is only 0.")] = None
    _prompt_optional = True


class CodecBody(InstanceBody, frozen=True, kw_only=True):
    """Ask for the compression of chunks."""

    location: Annotated[str, Meta(description="Without effect.")] = ""
    method: Annotated[str, Meta(description="Without effect.")] = ""


def decoder(kind: type[BodyT]) -> Decoder[BodyT]:
    """Return what decodes a body, also one with the names that LMCache has for the fields."""
    own = msgspec.json.Decoder(kind).decode

    def decode(content: bytes | bytearray) -> BodyT:
        try:
            return own(content)
        except msgspec.ValidationError:
            fields = msgspec.json.decode(content)
            if not isinstance(fields, dict) or fields.keys().isdisjoint(FIELDS):
                raise
            return msgspec.convert({FIELDS.get(name, name): value for name, value in fields.items()}, kind)

    return decode


def layout_of(registry: Registry, found: LookupAnswer) -> Layout:
    """Return the answer to a lookup with what clients of LMCache read."""
    layout = {}
    for instance, tokens in found.instances.items():
        tier, count = max(tokens.items(), key=lambda item: item[1])
        kind = next(held.type for held in registry.find(instance).hello.tiers if held.name == tier)
        layout[instance] = (BACKENDS.get(kind, tier), count)
    return Layout(**found.model_dump(), layout_info=layout)


def add_routes(router: APIRouter, operations: Operations, bodies: Bodies) -> None:
    """Add the endpoints that only LMCache's controller has."""
    registry = operations.registry
    event_body, address_body = Depends(bodies.of(EventBody)), Depends(bodies.of(AddressBody))
    instance_body, codec_body = Depends(bodies.of(InstanceBody)), Depends(bodies.of(CodecBody))

    @router.post("/check_finish", tags=[TAG], openapi_extra=request_body_schema(EventBody))
    async def check_finish(body: EventBody = event_body) -> dict[str, str]:
        """Return the state of an event, as `GET /events/{event_id}` does."""
        event = operations.events.find(body.event_id)
        await operations.events.wait(event, 0)
        return {"status": event.state}

    @router.post("/health", tags=[TAG], openapi_extra=request_body_schema(InstanceBody))
    async def health(body: InstanceBody = instance_body) -> dict[str, Any]:
        """Check that an instance answers: the error code of its only worker is 0 then."""
        answers = await registry.find(body.instance_id).responds(PING_SECONDS)
        return {"event_id": "", "error_codes": {WORKER: 0 if answers else UNRESPONSIVE}}

    @router.post("/query_instance", tags=[TAG], openapi_extra=request_body_schema(AddressBody))
    async def query_instance(body: AddressBody = address_body) -> dict[str, str]:
        """Return the instance with an address, the first of several."""
        hellos = [member.hello for member in reversed([*registry.members.values()])]
        hosts = {host: hello.instance for hello in hellos for host in (hello.host, _address(hello)[0])}
        if body.ip not in hosts:
            raise UnknownName(f"instance at {body.ip!r}", hosts)
        return {"event_id": body.event_id, "res": hosts[body.ip]}

    @router.post("/query_worker_info", tags=[TAG], openapi_extra=request_body_schema(InstanceBody))
    async def query_worker_info(body: InstanceBody = instance_body) -> dict[str, Any]:
        """Return the address of an instance, and when it was last heard of: it has one worker."""
        member = registry.find(body.instance_id)
        host, port = _address(member.hello)
        worker = {
            "instance_id": member.id,
            "worker_id": WORKER,
            "ip": host,
            "port": port,
            "peer_init_url": member.hello.peer,
            "registration_time": member.registered_at,
            "last_heartbeat_time": member.last_message_at,
        }
        return {"event_id": "", "worker_infos": [worker] if WORKER in (body.worker_ids or [WORKER]) else []}

    @router.post("/compress", tags=[TAG], openapi_extra=request_body_schema(CodecBody))
    @router.post("/decompress", tags=[TAG], openapi_extra=request_body_schema(CodecBody))
    async def compress(body: CodecBody = codec_body) -> None:
        """Respond that the codec of a tier does this: its setting `codec`."""
        raise WrongRequest(CODECS.format(registry.find(body.instance_id).id))


def _address(hello: Hello) -> tuple[str, int]:
    """Return the host and port at which peers reach an instance; its host name and 0 if they cannot."""
    return (hello.host, 0) if hello.peer is None else split_address(hello.peer)

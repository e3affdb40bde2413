"""Why tokens were not hits, asked of all instances."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from functools import partial
from heapq import nlargest
from typing import Any

import anyio
from msgspec import to_builtins

from kvtier.errors import ControllerError
from kvtier.fleet.controller.answers import WhyAnswer, WhyPromptAnswer
from kvtier.fleet.controller.bodies import PromptBody
from kvtier.fleet.controller.errors import WrongRequest
from kvtier.fleet.controller.member import Member
from kvtier.fleet.controller.prompts import Prompts
from kvtier.fleet.controller.registry import Registry
from kvtier.fleet.member.protocol import Command, Done, Explain, ExplainPrompt
from kvtier.observability.breakers import Breaker, merged
from kvtier.observability.requests import readable

ANSWER_SECONDS = 30.0
"""Timeout of all instances together, which may load a tokenizer or ask pools first."""
CONCURRENT = 16
"""Instances that are asked at the same time, by all clients together: a message has up to 4 MiB."""
MAX_TOKENS = 1_000_000
"""Of a prompt, which is sent to an instance in one message."""
MAX_BREAKERS = 20
OLD = "its version of kvtier does not report this"


class Explanations:
    """Asks the instances. Nothing of a prompt is kept here."""

    def __init__(self, registry: Registry, prompts: Prompts) -> None:
        self._registry = registry
        self._prompts = prompts
        self._limiter = anyio.CapacityLimiter(CONCURRENT)

    async def requests(self, request: str, last: int, instance: str | None = None) -> WhyAnswer:
        """Return what became of the ``last`` requests whose id contains ``request``, and where prompts part.

        Of all instances, or of one. Raises: UnknownName.
        """
        members = self._registry.members.values() if instance is None else [self._registry.find(instance)]
        found: list[dict[str, Any]] = []
        breakers: list[Breaker] = []

        def take(member: Member, done: Done) -> None:
            if done.report is not None:
                new = [{"instance": member.id, **readable(each)} for each in done.report.requests[:last]]
                found[:] = nlargest(last, [*found, *new], key=lambda each: each["at"])
                breakers[:] = merged([*breakers, *done.report.breakers], MAX_BREAKERS)

        unanswered = await self._ask(members, partial(Explain, request=request, last=last), take)
        return WhyAnswer(requests=found, breakers=to_builtins(breakers), unanswered=unanswered)

    async def prompt(self, body: PromptBody) -> WhyPromptAnswer:
        """Return what each instance that serves a prompt's model holds of it, and why not the rest.

        Raises: as :meth:`Prompts.find`.
        """
        models, tokens = await self._prompts.tokens(body)
        if len(tokens) > MAX_TOKENS:
            raise WrongRequest(f"the prompt has {len(tokens):,} tokens, more than {MAX_TOKENS:,}")
        name = body.model or models[0].names[0]
        connected = self._registry.members.values()
        members = [each for each in connected if any(name in model.names for model in each.models)]
        joined = array("I", tokens).tobytes()
        command = partial(ExplainPrompt, model=name, tokens=joined, salt=body.salt or "")
        found: list[dict[str, Any]] = []

        def take(member: Member, done: Done) -> None:
            found.extend({"instance": member.id, **readable(each)} for each in done.prompts)

        unanswered = await self._ask(members, command, take)
        found.sort(key=lambda each: (-sum(held for _, held in each["hits"]), each["instance"]))
        return WhyPromptAnswer(prompts=found, unanswered=unanswered)

    async def _ask(
        self,
        members: Iterable[Member],
        command: Callable[[int], Command],
        take: Callable[[Member, Done], None],
    ) -> dict[str, str]:
        """Send a command to instances, and take their answers. Return why others have not answered."""
        members = list(members)
        late = f"no answer within {ANSWER_SECONDS:g} s"
        unanswered = {member.id: late if member.explains else OLD for member in members}

        async def ask(member: Member) -> None:
            try:
                async with self._limiter:
                    take(member, await member.execute(command))
                del unanswered[member.id]
            except ControllerError as error:
                unanswered[member.id] = str(error)

        with anyio.move_on_after(ANSWER_SECONDS):
            async with anyio.create_task_group() as tasks:
                for member in members:
                    if member.explains:
                        tasks.start_soon(ask, member)
        return unanswered

"""The body of an answer that is handed over unread: until its first piece has come its attempt can fail.

A caller that has seen nothing of a body cannot tell one attempt's from another's. So where the first piece
does not come, the retry plan goes on, and what another attempt brings takes the place of what broke, if its
head says the same of the body. Otherwise, and from the first piece on, what breaks is the caller's: nothing
comes to him twice. The head is never held back for this, since an event stream may be silent for long.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from functools import cache
from inspect import iscoroutinefunction
from types import ModuleType
from typing import Any, TypeAlias

from taptwice.client.exchange import conclude
from taptwice.client.limits import Limit
from taptwice.client.outcome import Seen, of_error
from taptwice.client.plan import StopReason
from taptwice.client.shell import Going

__all__ = ["Once", "concluded"]

Once: TypeAlias = Callable[[Limit], Any]
"""Makes an attempt, blocking or awaiting; gives a `Seen`."""

SAME = ("etag", "last-modified", "content-type", "content-encoding", "content-length", "content-range")
"""What a caller has been told of a body; all of it must hold for another attempt's body too."""


def concluded(going: Going, lib: ModuleType, seen: Seen, request: Any, once: Once, *, typed: bool) -> Any:
    """As `conclude`; a response whose body is unread gets a stream that can go on to another attempt.

    `once` makes one.
    """
    response = conclude(going, lib, seen, request, typed=typed)
    if seen.open:
        awaiting = iscoroutinefunction(once)
        ours, theirs = (Awaiting, lib.AsyncByteStream) if awaiting else (Blocking, lib.SyncByteStream)
        response.stream = _kin(ours, theirs)(going, lib, seen, request, once)
    return response


class _Unread:
    def __init__(self, going: Going, lib: ModuleType, seen: Seen, request: Any, once: Once) -> None:
        self._going = going
        self._lib = lib
        self._request = request
        self._once = once
        self._response = seen.answer
        self._body = seen.answer.stream
        self._errors = lib.HTTPError, OSError
        self._standing: Seen | None = seen
        """What may still fail."""

    @property
    def elapsed(self) -> Any:
        """What httpx2 asks its own streams for."""
        return getattr(self._body, "elapsed", None)

    def _stands(self) -> None:
        """Nothing can change any more."""
        if self._standing is not None:
            self._going.stands(self._standing)
            self._standing = None

    def _broken(self, error: Exception) -> Seen:
        self._standing = None
        return self._going.broken(of_error(error, head=True))

    def _is_other(self, seen: Seen) -> bool:
        """Whether another attempt's answer cannot take the place of what the caller has in his hands."""
        if seen.error is not None:
            return False
        ours, others = self._response, seen.answer
        if not seen.open or others.status_code != ours.status_code:
            return True  # a refusal, or read already: by an event hook of the client's
        return any(others.headers.get(name) != ours.headers.get(name) for name in SAME)

    def _other(self, seen: Seen, error: Exception) -> Seen:
        """The answer is given up, and what broke the first one comes up."""
        if seen.open:
            self._going.settle(seen)
        if self._going.call.stop in (None, StopReason.ANSWERED):
            self._going.call.stop = StopReason.ANSWER_CHANGED
        return seen._replace(answer=None, error=error, open=False)

    def _go_on(self, seen: Seen) -> None:
        """Read from what this attempt has brought. Raises if it has brought nothing."""
        response = conclude(self._going, self._lib, seen, self._request, typed=False)
        self._response.extensions.update(response.extensions)
        self._body, self._standing = response.stream, seen


class Blocking(_Unread):
    """A body for a blocking client."""

    def __iter__(self) -> Iterator[bytes]:
        first, others = self._begun()
        self._stands()
        if first is not None:
            yield first
            yield from others

    def _begun(self) -> tuple[bytes | None, Iterator[bytes]]:
        while True:
            pieces = iter(self._body)
            try:
                return next(pieces, None), pieces
            except self._errors as error:
                self._body.close()
                seen = self._going.run(self._once, self._broken(error))
                if self._is_other(seen):
                    seen.answer.close()
                    seen = self._other(seen, error)
                self._go_on(seen)

    def close(self) -> None:
        """Give the connection back."""
        self._stands()
        self._body.close()


class Awaiting(_Unread):
    """A body for an awaiting client."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        first, others = await self._begun()
        self._stands()
        if first is not None:
            yield first
            async for piece in others:
                yield piece

    async def _begun(self) -> tuple[bytes | None, AsyncIterator[bytes]]:
        while True:
            pieces = aiter(self._body)
            try:
                return await anext(pieces, None), pieces
            except self._errors as error:
                await self._body.aclose()
                seen = await self._going.arun(self._once, self._broken(error))
                if self._is_other(seen):
                    await seen.answer.aclose()
                    seen = self._other(seen, error)
                self._go_on(seen)

    async def aclose(self) -> None:
        """Give the connection back."""
        self._stands()
        await self._body.aclose()


@cache
def _kin(ours: type[_Unread], theirs: type[Any]) -> type[Any]:
    """A class that the library takes for a stream of its own."""
    return type(ours.__name__, (ours, theirs), {})

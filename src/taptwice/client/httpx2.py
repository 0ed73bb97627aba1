"""Transports that retry, beneath a client of httpx2 that one has already.

    httpx2.Client(transport=RetryTransport(policy))

They raise exceptions of httpx2 only. `taptwice.client.transports` says what a transport cannot know.
"""

from __future__ import annotations

from taptwice.client.exchange import library
from taptwice.client.transports import AwaitingTransport, BlockingTransport

httpx2 = library("httpx2", "client")

__all__ = ["AsyncRetryTransport", "RetryTransport"]


class RetryTransport(BlockingTransport, httpx2.BaseTransport):  # type: ignore[misc,name-defined]
    """Retries beneath `httpx2.Client`."""

    _lib = httpx2


class AsyncRetryTransport(AwaitingTransport, httpx2.AsyncBaseTransport):  # type: ignore[misc,name-defined]
    """Retries beneath `httpx2.AsyncClient`."""

    _lib = httpx2

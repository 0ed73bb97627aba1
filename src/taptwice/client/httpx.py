"""Transports that retry, beneath a client of httpx that one has already.

    httpx.Client(transport=RetryTransport(policy))

They raise exceptions of httpx only. `taptwice.client.transports` says what a transport cannot know.
"""

from __future__ import annotations

from taptwice.client.exchange import library
from taptwice.client.transports import AwaitingTransport, BlockingTransport

httpx = library("httpx", "httpx")

__all__ = ["AsyncRetryTransport", "RetryTransport"]


class RetryTransport(BlockingTransport, httpx.BaseTransport):  # type: ignore[misc,name-defined]
    """Retries beneath `httpx.Client`."""

    _lib = httpx


class AsyncRetryTransport(AwaitingTransport, httpx.AsyncBaseTransport):  # type: ignore[misc,name-defined]
    """Retries beneath `httpx.AsyncClient`."""

    _lib = httpx

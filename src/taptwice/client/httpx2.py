"""Transports that retry, beneath a client of httpx2 that one has already.

    httpx2.Client(transport=RetryTransport(policy))

They raise exceptions of httpx2 only. `taptwice.client.transports` says what a transport cannot know.
"""

from __future__ import annotations

from taptwice.client.errors import missing
from taptwice.client.transports import AwaitingTransport, BlockingTransport

try:
    import httpx2
except ModuleNotFoundError:
    raise missing("httpx2", "client") from None

__all__ = ["AsyncRetryTransport", "RetryTransport"]


class RetryTransport(BlockingTransport, httpx2.BaseTransport):
    """Retries beneath `httpx2.Client`."""

    _lib = httpx2


class AsyncRetryTransport(AwaitingTransport, httpx2.AsyncBaseTransport):
    """Retries beneath `httpx2.AsyncClient`."""

    _lib = httpx2

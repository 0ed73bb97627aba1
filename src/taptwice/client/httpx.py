"""Transports that retry, beneath a client of httpx that one has already.

    httpx.Client(transport=RetryTransport(policy))

They raise exceptions of httpx only. `taptwice.client.transports` says what a transport cannot know.
"""

from __future__ import annotations

from taptwice.client.errors import missing
from taptwice.client.transports import AwaitingTransport, BlockingTransport

try:
    import httpx
except ModuleNotFoundError:
    raise missing("httpx", "httpx") from None

__all__ = ["AsyncRetryTransport", "RetryTransport"]


class RetryTransport(BlockingTransport, httpx.BaseTransport):
    """Retries beneath `httpx.Client`."""

    _lib = httpx


class AsyncRetryTransport(AwaitingTransport, httpx.AsyncBaseTransport):
    """Retries beneath `httpx.AsyncClient`."""

    _lib = httpx

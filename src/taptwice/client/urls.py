"""The URL of each call, merged with the client's base.

httpx2 and httpx parse both anew each time, which is a sixth of all they do for a small call; and most calls
of a program go to a few places.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Urls"]

_MOST = 64


class Urls:
    """The last URLs that a client was asked for, merged with its base. Threads may share it."""

    __slots__ = ("_http", "_merged")

    def __init__(self, http: Any) -> None:
        self._http = http
        self._merged: dict[str, tuple[Any, Any]] = {}

    def merged(self, url: Any) -> Any:
        """What `http` would make of `url`; its own merging leaves that as it is."""
        if not isinstance(url, str):
            return url
        base, known = self._http.base_url, self._merged.get(url)
        if known is not None and known[0] is base:  # which can be set anew
            return known[1]
        made = self._http._merge_url(url)
        if len(self._merged) >= _MOST:
            self._merged.clear()
        self._merged[url] = base, made
        return made

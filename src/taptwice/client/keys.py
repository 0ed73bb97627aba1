"""Idempotency keys: one for each intent.

An intent is what the user wanted once: "pay for checkout 4711". Its key is made from its name, so it is the
same on every attempt, after every restart and on every machine, and nothing has to be stored for that. Two
intents with the same content have two names: the second coffee is not the first one sent again.
"""

from __future__ import annotations

import uuid
from typing import Final

from taptwice.errors import Misuse

__all__ = ["check_namespace", "key_of", "new_key"]

_INTENTS: Final = uuid.UUID("8f6c2d1e-5d0b-5c59-9d3e-0b7a1f5c7a11")


def new_key() -> str:
    """A key for a call that has no named intent: random (UUID version 4)."""
    return str(uuid.uuid4())


def check_namespace(namespace: object) -> None:
    """Raises `Misuse` for what no key can be made from."""
    if namespace is not None and (not isinstance(namespace, str) or not namespace):
        raise Misuse(
            f"namespace={namespace!r}: name the application and its environment, as 'shop-prod'; None: none"
        )


def key_of(namespace: str | None, intent: str) -> str:
    """The key of a named intent (UUID version 5), the same wherever it is asked for.

    `namespace` keeps two applications apart that use one account and name their intents alike; it says which
    application and which environment, "shop-prod" for instance.
    """
    if not namespace:
        raise Misuse(
            f"intent={intent!r} needs a namespace to make its key from: Client(namespace='shop-prod'), "
            "naming the application and its environment"
        )
    if not intent:
        raise Misuse("intent must not be empty: all calls would share one key")
    return str(uuid.uuid5(_INTENTS, f"{len(namespace)}:{namespace}{intent}"))

"""The wire suite: cases that prove an idempotent server over its sockets, ours first, whoever wrote it."""

"""How it is printed: while it happens, a line for each thing seen, in colour on a terminal only."""

from __future__ import annotations

import json
import os
import sys

from taptwice.demo.play import Line, Play, Show
from taptwice.demo.stage import Event, Reply

BOLD, DIM, RED, GREEN, YELLOW = "1", "2", "31", "32", "33"


def coloured() -> bool:
    """https://no-color.org, and terminals that cannot."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Printed(Show):
    """On stdout."""

    def __init__(self) -> None:
        self._colours = coloured()

    def paint(self, text: str, *codes: str) -> str:
        return f"\x1b[{';'.join(codes)}m{text}\x1b[0m" if self._colours and codes else text

    def say(self, text: str = "") -> None:
        print(text, flush=True)

    def seen(self, who: str, text: str) -> str:
        return f"    {self.paint(f'{who:<8}', DIM)} {text}"

    def scene(self, title: str) -> None:
        self.say(f"\n{self.paint(title, BOLD)}")

    def begins(self, play: Play) -> None:
        self.say(f"\n  {self.paint(play.title, BOLD)}")

    def line(self, line: Line) -> None:
        text = f"{line.text:<26} {self.reply(line.reply)}" if line.reply else line.text
        self.say(self.seen(line.who, text))

    def reply(self, reply: Reply) -> str:
        colour = GREEN if reply.status < 300 else YELLOW
        marker = self.paint("  Idempotent-Replayed: true", DIM) if reply.replayed else ""
        return f"{self.paint(str(reply.status), colour)} {_brief(reply)}{marker}"

    def ends(self, play: Play) -> None:
        rows = ", ".join(f"#{number} {amount}" for number, amount in play.table)
        self.say(self.seen("table", rows or "empty"))
        colour = GREEN if len(play.table) == play.meant else RED
        if play.meant == 1:
            self.say(f"    {self.paint(f'charged {_times(len(play.table))}', BOLD, colour)}")
            return
        statuses = [line.reply.status for line in play.lines if line.reply]
        counted = ", ".join(f"{statuses.count(each)} × {each}" for each in sorted(set(statuses)))
        total = self.paint(f"charges in the table: {len(play.table)}", BOLD, colour)
        self.say(f"    {total}   (answers: {counted})")

    def event(self, event: Event) -> None:
        """What the server tells while it is left up; not what it still has to tell of the play."""
        if event["event"] == "answered" and not event["tap"]:
            key = f", key {event['key']}" if event["key"] else ""
            reply = Reply(event["status"], event["body"], event["replayed"])
            self.say(self.seen("server", f"{event['request']}{key}: {self.reply(reply)}"))


def _times(number: int) -> str:
    return {0: "not at all", 1: "once", 2: "TWICE"}.get(number, f"{number} TIMES")


def _brief(reply: Reply) -> str:
    """The body; of a problem document the words for people only."""
    if reply.status < 400:
        return reply.body
    try:
        document = json.loads(reply.body)
        return f"{document['type'].rpartition('/')[2]}: {document['title']}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return reply.body

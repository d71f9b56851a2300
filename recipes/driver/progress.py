"""Show the log of a training as short lines: updates, perplexity, tokens a second, remaining time."""

import collections
import re
import sys
import time

from log import read_entry

TOTAL = re.compile(r"\bmax_update(?:': |=)(\d+)")


class Progress:
    """The progress of a training of that name. On a terminal one line changes, elsewhere a line comes every 10 s."""

    def __init__(self, label: str, terminal: bool | None = None) -> None:
        self.label = label
        self.terminal = sys.stdout.isatty() if terminal is None else terminal
        self.start = "\r\x1b[K" if self.terminal else ""
        self.last_words: collections.deque[str] = collections.deque(maxlen=15)
        self.total, self.done, self.shown = 0, False, 0.0

    def read(self, line: str) -> None:
        """Take the next line of the log."""
        if found := TOTAL.search(line):
            self.total = int(found[1])
        self.done = self.done or "| done training" in line
        try:
            entry = read_entry(line)
        except ValueError:
            entry = {}
        if "valid_num_updates" in entry:
            self.show_validation(entry)
        elif "num_updates" in entry and "ups" in entry:
            self.show_update(entry)
        elif not entry:
            self.last_words.append(line)

    def show_validation(self, entry: dict[str, float]) -> None:
        update = int(entry["valid_num_updates"])
        bleu = f"   BLEU {entry['valid_bleu']:5.2f}" if "valid_bleu" in entry else ""
        print(f"{self.start}{self.label:8} update {update:5,}   validation {said(entry, 'valid_')}{bleu}", flush=True)

    def show_update(self, entry: dict[str, float]) -> None:
        if time.time() - self.shown < (0 if self.terminal else 10):
            return
        self.shown = time.time()
        update, rate = int(entry["num_updates"]), entry["ups"]
        line = f"{self.start}{self.label:8} update {update:5,}"
        line += f" of {self.total:,} ({update / self.total:4.0%})" if self.total else ""
        line += f"   {said(entry)}   {entry.get('wps', 0):8,.0f} tokens/s"
        if self.total and rate:
            seconds = int((self.total - update) / rate)
            line += f"   {seconds // 60}m {seconds % 60:02d}s left"
        print(line, end="" if self.terminal else "\n", flush=True)

    def end(self) -> None:
        """Show the last lines of a training that stopped early."""
        if not self.done:
            words = "".join(self.last_words)
            print(f"{self.start}{words}{self.label}: the training stopped early; its last lines are above.", flush=True)


def said(entry: dict[str, float], prefix: str = "") -> str:
    """Return the perplexity, or the loss if a criterion has none."""
    if (ppl := entry.get(f"{prefix}ppl")) is None and f"{prefix}loss" in entry:
        return f"loss {entry[f'{prefix}loss']:8.4f}"
    return f"ppl {float('nan') if ppl is None else ppl:8.1f}"

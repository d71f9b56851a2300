"""Show the JSON log of `fairseq-train --log-format json` on standard input as short lines; LABEL names the run.

    fairseq-train ... 2>&1 | tee -a train.log | python recipes/lm_progress.py delta

On a terminal the line moves on in place; in a file there is a line every 10 seconds. If the training ends before it
is done, its last words are shown.
"""

import collections
import contextlib
import json
import re
import sys
import time


def span(seconds: float) -> str:
    return f"{int(seconds) // 60}m {int(seconds) % 60:02d}s"


def show(label: str, terminal: bool) -> bool:
    """Print what is worth seeing; whether the training came to its end."""
    last_words: collections.deque[str] = collections.deque(maxlen=15)
    total, done, shown = 0, False, 0.0
    start = "\r\x1b[K" if terminal else ""
    for line in sys.stdin:
        if line.startswith("+ "):
            print(line, end="", flush=True)
            continue
        if found := re.search(r"\bmax_update(?:': |=)(\d+)", line):
            total = int(found[1])
        done = done or "| done training" in line
        entry = {}
        if line.rstrip().endswith("}") and "| {" in line:
            with contextlib.suppress(ValueError):
                entry = json.loads(line[line.index("| {") + 2 :])
        if not entry:
            last_words.append(line)
        if "valid_ppl" in entry:
            update, ppl = int(entry["valid_num_updates"]), float(entry["valid_ppl"])
            bleu = f"   BLEU {float(entry['valid_bleu']):5.2f}" if "valid_bleu" in entry else ""
            print(f"{start}{label:8} update {update:5,}   validation ppl {ppl:8.1f}{bleu}", flush=True)
        elif "num_updates" in entry and time.time() - shown > (0 if terminal else 10):
            update, rate = int(entry["num_updates"]), float(entry["ups"])
            progress = f"{start}{label:8} update {update:5,}"
            if total:
                progress += f" of {total:,} ({update / total:4.0%})"
            progress += f"   ppl {float(entry['ppl']):8.1f}   {float(entry['wps']):8,.0f} tokens/s"
            if total and rate:
                progress += f"   {span((total - update) / rate)} left"
            print(progress, end="" if terminal else "\n", flush=True)
            shown = time.time()
    if not done:
        print(f"{start}{''.join(last_words)}{label}: the training stopped early; its last words are above.", flush=True)
    return done


if __name__ == "__main__":
    try:
        sys.exit(not show(sys.argv[1], sys.stdout.isatty()))
    except KeyboardInterrupt:
        sys.exit(130)

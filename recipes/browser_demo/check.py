"""Open the page of a folder in a headless Chromium; its greedy tokens must be those of recipes/onnx/generate.py.

python check.py FOLDER [--screenshot FILE]
"""

import argparse
import functools
import http.server
import re
import runpy
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from urllib.parse import urlencode

TEXT, TOKENS = "def read(self,", 200


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--screenshot", type=Path, metavar="FILE", help="also save a picture of the page")
    given = parser.parse_args()
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        sys.exit("check.py: Chromium must be installed, such as the package chromium of Debian")
    program = runpy.run_path(str(Path(__file__).parents[1] / "onnx/generate.py"))
    model = program["Model"](given.folder / "model")
    expected = list(program["sample"](model, *model.begin(TEXT), TOKENS, 1, 1.0, 1))

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    handler = functools.partial(Handler, directory=str(given.folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        asked = urlencode({"text": TEXT, "tokens": TOKENS, "top": 1, "start": 1})
        page = f"http://127.0.0.1:{server.server_port}/?{asked}"
        # Virtual time: the page's clock stands while it computes, and Chromium waits for the end.
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=900,900", "--virtual-time-budget=600000"]
        flags += [f"--screenshot={given.screenshot}"] if given.screenshot else ["--dump-dom"]
        done = subprocess.run([browser, *flags, page], capture_output=True, text=True, timeout=300)
        server.shutdown()
    if given.screenshot:
        return
    error = re.search(r'<p id="error">(.*?)</p>', done.stdout)
    found = re.search(r'data-tokens="([\d ]*)"', done.stdout)
    if not found:
        said = error[1] if error else done.stderr[-300:]
        sys.exit(f"check.py: the page must write {TOKENS} tokens, got {said!r}")
    tokens = [int(token) for token in found[1].split()]
    if tokens != expected:
        same = next((n for n, pair in enumerate(zip(tokens, expected, strict=False)) if pair[0] != pair[1]), "all")
        sys.exit(
            f"check.py: the page must write the same tokens as generate.py, got {same} of {len(expected)} the same"
        )
    print(f"the same {len(tokens)} tokens")


if __name__ == "__main__":
    main()

"""Download a file: `python recipes/fetch.py FILE SHA256 URL...`; the URLs are tried in order.

FILE has that checksum at the end, or the exit status is 1 and it is as it was. What has arrived when a connection
breaks stays in FILE.part, and the next source, or the next run, goes on from there.
"""

import contextlib
import hashlib
import http.client
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO

BLOCK = 2**20
TIMEOUT = 60  # seconds without a byte
# Some servers refuse what urllib calls itself.
USER_AGENT = "Mozilla/5.0 (fairseq_fwp recipes)"


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def receive(url: str, part: Path) -> None:
    """Appends to `part` what it lacks of the file at `url`, or writes it anew; OSError if the connection breaks."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": USER_AGENT} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing is lacking: the checksum says whether it is right
            return
        raise
    with contextlib.closing(response):
        resumes = getattr(response, "status", None) == 206
        length = response.headers.get("Content-Length")
        with part.open("ab" if resumes else "wb") as file:
            received = copy(response, file)
    if length is not None and received < int(length):
        raise OSError(f"the connection ended after {received:,} of {int(length):,} bytes")


def copy(response: IO[bytes], file: IO[bytes]) -> int:
    """The number of bytes copied."""
    received = 0
    while block := response.read(BLOCK):
        file.write(block)
        received += len(block)
        if received % (32 * BLOCK) < len(block):
            print(f"{received / 1e6:,.0f} MB", file=sys.stderr)
    return received


def fetch(path: Path, checksum: str, urls: list[str]) -> None:
    """Raises ValueError with every source's reason if none has the file."""
    if path.exists() and sha256(path) == checksum:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    reasons = []
    for url in urls:
        print(f"fetching {url}", file=sys.stderr)
        try:
            began_elsewhere = part.exists()
            receive(url, part)
            if sha256(part) != checksum and began_elsewhere:
                part.unlink()
                receive(url, part)
            if (found := sha256(part)) == checksum:
                part.replace(path)
                return
            part.unlink()
            reasons.append(f"{url} has another file (its SHA-256 is {found})")
        except (OSError, http.client.HTTPException) as error:
            reasons.append(f"{url}: {error}")
    raise ValueError(f"no source has {path.name}: {'; '.join(reasons)}. Give a folder that has the data with --data.")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit("usage: python recipes/fetch.py FILE SHA256 URL...")
    try:
        fetch(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
    except ValueError as error:
        sys.exit(f"fetch.py: {error}")

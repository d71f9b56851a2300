"""Downloads, with checksums from several sources; a broken download is resumed."""

import hashlib
import http.client
import shutil
import sys
import urllib.error
import urllib.request
import zipfile
from pathlib import Path
from typing import NamedTuple

from commands import RecipeError, run

TIMEOUT = 60  # seconds without a byte
# Some servers refuse urllib's default user agent.
USER_AGENT = "Mozilla/5.0 (fairseq_fwp recipes)"


class Archive(NamedTuple):
    """A file to download: its name, SHA-256, sources in order, and the needed members.

    checksum: None if only the content is fixed, which the reader of the archive then checks. members: patterns of tar;
    a .zip is unpacked completely, and a file that is not an archive stays as it is.
    """

    name: str
    checksum: str | None
    urls: tuple[str, ...]
    members: tuple[str, ...] = ()

    def fetch(self, folder: Path) -> None:
        """Download the file into a folder and unpack it there. Raises RecipeError."""
        path = folder / self.name
        if not (path.exists() and self.checksum in (None, sha256(path))):
            folder.mkdir(parents=True, exist_ok=True)
            self.download(path)
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                archive.extractall(folder)
        elif ".tar" in path.suffixes or path.suffix == ".tgz":
            patterns = ["--wildcards", *self.members] if self.members else []
            run("tar", "-xzf", path, "-C", folder, *patterns)

    def download(self, path: Path) -> None:
        """Download the first URL that has the file. `path` only changes if the new one has the checksum.

        If a connection breaks, the received part stays in FILE.part, and the next source or the next run continues it.
        Raises RecipeError with the reason for every source if none has the file.
        """
        part, reasons = path.with_name(path.name + ".part"), []
        for url in self.urls:
            print(f"fetching {url}", file=sys.stderr)
            try:
                began_elsewhere = part.exists()
                receive(url, part)
                if self.checksum not in (None, sha256(part)) and began_elsewhere:
                    part.unlink()
                    receive(url, part)
                found = sha256(part)
                if self.checksum in (None, found):
                    part.replace(path)
                    return
                part.unlink()
                reasons.append(f"{url} has another file (its SHA-256 is {found})")
            except (OSError, http.client.HTTPException) as error:
                reasons.append(f"{url}: {error}")
        raise RecipeError(f"no source has {path.name}: {'; '.join(reasons)}. Give a folder of the data with --data.")


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def receive(url: str, part: Path) -> None:
    """Append the missing part of the file at `url` to `part`, or write all of it. Raises OSError if interrupted."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"User-Agent": USER_AGENT} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # complete: the checksum is compared later
            return
        raise
    with response, part.open("ab" if getattr(response, "status", None) == 206 else "wb") as file:
        before = file.tell()
        shutil.copyfileobj(response, file, 2**20)
        received, length = file.tell() - before, response.headers.get("Content-Length")
    if length is not None and received < int(length):
        raise OSError(f"the connection ended after {received:,} of {int(length):,} bytes")

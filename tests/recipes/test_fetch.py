"""Downloads: several sources, checksums, resumption; from folders and from a server on this machine."""

import hashlib
import http.server
import threading

import pytest
from commands import RecipeError
from data.fetch import Archive

CONTENT = bytes(range(256)) * 40
CHECKSUM = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    path.write_bytes(CONTENT)
    return path.as_uri()


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out" / "file"


def fetch(out, checksum, urls):
    Archive(out.name, checksum, tuple(urls)).fetch(out.parent)


class Server(http.server.BaseHTTPRequestHandler):
    """/whole supports ranges, /plain does not, /breaks ends after half, /wrong is another file; requests are kept."""

    def do_GET(self):
        self.server.asked.append((self.path, self.headers.get("Range")))
        start = self.headers.get("Range")
        start = int(start.removeprefix("bytes=").rstrip("-")) if start and self.path != "/plain" else 0
        body = CONTENT[::-1] if self.path == "/wrong" else CONTENT
        if start >= len(body):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        self.wfile.write(body[start : len(body) // 2 if self.path == "/breaks" else None])

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        server.asked = []
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def test_sources_are_tried_in_order(out, source, server):
    fetch(out, CHECKSUM, ["file:///nonexistent/file", f"{server.url}/wrong", source, f"{server.url}/whole"])
    assert out.read_bytes() == CONTENT and [path.name for path in out.parent.iterdir()] == ["file"]
    assert server.asked == [("/wrong", None)]
    fetch(out, CHECKSUM, [])  # it is there


def test_another_file_is_refused_and_leaves_nothing(out, source, server):
    with pytest.raises(RecipeError, match=r"has another file .*; http.*Connection refused.* Give a folder") as error:
        fetch(out, "0" * 64, [source, "http://127.0.0.1:1/file"])
    assert CHECKSUM in str(error.value) and not list(out.parent.iterdir())


def test_what_broke_off_is_gone_on_with(out, server):
    part = out.with_name("file.part")
    with pytest.raises(RecipeError, match=r"ended after 5,120 of 10,240 bytes"):
        fetch(out, CHECKSUM, [f"{server.url}/breaks"])
    assert part.read_bytes() == CONTENT[:5120] and not out.exists()
    fetch(out, CHECKSUM, [f"{server.url}/whole"])
    assert out.read_bytes() == CONTENT and not part.exists()
    assert server.asked[-1] == ("/whole", "bytes=5120-")


@pytest.mark.parametrize("known", [CONTENT[:100], CONTENT, b"another file" * 5, CONTENT + b"more"])
@pytest.mark.parametrize("path", ["/whole", "/plain"])
def test_whatever_lay_there_the_file_is_whole_or_not_there(out, server, path, known):
    out.parent.mkdir()
    out.with_name("file.part").write_bytes(known)
    fetch(out, CHECKSUM, [f"{server.url}{path}"])
    assert out.read_bytes() == CONTENT and not out.with_name("file.part").exists()

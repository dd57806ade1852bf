"""A stand-in for object storage at the border of the machine: files of a folder by GET and HEAD, as S3 serves them.

It is what a real server cannot be told to be: slow by a given latency, away for a while, forbidding, or garbling. It
checks no signature, so what real servers do with those is tested with one (``objects`` tests). It counts requests.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote


@dataclass
class ObjectServer:
    """Serves ``folder``/BUCKET/KEY; the fields may be changed at any time."""

    folder: Path
    latency_s: float = 0.0
    status: int = 200  # what every request is answered with, if it is another one
    fail_next: int = 0  # so many requests are answered with 503 first
    port: int = 0
    requests: list[tuple[str, str]] = field(default_factory=list)  # (key, range or "")

    @property
    def environment(self) -> dict[str, str]:
        """What a program needs in order to find it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_REGION": "us-east-1",
        }

    def bytes_asked(self) -> int:
        """Of all ranges together."""
        pairs = [found.removeprefix("bytes=").split("-") for _, found in self.requests if found]
        return sum(int(last) - int(first) + 1 for first, last in pairs)


@contextmanager
def object_server(folder: Path, port: int = 0) -> Iterator[ObjectServer]:
    """A server on a free port of this machine, until the end of the block."""
    served = ObjectServer(folder)
    server = _Server(("127.0.0.1", port), _handler(served))
    served.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.close_connections()
        server.server_close()  # waits for the threads of connections
        thread.join()


class _Server(ThreadingHTTPServer):
    """Joins its threads at the end: nothing is left behind by a test."""

    daemon_threads = False
    block_on_close = True
    request_queue_size = 128

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.open: set[object] = set()

    def process_request(self, request, client_address):  # type: ignore[no-untyped-def]
        self.open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request):  # type: ignore[no-untyped-def]
        self.open.discard(request)
        super().shutdown_request(request)

    def close_connections(self) -> None:
        """Clients keep connections open for reuse; without this their threads would wait for them."""
        import contextlib
        import socket

        for request in list(self.open):
            assert isinstance(request, socket.socket)
            with contextlib.suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request, client_address):  # type: ignore[no-untyped-def]
        """A client that has gone in the middle is no error of the test."""


def _handler(served: ObjectServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _answer(self, body: bool) -> None:
            key, asked = unquote(self.path.split("?")[0]).lstrip("/"), self.headers.get("Range", "")
            served.requests.append((key, asked))
            time.sleep(served.latency_s)
            path = served.folder / key
            if served.fail_next > 0:
                served.fail_next -= 1
                self._say(503)
            elif served.status != 200:
                self._say(served.status)
            elif not path.is_file():
                self._say(404)
            else:
                self._send(path.read_bytes(), asked, body)

        def _say(self, status: int) -> None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _send(self, data: bytes, asked: str, body: bool) -> None:
            etag = f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
            if self.headers.get("If-Match", etag) != etag:
                self._say(412)
                return
            size = len(data)
            self.send_response(206 if asked else 200)
            if asked:
                first, last = (int(word) for word in asked.removeprefix("bytes=").split("-"))
                self.send_header("Content-Range", f"bytes {first}-{min(last, size - 1)}/{size}")
                data = data[first : last + 1]
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", etag)
            self.send_header("Last-Modified", "Tue, 01 Dec 2026 00:00:00 GMT")
            self.end_headers()
            if body:
                self.wfile.write(data)

    return Handler

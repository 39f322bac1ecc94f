"""A stand-in for the model hub on this machine, and a program that asks it for models through `load_target`.

`python hub_server.py FOLDER NAME ...` prints, as JSON, what each name gave: "loaded", or its error's kind and text.
FOLDER holds the files of whole/m; the first part of a name decides what the hub says of it.
"""

import json
import os
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
# Status, and the code by which the hub says what it means.
ANSWERS: dict[str, tuple[int, str]] = {
    "gated-401": (401, "GatedRepo"),
    "gated": (403, "GatedRepo"),
    "stranger": (401, "RepoNotFound"),
    "nobody-401-403-gated": (404, "RepoNotFound"),
    "forbidden": (403, ""),
    "old": (404, "RevisionNotFound"),
    "bare": (404, "EntryNotFound"),
    "teapot": (418, ""),  # neither 429 nor 5xx: its client tries those again for half a minute
}


class Hub(BaseHTTPRequestHandler):
    """Answers GET and HEAD of any file."""

    folder = Path()

    def do_GET(self) -> None:
        owner = self.path.removeprefix("/api/models/").strip("/").partition("/")[0]
        if owner == "hangs-up":
            self.close_connection = True
            return
        if owner in ANSWERS:
            self.answer(*ANSWERS[owner])
        elif self.path.startswith("/api/"):
            body = (
                b"[]"
                if "/tree/" in self.path
                else json.dumps({"id": f"{owner}/m", "sha": COMMIT, "siblings": []}).encode()
            )
            self.answer(200, "", body)
        else:
            name = self.path.rpartition("/")[2]
            file = self.folder / name
            hidden = {"no-tokenizer": "token", "no-weights": "safetensors", "adapter": "config.json"}.get(owner, "?")
            if name == "adapter_config.json":
                self.answer(200 if owner == "adapter" else 404, "", b"{}")
            elif not file.is_file() or hidden in name:
                self.answer(404, "EntryNotFound")
            else:
                self.answer(200, "", file.read_bytes())

    do_HEAD = do_GET

    def answer(self, status: int, code: str, body: bytes = b"") -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{len(body)}-{self.path.rpartition("/")[2]}"')
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        """Say nothing."""


def main() -> None:
    Hub.folder = Path(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": home, "HF_HUB_OFFLINE": "0"}
        os.environ |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1"}
        for name in ("HF_TOKEN", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            os.environ.pop(name, None)
        # Not before: the hub's client reads its settings when it is imported.
        from models.target.model import TargetOptions, load_target

        found = {}
        for name in sys.argv[2:]:
            try:
                load_target(TargetOptions(name=name, device="cpu", dtype="float32"))
                found[name] = ["", "loaded"]
            except Exception as error:
                found[name] = [type(error).__name__, str(error)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()

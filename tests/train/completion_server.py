"""A real HTTP server here that completes token ids with our own decoder, and stumbles where a test says so."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from models.decoding.decoder import Decoder
from models.decoding.rows import GenerationParams
from models.sampling import SamplingParams
from models.target.model import Target

# Given a request's body and its reply: another reply, bytes as they are, a status, or None to drop the connection.
Change = Callable[[dict[str, Any], dict[str, Any]], Any]


@dataclass
class Server:
    """What it serves, how it misbehaves, and what it was asked. One decoder pass at a time."""

    target: Target
    model: str = "tiny"
    owner: str = "vllm"
    max_context: int | None = 512
    gives_ids: bool = True
    has_tokenize: bool = True
    shift: int = 0  # of a token's id in what /tokenize gives
    key: str = ""
    change: Change = lambda body, reply: reply
    delay_s: float = 0.0
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    answered: list[tuple[int, ...]] = field(default_factory=list)
    most_in_flight: int = 0
    _in_flight: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _decoder_lock: threading.Lock = field(default_factory=threading.Lock)

    def real_bodies(self) -> list[dict[str, Any]]:
        """What was asked, without the greedy probes before a run."""
        return self.bodies[4:]

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """As vLLM replies: the EOS is the last of the ids, and no part of the text."""
        top_k = max(0, body["top_k"])
        params = GenerationParams(
            body["max_tokens"],
            SamplingParams(body["temperature"], top_k, body["top_p"], body["min_p"]),
            seed=body.get("seed", 0),
            eos_token_ids=tuple(body["stop_token_ids"]),
        )
        with self._decoder_lock:
            result = Decoder(self.target).generate([body["prompt"]], params)[0]
        ended = result.finish_reason == "eos"
        text_ids = result.tokens[:-1] if ended else result.tokens
        choice: dict[str, Any] = {
            "index": 0,
            "text": self.target.tokenizer.decode(text_ids, skip_special_tokens=False),
            "finish_reason": "stop" if ended else "length",
            "stop_reason": result.tokens[-1] if ended else None,
        }
        if self.gives_ids and body.get("return_token_ids"):
            choice |= {"token_ids": result.tokens, "prompt_token_ids": body["prompt"]}
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": len(result.tokens)}
        return {"model": self.model, "choices": [choice], "usage": usage}

    def models(self) -> dict[str, Any]:
        card = {
            "id": self.model,
            "owned_by": self.owner,
            "root": f"/models/{self.model}",
            "max_model_len": self.max_context,
        }
        return {"object": "list", "data": [card]}

    def reply_to(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/models":
            return self.models()
        if path == "/tokenize" and self.has_tokenize:
            ids = self.target.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
            return {"tokens": [*ids[:5], ids[5] + self.shift, *ids[6:]]}
        if path != "/v1/completions":
            return 404
        with self._lock:
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
            self.bodies.append(body)
        try:
            time.sleep(self.delay_s)
            reply = self.change(body, self.complete(body))
        finally:
            with self._lock:
                self._in_flight -= 1
        if isinstance(reply, dict):
            with self._lock:
                self.answered.append(tuple(body["prompt"]))
        return reply


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def _answer(self, body: dict[str, Any]) -> None:
            if server.key and self.headers.get("authorization") != f"Bearer {server.key}":
                reply: Any = 401
            else:
                reply = server.reply_to(self.path, body)
            if reply is None:
                self.close_connection = True
                return
            status, extra = 200, {}
            if isinstance(reply, tuple):
                reply, extra = reply
            if isinstance(reply, int):
                status, reply = reply, {"error": {"message": f"this is\na {reply}"}}
            content = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            for name, value in extra.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *args: Any) -> None:
        """A client that hung up is no news."""


@contextmanager
def serve(target: Target, **options: Any) -> Iterator[Server]:
    """A server at `Server.url`, for as long as the block lasts."""
    server = Server(target, **options)
    http = _Quiet(("127.0.0.1", 0), _handler(server))
    server.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()

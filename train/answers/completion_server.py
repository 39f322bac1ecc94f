"""An OpenAI-compatible server: the models it lists, and completions of token ids, with patience where it stumbles.

Owns the protocol, and knows nothing of targets. What goes beyond OpenAI's own fields (`return_token_ids`,
`stop_token_ids`, `ignore_eos`, ...) and the names in replies are as vLLM 0.32 has them
(entrypoints/openai/completion/protocol.py), and SGLang 0.5.23 (srt/entrypoints/openai/protocol.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import httpx2

# The first pause before a request is sent again; each further one doubles, up to the longest.
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
# Answers that a server may give differently a moment later: too slow, too many, broken, overloaded, still loading.
PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)
KEY_VARIABLE = "OPENAI_API_KEY"
# It would tell of each request, thousands of lines across the progress bar, where a log's level is INFO, as Hydra's is.
logging.getLogger("httpx2").setLevel(logging.WARNING)


@dataclass(frozen=True)
class ServedModel:
    """One model of a server. owner: the software, as it names itself ("vllm", "sglang"). root: what it was loaded from.

    max_context: longest sequence that it takes, where it tells.
    """

    id: str
    owner: str = ""
    root: str = ""
    max_context: int | None = None


@dataclass(frozen=True)
class Completion:
    """One reply. What a server does not tell is None; stopped_at: the id or string that it stopped at."""

    text: str
    finish_reason: str
    stopped_at: int | str | None
    token_ids: list[int] | None
    prompt_ids: list[int] | None
    num_prompt_tokens: int | None
    num_tokens: int | None


class CompletionServer:
    """Asks one server; an asynchronous context manager. ValueErrors and ConnectionErrors say which address, and why.

    timeout_s: how long one reply may take. patience_s: how long requests that fail are sent again, counted from the
    first failure in a row. The key that a server may want is read from OPENAI_API_KEY.
    """

    def __init__(self, url: str, timeout_s: float, patience_s: float, num_connections: int) -> None:
        check_url(url)
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self.patience_s = patience_s
        key = os.environ.get(KEY_VARIABLE)
        self._client = httpx2.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx2.Timeout(timeout_s, connect=min(timeout_s, 30.0)),
            limits=httpx2.Limits(max_connections=num_connections, max_keepalive_connections=num_connections),
        )
        self._jitter = random.Random()

    async def __aenter__(self) -> CompletionServer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._client.aclose()

    async def models(self) -> list[ServedModel]:
        """What it serves, its adapters included. Tried once: at the start of a run a wrong address should show."""
        reply = await self._ask("GET", f"{self.url}/models", None, patience_s=0.0)
        entries = reply.get("data")
        if not isinstance(entries, list) or not all(isinstance(entry, dict) and entry.get("id") for entry in entries):
            raise ValueError(f"{self.url}/models lists no models; answers.url must be the address up to /v1")
        return [
            ServedModel(
                str(entry["id"]),
                str(entry.get("owned_by") or ""),
                str(entry.get("root") or ""),
                entry.get("max_model_len"),
            )
            for entry in entries
        ]

    async def tokenize(self, model: str, text: str) -> list[int] | None:
        """The ids of a text without special tokens around it; None where the server has no such endpoint."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        try:
            reply = await self._ask("POST", f"{self.url.removesuffix('/v1')}/tokenize", body, patience_s=0.0)
        except ValueError:
            return None
        tokens = reply.get("tokens")
        return tokens if _are_ids(tokens) else None

    async def complete(self, body: dict[str, Any]) -> Completion:
        """One completion. ValueError for a reply that is none, or that says that the server failed."""
        place = f"{self.url}/completions"
        reply = await self._ask("POST", place, body, self.patience_s)
        choices = reply.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise ValueError(f"{place} gave {_shown(reply)}, expected one choice; is it an OpenAI-compatible server?")
        choice = choices[0]
        usage = reply.get("usage") or {}
        token_ids, prompt_ids = choice.get("token_ids"), choice.get("prompt_token_ids")
        if not isinstance(choice.get("text"), str) or not all(
            ids is None or _are_ids(ids) for ids in (token_ids, prompt_ids)
        ):
            raise ValueError(f"{place} gave {_shown(choice)}, expected `text`, and lists of ids where there are any")
        stopped_at = choice.get("stop_reason", choice.get("matched_stop"))
        return Completion(
            choice["text"],
            str(choice.get("finish_reason")),
            stopped_at,
            token_ids,
            prompt_ids,
            usage.get("prompt_tokens"),
            usage.get("completion_tokens"),
        )

    async def _ask(self, method: str, place: str, body: dict[str, Any] | None, patience_s: float) -> dict[str, Any]:
        """The reply's JSON object. A failure that may pass is met by the same request again, after a pause."""
        pause_s, failing_since = FIRST_PAUSE_S, None
        while True:
            try:
                return await self._ask_once(method, place, body)
            except _Passing as failure:
                now = time.monotonic()
                failing_since = now if failing_since is None else failing_since
                if now - failing_since >= patience_s:
                    raise ConnectionError(self._given_up(place, failure, patience_s)) from failure
                # Requests that failed together must not come back together.
                wanted_s = max(pause_s * self._jitter.uniform(0.5, 1.5), failure.retry_after_s)
            await asyncio.sleep(min(wanted_s, failing_since + patience_s - now))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _ask_once(self, method: str, place: str, body: dict[str, Any] | None) -> dict[str, Any]:
        try:
            response = await self._client.request(method, place, json=body)
        except httpx2.TimeoutException as error:
            raise _Passing(f"no reply within {self.timeout_s:g} s (answers.timeout_s)") from error
        except httpx2.TransportError as error:
            raise _Passing(str(error) or type(error).__name__) from error
        if response.status_code in PASSING_STATUS:
            raise _Passing(f"{response.status_code}: {_said(response)}", _retry_after_s(response))
        if response.status_code in (401, 403):
            hint = (
                f"{KEY_VARIABLE} is not the key that it wants" if KEY_VARIABLE in os.environ else f"set {KEY_VARIABLE}"
            )
            raise ValueError(f"{place} refuses us ({response.status_code}: {_said(response)}); {hint}")
        if response.status_code != 200:
            raise ValueError(f"{place} answers {response.status_code}: {_said(response)}")
        try:
            reply = response.json()
        except ValueError as error:
            raise _Passing(f"the reply is no whole JSON ({error}): {response.text[:80]!r}") from error
        if not isinstance(reply, dict):
            raise ValueError(f"{place} gave {_shown(reply)}, expected an object")
        return reply

    def _given_up(self, place: str, failure: _Passing, patience_s: float) -> str:
        if patience_s == 0:
            return f"{place} cannot be asked ({failure}); start the server, or check answers.url"
        return (
            f"{place} fails since {patience_s:g} s, answers.patience_s ({failure}); see to the server. What it has "
            "answered is kept, and the same command goes on from there"
        )


class _Passing(Exception):
    """A failure that may be over when the request is sent again."""

    def __init__(self, reason: str, retry_after_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


def check_url(url: str) -> None:
    """ValueError for what is no address of a server."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"answers.url={url!r} is no address; give one such as http://localhost:8000/v1")
    if parts.username or parts.password:
        raise ValueError(f"answers.url holds a password, which would be written down; set {KEY_VARIABLE} instead")


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _retry_after_s(response: httpx2.Response) -> float:
    """What the server asks for; 0 where it asks for nothing, or for a date."""
    try:
        return max(0.0, float(response.headers.get("retry-after", 0)))
    except ValueError:
        return 0.0


def _said(response: httpx2.Response) -> str:
    """The server's own words, in a line: its JSON error's message where there is one."""
    try:
        reply = response.json()
        error = reply.get("error", reply)
        text = error.get("message") or error.get("detail") or reply if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = response.text
    return " ".join(str(text).split())[:200] or "no reason given"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."

"""The hub's own variables hold here: HF_HOME, HF_HUB_OFFLINE, HF_TOKEN, HF_ENDPOINT, read by its client in a process of
its own, against a real HTTP server that stands in for the hub."""

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from models.target.tiny import make_tiny_target
from train.runtime.presets import CONF

ROOT = CONF.parent
LOAD = """
from models.target.model import TargetOptions, load_target
try:
    target = load_target(TargetOptions(name="me/tiny", dtype="float32", device="cpu"))
    print("loaded", target.fingerprint())
except ValueError as error:
    print("refused", error)
"""
TOKEN = "hf_not-a-real-token"


class Gate(BaseHTTPRequestHandler):
    """Says of every file that its repository is gated, as the hub says it."""

    keys: list[str | None]

    def do_HEAD(self) -> None:
        if "me/tiny" in self.path:  # its client asks for other things, too
            self.keys.append(self.headers.get("authorization"))
        self.send_response(403)
        self.send_header("X-Error-Code", "GatedRepo")
        self.send_header("X-Error-Message", "Access to model me/tiny is restricted.")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def gate() -> Iterator[tuple[str, list[str | None]]]:
    """Address of the stand-in, and the keys that it was shown."""
    keys: list[str | None] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OneGate", (Gate,), {"keys": keys}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", keys
    server.shutdown()
    server.server_close()


def load(home: Path, **variables: str) -> str:
    """What a process that has these variables, and no others of the hub, prints of loading me/tiny."""
    apart = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))
    }
    environment = {**apart, "HF_HOME": str(home), "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        [sys.executable, "-c", LOAD], env=environment, cwd=home, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.slow
def test_a_cached_model_is_found_under_hf_home(tmp_path: Path) -> None:
    """Offline, as a machine without a network has it."""
    repository = tmp_path / "hub" / "models--me--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123")
    tiny = make_tiny_target(seed=5)
    for part in (tiny.model, tiny.tokenizer):
        part.save_pretrained(repository / "snapshots" / "0123")
    assert load(tmp_path, HF_HUB_OFFLINE="1") == f"loaded {tiny.fingerprint()}"
    shutil.rmtree(repository)
    assert load(tmp_path, HF_HUB_OFFLINE="1").startswith(
        "refused model 'me/tiny' could not be fetched: the hub is out of"
    )


def test_a_gated_model_says_how_to_get_in(gate: tuple[str, list[str | None]], tmp_path: Path) -> None:
    """HF_TOKEN is shown to the hub; being refused is one line."""
    address, keys = gate
    said = load(tmp_path, HF_ENDPOINT=address, HF_TOKEN=TOKEN)
    assert said == (
        "refused model 'me/tiny' is gated or private: accept its licence on its hub page, then run `hf auth login` or "
        "set HF_TOKEN; or set model.name to a local folder"
    )
    assert len(keys) >= 2
    assert set(keys) == {f"Bearer {TOKEN}"}


def test_nothing_here_sets_the_hubs_variables_or_the_gpus() -> None:
    """They are the user's: no module writes HF_*, CUDA_VISIBLE_DEVICES and the like into the environment."""
    names = r"(HF_\w+|HUGGING\w+|TRANSFORMERS_\w+|CUDA_VISIBLE_DEVICES|HIP_VISIBLE_DEVICES)"
    writes = re.compile(
        rf"""environ\[["']{names}["']\]\s*=|(setdefault|putenv|setenv)\(\s*["']{names}|export\s+{names}="""
    )
    files = [path for room in ("models", "train", "rl", "eval", "scripts") for path in (ROOT / room).rglob("*")]
    sources = [path for path in files if path.suffix in (".py", ".sh")]
    assert len(sources) > 100
    assert [str(path) for path in sources if writes.search(path.read_text(encoding="utf-8"))] == []
    for planted in ('os.environ["HF_HOME"] = x', "environ.setdefault('CUDA_VISIBLE_DEVICES', '')", "export HF_TOKEN=x"):
        assert writes.search(planted)

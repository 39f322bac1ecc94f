"""What is said where no model can be had: one line that names the cause and what to do.

The texts are those of transformers 5.24 and huggingface_hub, cause included.
"""

from pathlib import Path

import pytest

from models import target as target_module
from models.sources import hub_error_message, require_weights
from models.target import TargetOptions, load_target


def raised(message: str, cause: str = "") -> OSError:
    error = OSError(message)
    error.__cause__ = Exception(cause) if cause else None
    return error


UNREACHABLE = raised(
    "We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files.\n"
    "Check your internet connection or see how to run the library in offline mode at "
    "'https://huggingface.co/docs/transformers/installation#offline-mode'.",
    "An error happened while trying to locate the file on the Hub and we cannot find the requested files in the local "
    "cache. Please check your connection and try again or make sure your Internet connection is on.",
)
OFFLINE = raised(
    "We couldn't connect to 'https://huggingface.co' to load the files, and couldn't find them in the cached files.\n"
    "Check your internet connection or see how to run the library in offline mode at "
    "'https://huggingface.co/docs/transformers/installation#offline-mode'.",
    "Cannot reach https://huggingface.co/api/models/a/b: offline mode is enabled. To disable it, please unset the "
    "`HF_HUB_OFFLINE` environment variable.",
)
GATED_NO_TOKEN = raised(
    "You are trying to access a gated repo.\nMake sure to have access to it at https://huggingface.co/a/b.\n"
    "401 Client Error. (Request ID: Root=1-66aa)\n\nCannot access gated repo for url "
    "https://huggingface.co/a/b/resolve/main/config.json.\nAccess to model a/b is restricted. You must have access to "
    "it and be authenticated to access it. Please log in.",
)
GATED_NO_ACCESS = raised(
    "You are trying to access a gated repo.\nMake sure to have access to it at https://huggingface.co/a/b.\n"
    "403 Client Error. (Request ID: Root=1-66aa)\n\nCannot access gated repo for url "
    "https://huggingface.co/a/b/resolve/main/config.json.\nAccess to model a/b is restricted and you are not in the "
    "authorized list. Visit https://huggingface.co/a/b to ask for access.",
)
# The hub tells a stranger 401, not 404, of what does not exist.
UNKNOWN = raised(
    "a/b is not a local folder and is not a valid model identifier listed on 'https://huggingface.co/models'\nIf this "
    "is a private repository, make sure to pass a token having permission to this repo either by logging in with "
    "`hf auth login` or by passing `token=<your_token>`",
    "401 Client Error. (Request ID: Root=1-66aa)\n\nRepository Not Found for url: "
    "https://huggingface.co/a/b/resolve/main/config.json.\nPlease make sure you specified the correct `repo_id` and "
    "`repo_type`.\nIf you are trying to access a private or gated repo, make sure you are authenticated.",
)
REVISION = raised(
    "v9 is not a valid git identifier (branch name, tag name or commit id) that exists for this model name. Check the "
    "model page at 'https://huggingface.co/a/b' for available revisions.",
    "404 Client Error. (Request ID: Root=1-66aa)\n\nRevision Not Found for url: "
    "https://huggingface.co/a/b/resolve/v9/config.json.",
)
# A request id may hold any digits.
SERVER = raised(
    "There was a specific connection error when trying to load a/b:\n500 Server Error: Internal Server Error for url: "
    "https://huggingface.co/a/b/resolve/main/config.json (Request ID: Root=1-64014032)",
)
OTHER = raised("a/b does not appear to have a file named config.json.\nCheckout 'https://huggingface.co/a/b/tree/main'")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UNREACHABLE, "could not be fetched: the hub is out of reach"),
        (OFFLINE, "could not be fetched: the hub is out of reach"),
        (SERVER, "could not be fetched: the hub is out of reach"),
        (GATED_NO_TOKEN, "is gated or private: accept its licence on its hub page"),
        (GATED_NO_ACCESS, "is gated or private: accept its licence on its hub page"),
        (UNKNOWN, "is neither a folder here nor a repository on the hub that you may see; check model.name"),
        (REVISION, "has no such revision; check model.revision"),
        (OTHER, "could not be loaded: a/b does not appear to have a file named config.json. Checkout"),
    ],
    ids=["unreachable", "offline", "server", "no token", "no access", "unknown", "revision", "other"],
)
@pytest.mark.parametrize("loader", ["AutoTokenizer", "AutoModelForCausalLM"])
def test_hub_errors(loader: str, error: OSError, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of the two asks the hub first."""

    class Failing:
        @staticmethod
        def from_pretrained(name: str, **kwargs: object) -> None:
            assert name == "a/b"
            raise error

    class Working:
        @staticmethod
        def from_pretrained(name: str, **kwargs: object) -> object:
            return object()

    monkeypatch.setattr(target_module, "AutoTokenizer", Working)
    monkeypatch.setattr(target_module, loader, Failing)
    with pytest.raises(ValueError, match="^model 'a/b' " + message) as found:
        load_target(TargetOptions(name="a/b", device="cpu"))
    assert "\n" not in str(found.value)
    assert found.value.__cause__ is error


def test_gated_names_say_how_to_get_in() -> None:
    assert "run `hf auth login` or set HF_TOKEN" in hub_error_message("a/b", GATED_NO_TOKEN)


def test_unreachable_hub_names_the_way_without() -> None:
    assert "+model=smollm2, which needs no hub" in hub_error_message("a/b", UNREACHABLE)


def test_long_texts_are_cut() -> None:
    assert len(hub_error_message("a/b", OSError("word " * 500))) < 400


@pytest.mark.parametrize("name", ["model.safetensors", "model-00001-of-00002.safetensors", "pytorch_model.bin"])
def test_weights_that_count(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    with pytest.raises(ValueError, match="lacks weights"):
        require_weights(tmp_path)
    (tmp_path / name).touch()
    require_weights(tmp_path)


def test_an_unknown_name_without_a_hub() -> None:
    """No monkeypatch: the tests run offline."""
    with pytest.raises(ValueError, match=r"^model 'no-one/nothing' could not be fetched: the hub is out of reach"):
        load_target(TargetOptions(name="no-one/nothing", device="cpu"))

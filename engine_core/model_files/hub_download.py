"""A model id of the Hugging Face hub to a folder on disk.

Must not know what is in the folder; `hf_folder` checks it.
"""

from collections.abc import Callable
from pathlib import Path

from engine_core.model_files.errors import DownloadFailed

_WANTED = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.spm", "merges.txt")


def download_from_hub(model_id: str, *, report: Callable[[str], None]) -> Path:
    """The folder of a snapshot of `model_id`, from the hub's cache where it is complete.

    Raises:
        DownloadFailed: no such model, no access, or no network.
    """
    from huggingface_hub import snapshot_download  # half a second, and only needed here
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError

    report(f"looking for {model_id} on the Hugging Face hub")
    try:
        return Path(snapshot_download(model_id, allow_patterns=list(_WANTED)))
    except GatedRepoError as error:
        raise DownloadFailed(
            f"{model_id} on the Hugging Face hub asks for consent first; accept its terms there "
            f"and log in with `hf auth login`"
        ) from error
    except LocalEntryNotFoundError as error:
        raise DownloadFailed(
            f"{model_id} is not in the hub's cache, and the Hugging Face hub cannot be reached; "
            f"check the network and HF_HUB_OFFLINE, or pass a folder or .gguf file as --model"
        ) from error
    except Exception as error:  # the hub's client and its HTTP stack raise of many kinds
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise DownloadFailed(
            f"{model_id} could not be downloaded from the Hugging Face hub: {reason}; check the "
            f"name, or pass a folder or .gguf file as --model"
        ) from error

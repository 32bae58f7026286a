"""A model folder into a decoder: find it, check that it is whole, stream its tensors into the parameters."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open

from miles.errors import CheckpointError
from miles.model.decoder import Decoder
from miles.model.names import NameEntry, name_table
from miles.model.spec import load_spec

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
_HUB_TIMEOUT_S = 10.0


def resolve_model(name_or_path: str, *, flag: str = "--hf-checkpoint") -> Path:
    """The local folder of a model: the folder itself, or the download of a hub name such as `Qwen/Qwen3-0.6B`.

    Honours `HF_HUB_OFFLINE` and the hub's cache. Raises `CheckpointError`, which names the `flag`, when there is
    neither.
    """
    folder = Path(os.path.expanduser(name_or_path))
    if folder.is_dir():
        return folder
    advice = f"give {flag} a Hugging Face model folder, or a hub name such as Qwen/Qwen3-0.6B when online"
    if folder.exists():
        raise CheckpointError(f"{folder} is a file, not a model folder; {advice}")
    if name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") != 1:
        raise CheckpointError(f"the model folder {folder} does not exist; {advice}")
    try:
        return Path(snapshot_download(name_or_path, allow_patterns=_HUB_FILES, etag_timeout=_HUB_TIMEOUT_S))
    except HFValidationError:
        raise CheckpointError(f"{name_or_path!r} is neither a folder nor a valid hub name; {advice}") from None
    except HfHubHTTPError as error:
        raise CheckpointError(f"the hub refused {name_or_path!r}: {_first_line(error)}; {advice}") from None
    except (LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"there is no folder {name_or_path!r}, and the hub cannot be reached ({_first_line(error)}); "
            f"go online, or copy the model to a local folder and give {flag} that folder"
        ) from None


def load_model(folder: Path, *, dtype: torch.dtype, device: torch.device | str) -> Decoder:
    """The decoder of a Hugging Face folder, weights converted to `dtype`. Raises `CheckpointError` that names the file
    when something is missing, unknown, cut off or of another shape than `config.json` says."""
    model = Decoder(load_spec(folder), dtype=dtype, device=device)
    load_weights(model, folder)
    return model


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder; every shard that the index names must be there."""
    index = folder / INDEX_NAME
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError):
            raise CheckpointError(f"{index} is damaged; download it again") from None
        if outside := [name for name in names if Path(name).name != name]:
            raise CheckpointError(f"{index} names {outside[0]!r}, which is not a file beside it; download it again")
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{folder}: {len(missing)} of {len(names)} weight files are missing ({', '.join(missing[:3])}); "
                "the download is incomplete, run it again"
            )
        return [folder / name for name in names]
    if not (folder / SINGLE_NAME).is_file():
        raise CheckpointError(
            f"{folder} has no {SINGLE_NAME} and no {INDEX_NAME}; only safetensors weights are read, "
            "so download the model again or convert it"
        )
    return [folder / SINGLE_NAME]


@torch.no_grad()
def load_weights(model: Decoder, folder: Path) -> None:
    """Copy a folder's tensors into the parameters in place: no parameter moves."""
    parameters = dict(model.named_parameters())
    table = {entry.hf_name: entry for entry in name_table(model.spec)}
    found: set[str] = set()
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for hf_name in file.keys():  # noqa: SIM118 - the handle is not a mapping
                    if _is_derived(hf_name, tied_head=model.spec.tied_head):
                        continue
                    if hf_name not in table:
                        raise CheckpointError(
                            f"{path}: tensor {hf_name!r} does not belong to a {model.spec.architecture} as "
                            "config.json describes it; take weights and config.json from the same source"
                        )
                    _copy_rows(path, table[hf_name], file.get_tensor(hf_name), parameters)
                    found.add(hf_name)
        except SafetensorError as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}); it is damaged or only partly downloaded, download it again"
            ) from None
    missing = [name for name in table if name not in found]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(table)} tensors that config.json asks for are missing from its "
            f"safetensors files, for example {missing[0]!r}; download the model again"
        )


def _is_derived(hf_name: str, *, tied_head: bool) -> bool:
    # Some published files repeat the tied embedding as a head, or store the rotary frequencies.
    return hf_name.endswith("rotary_emb.inv_freq") or (tied_head and hf_name == "lm_head.weight")


def _copy_rows(path: Path, entry: NameEntry, tensor: torch.Tensor, parameters: dict[str, torch.nn.Parameter]) -> None:
    rows = parameters[entry.name][entry.start : entry.stop]
    if tensor.shape != rows.shape:
        raise CheckpointError(
            f"{path}: tensor {entry.hf_name!r} has shape {tuple(tensor.shape)}, config.json asks for "
            f"{tuple(rows.shape)}; take weights and config.json from the same source"
        )
    rows.copy_(tensor)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

"""Check that a model of the Hugging Face hub is available, made before any work: one request without retries."""

from __future__ import annotations

from pathlib import Path

CONFIG = "config.json"
"""Name of a file that every model of `transformers` has."""
PATIENCE_S = 10.0
"""Seconds to wait for one short response of the hub."""


def hub_fault(model: str, *, cache: Path | None = None, endpoint: str | None = None) -> str:
    """Return the reason why a run could not load the model of a hub id; empty if the cache or the hub has it.

    Args:
        model: `name` or `owner/name`.
        cache: folder of the cache; None: the one of Hugging Face's environment variables.
        endpoint: address of the hub; None: the one of Hugging Face's environment variables.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub import errors as hf

    asked = endpoint or constants.ENDPOINT
    here = f"there is no folder {model} here, no such model in the cache {cache or constants.HF_HUB_CACHE}"
    name = "expected the folder of a Hugging Face model, or a hub id such as Qwen/Qwen3-0.6B"
    try:
        if isinstance(try_to_load_from_cache(model, CONFIG, cache_dir=cache), str):
            return ""
        get_hf_file_metadata(hf_hub_url(model, CONFIG, endpoint=asked), timeout=PATIENCE_S)
    except hf.HFValidationError as error:
        return f"there is no folder {model} here, and it can be no hub id ({error}): {name}"
    except hf.GatedRepoError:
        return f"{model} is given at {asked} to those only who were granted access: ask for it there, and set HF_TOKEN"
    except hf.RepositoryNotFoundError:
        return f"{here}, and none at {asked} that may be read: {name}; a private one needs HF_TOKEN"
    except hf.EntryNotFoundError:
        return f"{model} has no {CONFIG} at {asked}: {name}"
    except hf.OfflineModeIsEnabled:
        return f"{here}, and HF_HUB_OFFLINE forbids to ask {asked}: {name}; or unset it"
    except Exception as error:  # errors of a network, a proxy or a mirror, in classes of the client
        return f"{here}, and {asked} cannot be asked ({error}): {name}; without a network, one that is in the cache"
    return ""

"""Access to the Hugging Face hub; the only module that imports `huggingface_hub`, and only when it is needed.

Downloads, the cache under `$HF_HOME`, tokens, mirrors and the offline mode are huggingface_hub's, with its environment
variables (`HF_TOKEN`, `HF_ENDPOINT`, `HF_HUB_CACHE`, `HF_HUB_OFFLINE`, ...). Its exceptions are mapped to three errors:
gated, not found, not reachable.
"""

import glob
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from llamarium.errors import DownloadError, GatedModelError, ModelNotFoundError, escape
from llamarium.hub.gguf_names import part_name


def download_file(repo: str, file: str) -> Path:
    """Return the path of a file of a repository, downloading it if necessary; for a split file, all of its parts.

    Raises:
        GatedModelError: If the repository requires access.
        ModelNotFoundError: If the repository or the file does not exist.
        DownloadError: If the hub is not reachable, or the disk is not writable.
    """
    # Not hf_hub_download: without a network it retries for 23 seconds, where a snapshot's first request fails at once.
    part = part_name(file)
    suffix = "" if part is None else f"-?????-of-{part.total:05d}.gguf"
    pattern = glob.escape(file if part is None else part.prefix) + suffix
    path = download_snapshot(repo, [pattern]) / file
    if not path.is_file():
        raise ModelNotFoundError(f"{repo} holds no {escape(file)}; `{repo}` alone lists the GGUF files that it holds")
    return path


def download_snapshot(repo: str, allow: Sequence[str], ignore: Sequence[str] = ()) -> Path:
    """Download the files of a repository that match `allow` and not `ignore`; return their directory.

    Patterns are those of fnmatch, where `*` also matches `/`. Patterns without a match are ignored.
    """
    with _explained(repo):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(repo, allow_patterns=list(allow), ignore_patterns=list(ignore)))


def list_files(repo: str) -> list[str]:
    """Return the names of a repository's files on the hub."""
    with _explained(repo):
        from huggingface_hub import HfApi

        return sorted(HfApi().list_repo_files(repo))


def data_commit(repo: str) -> str | None:
    """Return the newest commit of a data set on the hub."""
    with _explained(repo):
        from huggingface_hub import HfApi

        return HfApi().dataset_info(repo).sha


def cached_snapshots() -> list[tuple[str, Path]]:
    """Return the newest snapshot of each model repository in huggingface_hub's cache, as (repository, folder)."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        repos = [repo for repo in scan_cache_dir().repos if repo.repo_type == "model" and repo.revisions]
    except (CacheNotFound, OSError):
        return []
    newest = [(repo.repo_id, max(repo.revisions, key=lambda revision: revision.last_modified)) for repo in repos]
    return [(name, revision.snapshot_path) for name, revision in newest]


@contextmanager
def _explained(repo: str) -> Generator[None]:
    """Turn exceptions of huggingface_hub into errors that say what to do."""
    try:
        yield
    except Exception as error:  # whatever HTTP library huggingface_hub uses, its failures end here
        raise _explain(error, repo) from error


def _explain(error: BaseException, repo: str) -> ModelNotFoundError:
    causes = list(_chain(error))
    names = {cls.__name__ for cause in causes for cls in type(cause).__mro__}
    status_codes = (getattr(getattr(cause, "response", None), "status_code", None) for cause in causes)
    status = next((code for code in status_codes if isinstance(code, int)), None)
    if "GatedRepoError" in names:
        return GatedModelError(
            f"{repo} is gated: accept its licence at https://huggingface.co/{repo}, then set HF_TOKEN to a token of "
            "that account or run `hf auth login`"
        )
    if "RepositoryNotFoundError" in names or status == 404:
        return ModelNotFoundError(
            f"the hub shows no repository {repo}: check the name; if it is private, set HF_TOKEN or run `hf auth login`"
        )
    if status in (401, 403):
        return GatedModelError(
            f"the hub refuses {repo} (HTTP {status}): the token is missing, expired or may not read it; set HF_TOKEN "
            "or run `hf auth login`"
        )
    if "OfflineModeIsEnabled" in names:
        return DownloadError(
            f"{repo} is not in the hub cache and HF_HUB_OFFLINE is set; unset it, or give a folder or .gguf file"
        )
    lines = [type(causes[-1]).__name__, *filter(None, map(str.strip, str(causes[-1]).splitlines()))]
    return DownloadError(
        f"{repo} could not be fetched from the hub: {escape(': '.join(lines[:2]), 300)}; without a network give a "
        "folder or a .gguf file on disk (`llamarium doctor --hub` checks the way to the hub)"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        yield error
        error = error.__cause__ or error.__context__

"""Object storage: a prefix of a bucket as named bytes, for checkpoints and data sets. Torch-free.

Method: obstore (Rust's object_store) does the requests, the signing and the retries; here its errors become one
sentence each. An object is there whole or not at all, so no temporary names are needed;
a file above 5 MiB goes up in parts. Conditional puts are not used: some servers accept the condition and ignore it.

Credentials, region and endpoint come only from the environment of the process, by the names all S3 tools share
(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION, AWS_ENDPOINT_URL); nothing of them is accepted in a URL or
said in a sentence. Plain HTTP is used when the endpoint says so. ``file:///path`` works as well; gs:// and az:// come
with obstore and have not been tried.

Trade-off: a whole object is streamed in one request, since not every server answers ranges as S3 does (rclone says
200 where 206 is due). A server that stops answering is noticed after STALL_TIMEOUT_S, one that refuses connections in
1 s. Objects are deleted one by one: S3's request for many is a POST, which is not tried again when a connection breaks.
A program killed in mid-upload leaves parts that only a lifecycle rule of the bucket removes. Measured against rclone
on one machine of two busy cores: 130 MB/s up, 200 MB/s down.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from obstore.store import ObjectStore

SCHEMES = ("s3", "gs", "az", "file")
CONNECT_TIMEOUT_S = 5.0
STALL_TIMEOUT_S = 15.0  # without a byte
REQUEST_TIMEOUT_S = 3600.0  # of one object, however large
MAX_RETRIES = 3
RETRY_TIMEOUT_S = 60.0
CHUNK_BYTES = 8 << 20


class ObjectError(RuntimeError):
    """Object storage refused or cannot be reached; the sentence says what to do."""


class ObjectMissing(ObjectError):
    """There is no object of that name, although the bucket answers."""


class Objects:
    """All objects below one URL, by their names relative to it. See :func:`open_store`.

    ``store`` is obstore's own object, bound to ``prefix``; use it inside ``with sentences(url, doing)``.
    Every method raises ObjectError.
    """

    def __init__(self, url: str, store: ObjectStore) -> None:
        self.url, self.store = url, store
        self.prefix = "" if getattr(store, "prefix", None) is None else str(store.prefix)  # type: ignore[union-attr]

    def sizes(self, below: str = "") -> dict[str, int]:
        """Name and bytes of every object, or of those in the folder ``below``, by name. None: the bucket is empty there."""
        import obstore

        with sentences(self.url, "list"):
            pages = obstore.list(self.store, prefix=below or None)
            found = {str(each["path"]): int(each["size"]) for page in pages for each in page}
        return dict(sorted(found.items()))

    def size(self, name: str) -> int:
        """Bytes of one object. Raises ObjectMissing, also where the whole bucket is missing."""
        import obstore

        with sentences(f"{self.url}/{name}", "read"):
            return int(obstore.head(self.store, name)["size"])

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """``length`` bytes (fewer at the end) from ``start`` on, which is below the size. Raises ObjectMissing."""
        import obstore

        with sentences(f"{self.url}/{name}", "read"):
            return bytes(obstore.get_range(self.store, name, start=start, length=length))

    def chunks(self, name: str) -> Iterator[bytes]:
        """One object from its first byte to its last, about CHUNK_BYTES at a time. Raises ObjectMissing."""
        import obstore

        with sentences(f"{self.url}/{name}", "read"):
            for chunk in obstore.get(self.store, name).stream(min_chunk_size=CHUNK_BYTES):
                yield bytes(chunk)

    def read(self, name: str) -> bytes:
        """One whole object. Raises ObjectMissing."""
        return b"".join(self.chunks(name))

    def write(self, name: str, content: bytes | Path) -> None:
        """Put an object, from memory or from a file (read in parts); one of the same name is replaced."""
        import obstore

        with sentences(f"{self.url}/{name}", "write"):
            obstore.put(self.store, name, content)

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects; those that are not there are no error."""
        import obstore

        for name in names:
            with contextlib.suppress(ObjectMissing), sentences(f"{self.url}/{name}", "delete"):
                obstore.delete(self.store, name)


def is_url(place: str | os.PathLike[str]) -> bool:
    """Whether ``place`` names object storage and not a path."""
    return re.match(r"[a-z][a-z0-9+.-]*://", os.fspath(place)) is not None


def check_url(url: str) -> None:
    """Whether ``url`` can be meant; nothing is asked of the network. Raises ObjectError."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise ObjectError(f"{parts.scheme}:// is no object storage known here; use {', '.join(SCHEMES)}")
    if parts.scheme != "file" and (not parts.hostname or "@" in parts.netloc):
        without = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        raise ObjectError(
            f"{without} must be {parts.scheme}://BUCKET/PREFIX, with credentials in the environment "
            "(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY) and never in the URL"
        )
    if parts.query or parts.fragment:
        raise ObjectError(f"{url.partition('?')[0]} must be a plain prefix: remove what follows ? or #")


def open_store(url: str) -> Objects:
    """The objects below ``url``. Nothing is asked of the server before the first use. Raises ObjectError."""
    check_url(url)
    try:
        from obstore.store import from_url
    except ModuleNotFoundError:
        raise ObjectError(
            f"{url} needs obstore, which is not installed here: pip install 'myriad-cluster[objects]'"
        ) from None
    if url.startswith("file:"):
        options: dict[str, Any] = {"mkdir": True}
    else:
        options = {
            "client_options": {
                "allow_http": _endpoint().startswith("http://"),
                "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
                "read_timeout": timedelta(seconds=STALL_TIMEOUT_S),
                "timeout": timedelta(seconds=REQUEST_TIMEOUT_S),
            },
            "retry_config": {
                "max_retries": MAX_RETRIES,
                "retry_timeout": timedelta(seconds=RETRY_TIMEOUT_S),
            },
        }
    with sentences(url, "open"):
        return Objects(url.rstrip("/"), from_url(url, **options))


def _endpoint() -> str:
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    return next((found for name in names if (found := os.environ.get(name))), "https://")


@contextlib.contextmanager
def sentences(url: str, doing: str) -> Iterator[None]:
    """What obstore raises inside becomes ObjectMissing or ObjectError about ``url``; ``doing`` is a verb."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, OSError, ValueError) as error:
        raise _sentence(url, doing, error) from None


def _sentence(url: str, doing: str, error: Exception) -> ObjectError:
    said = str(error).partition("\n\nDebug source")[0]
    code = found[1] if (found := re.search(r"<Code>(\w+)</Code>", said)) else ""
    status = found[1] if (found := re.search(r"status code: (\d{3})", said)) else ""
    if code == "NoSuchBucket":
        bucket = urlsplit(url).netloc
        return ObjectError(f"there is no bucket {bucket} to {doing} {url}: create it, or correct the URL")
    if isinstance(error, FileNotFoundError):
        return ObjectMissing(f"there is no object {url}")
    if "169.254.169.254" in said or "169.254.170.2" in said:
        return ObjectError(
            f"there are no credentials to {doing} {url}: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY "
            "in the environment of `myriad up` and of this command"
        )
    if status in ("401", "403") or type(error).__name__ in ("PermissionDeniedError", "UnauthenticatedError"):
        return ObjectError(
            f"{url} does not let these credentials {doing} ({code or status or 'no permission'}): change their "
            "policy, or the AWS_ variables of the environment"
        )
    if status.startswith("5") or "HTTP error" in said:
        why = f"status {status} {code}".strip() if status else said.rpartition("HTTP error: ")[2]
        where = os.environ.get("AWS_ENDPOINT_URL", "its endpoint").rpartition("@")[2]
        return ObjectError(
            f"{url} cannot be reached to {doing} at {where} ({why}): check the server, the network and AWS_ENDPOINT_URL"
        )
    why = " ".join(filter(None, (status, code))) or said.splitlines()[0]
    return ObjectError(f"{url} could not be used to {doing} ({why}): check the server behind it")

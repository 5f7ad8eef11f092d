"""The store for `s3://`: blobs and records are objects below a prefix of a bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from penstock.backends.fsspec.config import S3Options
from penstock.backends.fsspec.messages import place
from penstock.backends.fsspec.s3.client import S3Client
from penstock.backends.fsspec.s3.upload import PartMemory, S3Writer
from penstock.backends.fsspec.store import Retry, Store
from penstock.core.errors import ConfigError, StorageError
from penstock.core.types import PAGE_BYTES, BlobInfo, Capabilities

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from penstock.backends.fsspec.blob_states import StoreWriter
    from penstock.backends.fsspec.config import FsspecConfig
    from penstock.backends.fsspec.store import Span

_DELETE_AT_ONCE = 1000  # S3's limit
_DELETE_ROUNDS = 5  # some keys of a batch may fail although others do not


class S3Store(Store):
    """Keeps blobs as objects below a prefix; renames and caches nothing."""

    def __init__(self, config: FsspecConfig) -> None:
        """Create the client; connects to nothing yet.

        Raises:
            ConfigError: `options` are not those of S3, or botocore is missing.
        """
        try:
            options = S3Options.model_validate(config.options)
        except ValidationError as error:
            # Only names and reasons: a value may be a secret.
            found = sorted({(str(p["loc"][0]), p["msg"]) for p in error.errors() if p["loc"]})
            bad = ", ".join(f"{name} ({why})" for name, why in found)
            known = ", ".join(S3Options.model_fields)
            msg = f"{config.shown_url}: options for S3 are {known}; wrong: {bad}"
            raise ConfigError(msg) from None
        super().__init__(config)
        retry = Retry(config.attempts, config.retry_total_s)
        self._client = S3Client(config, options, retry=retry)
        self._memory = PartMemory(config.buffer_bytes)

    def find_capabilities(self) -> Capabilities:
        exclusive, notes = self._conditional_puts()
        return Capabilities(
            # Raw frames have whole pages to themselves in any case; more would gain nothing.
            offset_alignment=PAGE_BYTES,
            preferred_io_bytes=self.config.part_bytes,
            preferred_parallel=self.config.parallel,
            exclusive_publish=exclusive,
            notes=notes,
        )

    def writer(self, name: str, *, size_hint: int | None) -> StoreWriter:
        return S3Writer(
            self._client,
            name,
            size_hint=size_hint,
            part_bytes=self.config.part_bytes,
            memory=self._memory,
            uploads=self.transfers,
            feeds=self.feeds,
            checksums=self.config.checksums,
        )

    def fill(self, span: Span) -> None:
        self._client.fill(span)

    def read_record(self, name: str, *, limit_bytes: int) -> bytes | int:
        return self._client.get(name, limit_bytes=limit_bytes)

    def put(self, name: str, data: bytes) -> None:
        self._client.put("publish", name, (memoryview(data),))

    def put_if_absent(self, name: str, data: bytes) -> None:
        self._client.put_if_absent(name, data)

    def list(self, prefix: str) -> Sequence[BlobInfo]:
        skip = len(self._client.prefix)
        return [
            BlobInfo(entry["Key"][skip:], int(entry["Size"]), _seconds(entry["LastModified"]))
            for page in self._client.pages(
                "list_objects_v2", "list", Prefix=self._client.prefix + prefix
            )
            for entry in page.get("Contents", ())
        ]

    def stat(self, name: str) -> BlobInfo:
        needs = ("ContentLength", "LastModified")
        answer = self._client.call("head_object", "stat", name, needs=needs)
        return BlobInfo(name, int(answer["ContentLength"]), _seconds(answer["LastModified"]))

    def delete(self, names: Sequence[str]) -> None:
        for at in range(0, len(names), _DELETE_AT_ONCE):
            self._delete_batch(list(dict.fromkeys(names[at : at + _DELETE_AT_ONCE])))

    def sweep(self, before_s: float) -> None:
        """Abort uploads that were begun, and got their last part, before `before_s`."""
        skip = len(self._client.prefix)
        for page in self._client.pages(
            "list_multipart_uploads", "sweep", Prefix=self._client.prefix
        ):
            for upload in page.get("Uploads", ()):
                name, upload_id = upload["Key"][skip:], upload["UploadId"]
                if not name or _seconds(upload["Initiated"]) >= before_s:
                    continue
                # A long save may still be sending parts of an upload that it began long ago.
                if self._newest_part_s(name, upload_id) < before_s:
                    self._client.abort_upload("sweep", name, upload_id)

    def close(self) -> None:
        super().close()
        self._client.close()

    # -- below ----------------------------------------------------------------------------------

    def _delete_batch(self, names: Sequence[str]) -> None:
        left = {self._client.prefix + name: name for name in names}
        failed: dict[str, Any] = {}
        for _ in range(_DELETE_ROUNDS):
            answer = self._client.call(
                "delete_objects", "delete", "", Delete={"Objects": [{"Key": key} for key in left]}
            )
            # A key that the answer does not name counts as not deleted: the answer may be cut off,
            # or be the page of a gateway.
            failed = {entry.get("Key"): entry.get("Code") for entry in answer.get("Errors", ())}
            gone = {entry.get("Key") for entry in answer.get("Deleted", ())}
            gone.update(key for key, code in failed.items() if code == "NoSuchKey")
            left = {key: name for key, name in left.items() if key not in gone}
            if not left:
                return
        key, name = next(iter(left.items()))
        msg = (
            f"{place('delete', name, self.url)}: {failed.get(key, 'the answer does not name it')} "
            f"({len(left)} of a batch could not be deleted)"
        )
        raise StorageError(msg)

    def _newest_part_s(self, name: str, upload_id: str) -> float:
        """Return the time of the newest part of an upload; 0 if it has none."""
        return max(
            (
                _seconds(part["LastModified"])
                for page in self._client.pages(
                    "list_parts", "sweep", Key=self._client.prefix + name, UploadId=upload_id
                )
                for part in page.get("Parts", ())
            ),
            default=0.0,
        )

    def _conditional_puts(self) -> tuple[bool, tuple[str, ...]]:
        if self.config.conditional_put != "auto":
            return self.config.conditional_put == "yes", ()
        return (True, ()) if self._client.is_aws else self.probe_conditional_puts()


def _seconds(time: datetime) -> float:
    """Return whole seconds: some answers have fractions where others have none."""
    return float(int(time.timestamp()))

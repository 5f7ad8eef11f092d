"""S3, and whatever speaks its protocol."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from penstock.backends.fsspec.config import S3Options
from penstock.backends.fsspec.errors import place
from penstock.backends.fsspec.parts import PartMemory
from penstock.backends.fsspec.retry import Retry
from penstock.backends.fsspec.s3.client import S3Client
from penstock.backends.fsspec.s3.writer import S3Writer
from penstock.backends.fsspec.store import Store
from penstock.core.errors import BlobExistsError, ConfigError, StorageError
from penstock.core.types import PAGE_BYTES, BlobInfo, Capabilities

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from penstock.backends.fsspec.config import FsspecConfig
    from penstock.backends.fsspec.ranges import Span
    from penstock.backends.fsspec.writer import StoreWriter

_DELETE_AT_ONCE = 1000  # S3's limit
_DELETE_ROUNDS = 5  # some keys of a batch may fail where others do not


class S3Store(Store):
    """Blobs are objects below a prefix; nothing is ever renamed or cached."""

    def __init__(self, config: FsspecConfig) -> None:
        """Connects to nothing yet."""
        try:
            options = S3Options.model_validate(config.options)
        except ValidationError as error:
            # Messages never show the values, which may be secrets.
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
        """Tries out conditional puts where nobody knows whether the store has them."""
        exclusive, notes = self._conditional()
        return Capabilities(
            # Raw frames have whole pages to themselves in any case; more would help nobody.
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

    def publish(self, name: str, data: bytes, *, exclusive: bool) -> None:
        if not exclusive:
            self._client.put("publish", name, (memoryview(data),))
        elif self.capabilities.exclusive_publish:
            self._client.put_if_absent(name, data)
        else:
            self.refuse_taken("publish", name)
            self._client.put("publish", name, (memoryview(data),))

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
                name, number = upload["Key"][skip:], upload["UploadId"]
                if not name or _seconds(upload["Initiated"]) >= before_s:
                    continue
                if self._newest_part_s(name, number) < before_s:
                    self._client.abort_upload("sweep", name, number)

    def close(self) -> None:
        super().close()
        self._client.close()

    # -- below ----------------------------------------------------------------------------------

    def _delete_batch(self, names: Sequence[str]) -> None:
        left = {self._client.prefix + name: name for name in names}
        told: dict[str, Any] = {}
        for _ in range(_DELETE_ROUNDS):
            answer = self._client.call(
                "delete_objects", "delete", "", Delete={"Objects": [{"Key": key} for key in left]}
            )
            # What it does not speak of is not gone: an answer may be another's, or cut off.
            told = {entry.get("Key"): entry.get("Code") for entry in answer.get("Errors", ())}
            gone = {entry.get("Key") for entry in answer.get("Deleted", ())}
            gone.update(key for key, code in told.items() if code == "NoSuchKey")
            left = {key: name for key, name in left.items() if key not in gone}
            if not left:
                return
        key, name = next(iter(left.items()))
        msg = (
            f"{place('delete', name, self.url)}: {told.get(key, 'the answer does not name it')} "
            f"({len(left)} of a batch could not be deleted)"
        )
        raise StorageError(msg)

    def _newest_part_s(self, name: str, number: str) -> float:
        """A save that takes long may be at work on an upload begun long ago."""
        return max(
            (
                _seconds(part["LastModified"])
                for page in self._client.pages(
                    "list_parts", "sweep", Key=self._client.prefix + name, UploadId=number
                )
                for part in page.get("Parts", ())
            ),
            default=0.0,
        )

    def _conditional(self) -> tuple[bool, tuple[str, ...]]:
        if self.config.conditional_put != "auto":
            return self.config.conditional_put == "yes", ()
        if self._client.is_aws:
            return True, ()
        probe = f"clock/{secrets.token_hex(8)}"  # where `prune` looks for what was left behind
        try:
            self._client.put("probe", probe, (memoryview(b""),))
        except StorageError as error:
            return False, (f"conditional puts could not be tried out: {error}",)
        try:
            self._client.put_if_absent(probe, b"")
        except BlobExistsError:
            return True, ()
        except StorageError as error:
            return False, (f"conditional puts do not work: {error}",)
        finally:
            self.delete([probe])
        return False, ("the store ignores If-None-Match, so one saver per root",)


def _seconds(time: datetime) -> float:
    """Whole seconds: some answers have fractions where others have none."""
    return float(int(time.timestamp()))

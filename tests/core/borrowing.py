"""Makes checkpoints that borrow blobs of others from a really saved checkpoint."""

from tests.core.forging import forge

from penstock.core.catalog.catalog import Catalog
from penstock.core.format.commit_record import encode_intent
from penstock.core.format.records import (
    IntentRecord,
    blob_uid,
    commit_name,
    data_prefix,
    intent_name,
)

TIME = "2026-01-01T00:00:00Z"
LIMIT = 1 << 30


def borrow(backend, base, step, *, uid, lent="raw", generation=0):
    """Commit a checkpoint with the state of step `base`, whose `lent` blobs it borrows.

    The other blobs are its own. It borrows the base's borrowed blobs from the same save.
    """
    record = Catalog(backend).record(base)
    names = [record.index.name, *(part.name for part in record.parts)]
    found = commit_name(base, record.generation)
    files = {name: backend.read_record(name, limit_bytes=LIMIT) for name in [found, *names]}
    rows = []

    def change(level, value):
        if level == "head":
            value.update(uid=uid, step=step)
            for row in value["blobs"]:
                if blob_uid(row[0]) == record.uid and lent not in row[0]:
                    data = backend.read_record(row[0], limit_bytes=LIMIT)
                    row[0] = row[0].replace(record.uid, uid)
                    backend.publish(row[0], data)
            rows.extend(value["blobs"])
        if level == "body":
            value.update(uid=uid, step=step, generation=generation)
            for entry in (value["index"], *value["parts"]):
                entry["name"] = entry["name"].replace(record.uid, uid)
            value["borrowed"] = sorted(row for row in rows if blob_uid(row[0]) != uid)
            value["bytes_stored"] = sum(size for name, size in rows if blob_uid(name) == uid)
        return value

    references = {blob_uid(blob.name) for blob in record.borrowed} | {record.uid}
    intent = IntentRecord(uid, step, tuple(sorted(references)), "host", 1, TIME, TIME)
    backend.publish(intent_name(uid), encode_intent(intent))
    made = forge(files, change)
    for name in names:
        backend.publish(name.replace(record.uid, uid), made[name])
    backend.publish(commit_name(step, generation), made[found], exclusive=True)
    return Catalog(backend).record(step)


def files_of(backend, uid):
    """The names below a save's folder, without the folder."""
    prefix = data_prefix(uid)
    return {info.name.removeprefix(prefix) for info in backend.list(prefix)}

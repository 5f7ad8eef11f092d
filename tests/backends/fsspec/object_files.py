"""A file system like gcsfs, adlfs and others: a file is stored by its close."""

import io
import threading
import time

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

stored = {}
never = threading.Event()
reached = threading.Event()  # once a call hangs
hanging = set()  # the operations that hang: "write", "read", "delete"
conditions = set()  # the modes of `pipe_file` that the store obeys: "create"
lost_answers = set()  # names whose put loses its answer at the client, which retries
denied = set()  # names that can be put but not read
_putting = threading.Lock()  # makes check and put of a condition one step, as in a store


class _Object(AbstractBufferedFile):
    def _initiate_upload(self):
        self.parts = []

    def _upload_chunk(self, final=False):
        _hang("write")
        self.buffer.seek(0)
        self.parts.append(self.buffer.read())
        if final:
            stored[self.path] = (b"".join(self.parts), time.time())
        return True


def _hang(what):
    if what in hanging:
        reached.set()
        never.wait()


class ObjectFiles(AbstractFileSystem):
    protocol = "gs"

    @classmethod
    def _strip_protocol(cls, path):
        return path.partition("://")[2] if "://" in path else path

    def _open(self, path, mode="rb", block_size=None, **_):
        if mode == "rb":
            return io.BytesIO(stored[path][0])
        return _Object(self, path, mode, block_size=block_size or 5 << 20)

    def info(self, path, **_):
        if path in denied:
            raise PermissionError(path)
        if path not in stored:
            raise FileNotFoundError(path)
        data, modified_s = stored[path]
        return {"name": path, "size": len(data), "type": "file", "mtime": modified_s}

    def ls(self, path, detail=True, **_):
        inside = f"{path.rstrip('/')}/"
        below = [name.removeprefix(inside) for name in sorted(stored) if name.startswith(inside)]
        folders = {rest.split("/")[0] for rest in below if "/" in rest}
        found = [self.info(inside + rest) for rest in below if "/" not in rest]
        found += [{"name": inside + f, "size": 0, "type": "directory"} for f in sorted(folders)]
        if not found:
            raise FileNotFoundError(path)
        return found if detail else [info["name"] for info in found]

    def cat_file(self, path, start=None, end=None, **_):
        if "blobs" in path:
            _hang("read")
        if path not in stored:
            raise FileNotFoundError(path)
        return stored[path][0][start:end]

    def pipe_file(self, path, value, mode="overwrite", **_):
        for _ in range(2 if path in lost_answers else 1):
            with _putting:
                if mode in conditions and path in stored:
                    raise FileExistsError(path)
                stored[path] = (bytes(value), time.time())

    def rm_file(self, path):
        _hang("delete")
        if path not in stored:
            raise FileNotFoundError(path)
        del stored[path]

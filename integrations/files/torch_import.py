"""Reads files of `torch.save`; tensor bytes stay in the file until the save reads them."""

from __future__ import annotations

import errno
import pickle
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from penstock import FormatError, Streamed, UnsupportedStateError
from penstock.integrations.files.source import SourceFile, page_in_soon

if TYPE_CHECKING:
    from typing import BinaryIO


STUB = b"This file of DeepSpeed is kept by Penstock.\n"
"""The beginning of a file that the DeepSpeed adapter writes in place of DeepSpeed's own."""


def read_file(path: Path) -> dict[str, Any]:
    """Return the contents of a file, with its tensors mapped.

    A dict with only tensors, which is a state dict, is put below `model`.

    Raises:
        FormatError: The file is damaged, was written before torch 1.6, or holds no dict.
        UnsupportedStateError: It needs classes that `weights_only` does not allow; the error names
            them.
    """
    content = _read_dict(path)
    return content if _other_than_tensors(content) else {"model": content}


def read_tensors(path: Path) -> dict[str, Any]:
    """Return the tensors of a file that holds only tensors, mapped from the file.

    Raises:
        FormatError: As for `read_file`, or the file holds other objects.
        UnsupportedStateError: As for `read_file`.
    """
    content = _read_dict(path)
    others = _other_than_tensors(content)
    if others:
        msg = f"{path} holds {', '.join(others[:5])}, not tensors only: import the file separately"
        raise FormatError(msg, [str(path)])
    return content


def _other_than_tensors(content: dict[str, Any]) -> list[str]:
    return [n for n, value in content.items() if not isinstance(value, torch.Tensor | Streamed)]


def _read_dict(path: Path) -> dict[str, Any]:
    refuse_stub(path)
    with path.open("rb") as file:
        if file.read(2) != b"PK":
            msg = (
                f"{path} is not in the zip format that torch has used since 1.6, so it cannot be "
                "read piece by piece. Write it again: "
                "`torch.save(torch.load(old, weights_only=True), new)`"
            )
            raise FormatError(msg, [str(path)])
    mapped = MappedFile.of(path)
    content = mapped.streamed(load_safely(path, str(path), mmap=True), {})
    if not isinstance(content, dict) or not content or not all(type(key) is str for key in content):
        msg = f"{path} holds a {type(content).__name__}, not a dict with names: nothing to import"
        raise FormatError(msg, [str(path)])
    return content


@dataclass(frozen=True, slots=True)
class MappedFile(SourceFile):
    """A file with mapped tensors, which later writes to the file would change."""

    def streamed(self, tree: Any, known: dict[object, Streamed]) -> Any:
        """Return a loaded tree with its tensors as `Streamed` that check the file.

        Args:
            tree: The tree, changed in place.
            known: The `Streamed` made so far, to which tensors may be tied.
        """
        if isinstance(tree, torch.Tensor):
            return self._streamed_tensor(tree, known)
        if type(tree) in {dict, OrderedDict}:
            for key, value in tree.items():
                tree[key] = self.streamed(value, known)
        elif type(tree) is list:
            tree[:] = [self.streamed(value, known) for value in tree]
        elif type(tree) is tuple:
            return tuple(self.streamed(value, known) for value in tree)
        return tree

    def _streamed_tensor(
        self, tensor: torch.Tensor, known: dict[object, Streamed]
    ) -> torch.Tensor | Streamed:
        is_plain = (
            type(tensor) in {torch.Tensor, torch.nn.Parameter}
            and tensor.layout is torch.strided
            and tensor.is_cpu
            and not (tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        )
        if not is_plain or not tensor.numel():
            return tensor
        key = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        dtype = str(tensor.dtype).removeprefix("torch.")
        read = partial(self._read, tensor.detach())
        return known.setdefault(key, Streamed(dtype, tensor.shape, read))

    def _read(self, tensor: torch.Tensor, start: int, out: memoryview) -> None:
        tensor = tensor.reshape(tensor.shape or (1,))
        first, stop = start // tensor.itemsize, (start + out.nbytes) // tensor.itemsize
        row = tensor[0].numel()
        # So only the needed rows of a non-contiguous tensor are copied.
        low, high = first // row, -(-stop // row)
        rows = tensor[low:high]
        flat = rows.reshape(-1)[first - low * row : stop - low * row]
        out[:] = flat.contiguous().view(torch.uint8).numpy().data
        page_in_soon(rows.data_ptr() + out.nbytes, out.nbytes)
        self.check()


def refuse_stub(path: Path) -> None:
    """Check that a file is not a stub of the DeepSpeed adapter.

    Raises:
        FormatError: The file is a stub.
    """
    with path.open("rb") as file:
        if file.read(len(STUB)) == STUB:
            msg = (
                f"{path} is a stub: Penstock's adapter of DeepSpeed has saved this checkpoint in a "
                "run already. The text in the file names the run, and the command that exports it"
            )
            raise FormatError(msg, [str(path)])


def load_safely(source: Path | BinaryIO, name: str, *, mmap: bool = False) -> object:
    """Load a file of `torch.save` without running its code.

    Args:
        source: The file.
        name: The file's name in errors.
        mmap: Whether tensors are mapped from the file.

    Raises:
        FormatError: The file is damaged.
        UnsupportedStateError: It needs classes that `weights_only` does not allow; the error names
            them.
    """
    try:
        refused = torch.serialization.get_unsafe_globals_in_checkpoint(source)
        if not isinstance(source, Path):
            source.seek(0)
        if not refused:
            return torch.load(source, map_location="cpu", mmap=mmap, weights_only=True)
    except (OSError, RuntimeError, pickle.UnpicklingError, ValueError, EOFError, KeyError) as error:
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise  # of the file itself; EINVAL is a seek before the start, in a torn file
        # torch's own text advises `weights_only=False`.
        reason = str(error).partition("\n")[0] if isinstance(error, RuntimeError) else "bad pickle"
        msg = f"{name} is damaged, or was not written by torch.save: {reason}"
        raise FormatError(msg, [name]) from error
    msg = (
        f"{name} holds objects of {', '.join(sorted(refused))}, which torch does not load without "
        "running code, so nothing was loaded: leave them out of the file, or, if you trust it, "
        "call torch.serialization.add_safe_globals with these classes, then import_checkpoint"
    )
    raise UnsupportedStateError(msg)

"""The adapters of a PEFT model as a state tree: trained tensors, without the frozen base."""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any

from penstock import UnsupportedStateError
from penstock.integrations import missing_extra

try:
    from peft import PeftModel, get_peft_model_state_dict
except ModuleNotFoundError as error:
    raise missing_extra(error, "peft") from None


def state_of(model: Any, adapter: str | None = None) -> dict[str, Any]:
    """Return the live tensors of an adapter, and all other trained parameters, by name.

    Save and restore `{"model": state_of(model), "optimizer": optimizer}` in place, like a whole
    model. The adapter's tensors have the names of PEFT's own files, without the adapter's name. So
    an export to safetensors is an `adapter_model.safetensors`, and a restore works for an adapter
    of another name. Resized embeddings are included if they are trained.

    Args:
        model: A `PeftModel`, without the wrappers of DDP or FSDP.
        adapter: The name of the adapter; default: the active one.

    Returns:
        The tensors themselves, not copies.

    Raises:
        UnsupportedStateError: `model` is not a `PeftModel`.
    """
    if not isinstance(model, PeftModel):
        msg = f"state_of takes a peft.PeftModel, not a {type(model).__name__}: unwrap it first"
        raise UnsupportedStateError(msg)
    live = model.state_dict(keep_vars=True)
    named = get_peft_model_state_dict(
        model, live, adapter or model.active_adapter, save_embedding_layers=False
    )
    # With prompt learning, PEFT computes new tensors for its files. A restore into those would be
    # lost.
    known = {id(tensor) for tensor in live.values()}
    state = {name: tensor for name, tensor in named.items() if id(tensor) in known}
    held = {id(tensor) for tensor in state.values()}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return state | {name: p for name, p in trained.items() if id(p) not in held}

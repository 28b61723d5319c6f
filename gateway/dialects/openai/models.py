"""Lists and describes models in the format of OpenAI and Anthropic. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gateway.models import GatewayModel

#: The fields in which several other servers give a model's context length.
_CONTEXT: Final = ("context_window", "max_model_len", "max_input_tokens")


def page(models: Sequence[GatewayModel]) -> dict[str, Any]:
    """Return a list of models."""
    ends = {"first_id": models[0].name, "last_id": models[-1].name}
    return {"object": "list", "data": [described(one) for one in models], "has_more": False, **ends}


def described(model: GatewayModel) -> dict[str, Any]:
    """Describe a model in fields of OpenAI, Anthropic and, for the context length, other servers."""
    context = model.context_tokens
    return {
        "id": model.name,
        "object": "model",
        "created": int(model.changed_s),
        "owned_by": "turnkeep",
        "type": "model",
        "makes": model.makes,
        "vision": model.can_see,
        "display_name": model.name,
        "lifecycle": "active",
        "created_at": f"{datetime.fromtimestamp(int(model.changed_s), UTC):%Y-%m-%dT%H:%M:%SZ}",
        **({} if context is None else dict.fromkeys(_CONTEXT, context)),
    }

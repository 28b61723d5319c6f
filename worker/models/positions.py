"""Translates the rotary positions of config.json to fields that mlx-lm reads, or refuses the model.

Newer folders have one object `rope_parameters`. Most of mlx-lm's architectures read only the older fields,
with defaults for missing ones: such a model would load, but its answers would get worse with longer contexts.
`model` calls `translate` before it builds the model, and then `check` on the built model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from .model_files import ModelError, text_config, text_part

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Fields of `rope_parameters`, and the older fields for each; transformers prefers `rope_parameters`.
_MOVED: Final = {
    "rope_theta": ("rope_theta", "rotary_emb_base"),
    "partial_rotary_factor": ("partial_rotary_factor", "rotary_pct"),
    "original_max_position_embeddings": ("original_max_position_embeddings",),
}
_LENGTH: Final = ("original_max_position_embeddings",)
#: Kinds of scaling that have no effect on text, or none within the declared context length.
_NEUTRAL: Final = (None, "default", "mrope", "dynamic")


class _Watched(dict[str, Any]):
    """A mapping that records which of its keys were read."""

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__(content)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def items(self) -> Any:
        self.read.update(self)
        return super().items()


def translate(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return new values for fields of a configuration, so that mlx-lm finds the rotary settings it reads.

    Empty if none must change. The settings record which of their keys the model reads, for `check`.
    """
    key = text_part(config)
    text = config[key] if key else config
    parameters: Any = text.get("rope_parameters")
    changes: dict[str, Any] = {}
    layers = _by_layer(parameters)
    whole = layers.get("full_attention") or next(iter(layers.values()), parameters)
    whole = whole if isinstance(whole, dict) else {}
    scaling = text.get("rope_scaling") or whole
    kind = _kind(scaling) if isinstance(scaling, dict) else None
    if kind not in {None, "default"}:
        scaling = {**{name: text[name] for name in _LENGTH if name in text}, **scaling}
        changes = {name: scaling[name] for name in _LENGTH if name in scaling}
        changes["rope_scaling"] = _Watched(scaling | {"type": kind, "rope_type": kind})
    for name, fields in _MOVED.items():
        changes |= dict.fromkeys(fields, whole[name]) if whole.get(name) is not None else {}
    if "sliding_attention" in layers:
        changes["rope_local_base_freq"] = layers["sliding_attention"]["rope_theta"]
    if layers:
        changes["rope_parameters"] = parameters | {name: _Watched(part) for name, part in layers.items()}
    elif whole:
        changes["rope_parameters"] = _Watched(whole)
    return {key: {**text, **changes}} if key and changes else changes


def check(model: Any, config: Mapping[str, Any]) -> None:
    """Raise `ModelError` if a built model ignores the rotary settings of its translated configuration."""
    text = text_config(config)
    layers, modules = _by_layer(text.get("rope_parameters")), model.modules()
    _check_base(text, layers, modules)
    _check_partial(text, modules)
    _check_scaling(text, layers)


def _check_base(text: dict[str, Any], layers: dict[str, dict[str, Any]], modules: list[Any]) -> None:
    bases = {each.base for each in modules if type(each).__name__ in {"RoPE", "DynamicNTKScalingRoPE"}}
    # Modules that scale frequencies keep no base.
    plain = [part for part in map(dict, layers.values()) if _kind(part) in _NEUTRAL]
    declared = [part["rope_theta"] for part in plain] if layers else [text.get("rope_theta")]
    for base in (base for base in declared if isinstance(base, int | float)):
        if bases and base not in bases:
            used = " and ".join(f"{each:g}" for each in sorted(bases))
            raise _ignored(f"rope_theta {base:g}", f"{text['model_type']} takes {used}")


def _check_partial(text: dict[str, Any], modules: list[Any]) -> None:
    from mlx_lm.models.base import BaseModelArgs

    arguments = [
        value for each in modules for value in vars(each).values() if isinstance(value, BaseModelArgs)
    ]
    parameters = text.get("rope_parameters")
    part = dict.get(parameters, "partial_rotary_factor") if isinstance(parameters, dict) else None
    fields = (*_MOVED["partial_rotary_factor"], "rope_parameters")
    if part not in {None, 1} and not any(hasattr(each, field) for each in arguments for field in fields):
        raise _ignored(f"partial_rotary_factor {part:g}", f"{text['model_type']} rotates all dimensions")


def _check_scaling(text: dict[str, Any], layers: dict[str, dict[str, Any]]) -> None:
    scaling = text.get("rope_scaling")
    # `_Watched.get` would count as a read by the model.
    if not isinstance(scaling, dict) or _kind(scaling) in _NEUTRAL or dict.get(scaling, "factor") == 1:
        return
    key = next((key for key in ("long_factor", "factor") if key in scaling), "type")
    watched = (scaling, text.get("rope_parameters"), *layers.values())
    if not any(isinstance(part, _Watched) and key in part.read for part in watched):
        raise _ignored(f"a rope_scaling of type {_kind(scaling)}", f"{text['model_type']} has none")


def _ignored(what: str, instead: str) -> ModelError:
    return ModelError(
        f"config.json has {what}, but mlx-lm's {instead}; take a model that mlx-lm runs as it is"
    )


def _by_layer(parameters: Any) -> dict[str, dict[str, Any]]:
    """Return the part of `rope_parameters` for each kind of layer; empty if one part is for all layers."""
    parts = dict(parameters) if isinstance(parameters, dict) else {}
    return {name: part for name, part in parts.items() if isinstance(part, dict) and "rope_theta" in part}


def _kind(scaling: dict[str, Any]) -> Any:
    return dict.get(scaling, "rope_type") or dict.get(scaling, "type")
